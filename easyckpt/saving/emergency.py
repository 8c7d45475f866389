"""A signal asks for the newest snapshot to become durable, at once and without the help of the training thread.

Python runs signal handlers between bytecodes of the main thread, so behind a long C call they come too late. The byte
that C writes to the wakeup descriptor comes at once: a background thread reads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

logger = logging.getLogger("easyckpt")

_libc = ctypes.CDLL(None, use_errno=True)
#: Set in a byte that our handler writes; signals have numbers up to 64.
_FROM_PYTHON = 0x80
_watching: weakref.WeakSet[SignalWatcher] = weakref.WeakSet()
#: Ended where nothing can be put back: that is made up for when the next one begins, or ends, on the main thread.
_retired: list[SignalWatcher] = []


def _after_fork() -> None:
    """A child shares our pipe: a signal of its own (a pool that is terminated) would reach the parent's watcher."""
    for watcher in list(_watching):
        watcher.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


class SignalWatcher:
    """Watches `signals` from construction (on the main thread) until `stop`.

    `flush(seconds)` has the newest snapshot flushed and waits that long for it; False when it takes longer. Afterwards
    the previous disposition takes effect, also when the main thread never comes back. So it is for each signal that
    comes; one of the same kind that comes meanwhile is the same to the program, as signals are.

    A program that `takes_over` ends by itself, for which it gets the rest of `deadline` - but not once it is `stuck`.
    """

    def __init__(
        self,
        signals: Sequence[str],
        *,
        rank: int,
        deadline: float,
        flush: Callable[[float], bool],
        takes_over: Callable[[], bool],
        stuck: Callable[[], bool],
    ) -> None:
        self._numbers, self._rank = [signal.Signals[name] for name in signals], rank
        self._deadline, self._flush, self._takes_over, self._stuck = deadline, flush, takes_over, stuck
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}
        self._reached: dict[int, float] = {}
        """Signals for which Python's handler was called, and when; the watcher has not done its part of them yet."""
        self._flushed: set[int] = set()
        """Signals whose flush has ended, while the program is given time to end by itself."""
        self._answered: set[int] = set()
        """Signals of which the watcher has done its part: the next call of Python's handler is for the effect."""
        self._own: list[int] = []
        """Signals that the watcher itself has sent and not read yet."""
        self._put_back: set[int] = set()
        self._unanswered: int | None = None
        """A signal that came too close to `stop` to be redelivered."""
        self._ended = threading.Event()
        self._woken: set[int] = set()
        """Signals of which C's byte was read, and Python's handler will write its own."""
        _put_back_retired()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._previous_file = _file_of(self._previous_fd)
        for number in self._numbers:
            self._previous[number] = signal.signal(number, self._handle)
        _watching.add(self)
        self._thread = threading.Thread(target=self._run, name="easyckpt-signals", daemon=True)
        self._thread.start()

    @property
    def flushing(self) -> bool:
        """On the main thread: whether a signal has come whose flush has not ended, if it has begun at all."""
        soonest = time.monotonic() - self._deadline  # what came before is waited for no longer, whatever became of it
        reached = dict(self._reached).items()
        return not self._ended.is_set() and any(at > soonest and n not in self._flushed for n, at in reached)

    def stop(self) -> None:
        """Put handlers and descriptor back. On the main thread; elsewhere they stay for now, and only pass on."""
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        self._ended.set()
        _watching.discard(self)
        for watcher in [*_watching, *_retired]:
            watcher._skip(self)
        on_main = threading.current_thread() is threading.main_thread()
        if on_main:
            self._put_all_back()
        with contextlib.suppress(OSError):
            os.write(self._write_fd, b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if on_main:
            self._close_pipe()
            _put_back_retired()
        else:
            self._retire()

    def _put_all_back(self) -> None:
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                self._put_back.add(number)
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        current = signal.set_wakeup_fd(-1)
        if current != self._write_fd:
            signal.set_wakeup_fd(current)
        elif self._previous_is_there():
            signal.set_wakeup_fd(self._previous_fd)

    def _retire(self) -> None:
        """Python goes on writing to our descriptor, and the main thread may be about to: nobody else gets its number.

        What is written goes to whoever had the wakeup descriptor before, or stays in the pipe.
        """
        if self._previous_is_there():
            with contextlib.suppress(OSError):
                os.dup2(self._previous_fd, self._write_fd, inheritable=False)
        _retired.append(self)

    def _close_pipe(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _previous_is_there(self) -> bool:
        return self._previous_file is not None and self._previous_file == _file_of(self._previous_fd)

    def _skip(self, ended: SignalWatcher) -> None:
        """If `ended` was what this watcher found and passes on to: what that found takes its place."""
        if self._previous_fd == ended._write_fd:
            self._previous_fd, self._previous_file = ended._previous_fd, ended._previous_file
        for number, previous in self._previous.items():
            if previous == ended._handle:
                self._previous[number] = ended._previous[number]

    def pass_on(self) -> None:
        """After `stop`, once all else is done: a signal that came meanwhile has its effect now."""
        if self._unanswered is not None and os.getpid() == self._pid:
            os.kill(os.getpid(), self._unanswered)

    def leave_to_parent(self) -> None:
        """In a forked child: signals that come to it are its own."""
        current = signal.set_wakeup_fd(-1)
        if current >= 0 and current != self._write_fd:
            signal.set_wakeup_fd(current)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Python's handler, on the main thread, whenever it gets there. Takes no lock."""
        previous = self._previous.get(number)
        if os.getpid() == self._pid and not self._ended.is_set() and number not in self._answered:
            self._reached[number] = time.monotonic()
            with contextlib.suppress(OSError):  # somebody (asyncio) may have taken the wakeup descriptor since
                os.write(self._write_fd, bytes([_FROM_PYTHON | number]))
            return
        self._answered.discard(number)
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            _deliver_default(number)

    def _run(self) -> None:
        while not self._ended.is_set():
            select.select([self._read_fd], [], [])
            come = self._read()
            while come:
                number = come.pop(0)
                begun = time.monotonic()
                self._react(number, begun)
                come = [other for other in [*come, *self._read()] if other != number]
                self._have_effect(number)

    def _read(self) -> list[int]:
        """The signals that have come, each once."""
        come: list[int] = []
        try:
            data = os.read(self._read_fd, 256)
        except BlockingIOError:
            return come
        for byte in data:
            number = byte & ~_FROM_PYTHON
            if byte == number and number in self._own:
                self._own.remove(number)
                continue
            if byte == number:
                self._pass_on_byte(number)
            if number in self._previous:
                known = byte != number and number in self._woken
                (self._woken.discard if byte != number else self._woken.add)(number)
                if not known and number not in come:
                    come.append(number)
        return come

    def _pass_on_byte(self, number: int) -> None:
        if number and self._previous_is_there():
            with contextlib.suppress(OSError):
                os.write(self._previous_fd, bytes([number]))

    def _react(self, number: int, begun: float) -> None:
        name = signal.Signals(number).name
        logger.warning("rank %d: %s has come: the newest snapshot is flushed at once", self._rank, name)
        if not self._flush(self._deadline):
            what = "the emergency flush did not end within"
            logger.error("rank %d: %s: %s %g s", self._rank, name, what, self._deadline)
        self._flushed.add(number)
        # A program that watches `preempted` ends its loop cleanly by itself; it is given the rest of the time.
        while self._takes_over() and time.monotonic() - begun < self._deadline and not self._ended.is_set():
            if self._stuck():
                break
            self._ended.wait(0.05)

    def _have_effect(self, number: int) -> None:
        # A handler that the program has put over ours has run, or will: what it does not pass on to ours ends there.
        self._answered.add(number)
        ours = number in self._reached or number in self._put_back or signal.getsignal(number) == self._handle
        self._reached.pop(number, None)
        self._flushed.discard(number)
        if ours and not self._ended.is_set():
            self._redeliver(number)
        elif ours and not self._takes_over():
            self._unanswered = number

    def _redeliver(self, number: int) -> None:
        previous = self._previous[number]
        if number not in self._answered:
            return  # a handler over ours has passed it on this very moment
        if previous == signal.SIG_IGN:
            self._answered.discard(number)
        elif callable(previous):
            self._own.append(number)
            os.kill(os.getpid(), number)  # the main thread runs the user's handler out of ours
        else:
            _deliver_default(number)


def _put_back_retired() -> None:
    """On the main thread."""
    while _retired:
        ended = _retired.pop()
        ended._put_all_back()
        ended._close_pipe()


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """What is open under a number, which may be something else by the time that it is used again."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _deliver_default(number: int) -> None:
    """Let the signal do what it does by default. `signal.signal` would need the main thread; C does not."""
    _libc.signal(number, None)
    os.kill(os.getpid(), number)
