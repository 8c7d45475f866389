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
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

logger = logging.getLogger("easyckpt")

_libc = ctypes.CDLL(None, use_errno=True)


class SignalWatcher:
    """Watches `signals` from construction (on the main thread) until `stop`.

    `announce` starts the emergency flush; `wait(seconds)` returns True once it is over. Afterwards the previous
    disposition takes effect, also when the main thread never comes back.
    """

    def __init__(
        self,
        signals: Sequence[str],
        *,
        deadline: float,
        announce: Callable[[], None],
        wait: Callable[[float], bool],
        takes_over: Callable[[], bool],
    ) -> None:
        self._numbers = [signal.Signals[name] for name in signals]
        self._deadline, self._announce, self._wait, self._takes_over = deadline, announce, wait, takes_over
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}
        self._redelivering = False
        self._ended = threading.Event()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in self._numbers:
            self._previous[number] = signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._run, name="easyckpt-signals", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Put handlers and descriptor back. On the main thread; elsewhere the handlers stay, and only pass on."""
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        self._ended.set()
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, signal.SIG_DFL if previous is None else previous)
            current = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(self._previous_fd if current == self._write_fd else current)
        with contextlib.suppress(OSError):
            os.write(self._write_fd, b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Python's handler, on the main thread, whenever it gets there. Takes no lock."""
        previous = self._previous.get(number)
        inert = os.getpid() != self._pid or self._ended.is_set()
        if (self._redelivering or inert) and callable(previous):
            previous(number, frame)
        elif inert and previous == signal.SIG_DFL:
            _deliver_default(number)

    def _run(self) -> None:
        while True:
            select.select([self._read_fd], [], [])
            with contextlib.suppress(BlockingIOError):
                for number in os.read(self._read_fd, 64):
                    self._pass_on_byte(number)
                    if number in self._previous and not self._redelivering:
                        self._react(number)
            if self._ended.is_set():
                return

    def _pass_on_byte(self, number: int) -> None:
        if number and self._previous_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._previous_fd, bytes([number]))

    def _react(self, number: int) -> None:
        name = signal.Signals(number).name
        begun = time.monotonic()
        logger.warning("%s has come: the newest snapshot is flushed at once", name)
        self._announce()
        in_time = self._wait(self._deadline)
        if not in_time:
            logger.error("%s: the emergency flush did not end within %g s", name, self._deadline)
        # A program that watches `preempted` ends its loop cleanly by itself; it is given the rest of the time.
        while self._takes_over() and time.monotonic() - begun < self._deadline and not self._ended.is_set():
            self._ended.wait(0.05)
        if not self._ended.is_set():
            self._redeliver(number)

    def _redeliver(self, number: int) -> None:
        previous = self._previous[number]
        if previous == signal.SIG_IGN:
            return
        self._redelivering = True
        if callable(previous):
            os.kill(os.getpid(), number)  # the main thread runs the user's handler out of ours
        else:
            _deliver_default(number)


def _deliver_default(number: int) -> None:
    """Let the signal do what it does by default. `signal.signal` would need the main thread; C does not."""
    _libc.signal(number, None)
    os.kill(os.getpid(), number)
