"""The end of a process that did not close its Checkpointers: drain them, and let no failure pass for success."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Protocol


class Endable(Protocol):
    """What a process must not end without ending."""

    def close(self) -> None:
        """End cleanly; raises what was not durable."""

    def abandon(self) -> None:
        """End after an uncaught exception: start nothing new, drain for a bounded time."""


_open: list[Endable] = []
_pid = os.getpid()
_failed = False
_uncaught = False
_previous_hook = sys.excepthook


def watch(endable: Endable) -> None:
    """`endable` is ended at the end of the process, unless `forget` comes first."""
    global _pid, _previous_hook
    if os.getpid() != _pid:  # a forked child that makes Checkpointers of its own
        _pid = os.getpid()
        _open.clear()
    if sys.excepthook is not _note_uncaught:
        _previous_hook = sys.excepthook
        sys.excepthook = _note_uncaught
    _open.append(endable)


def forget(endable: Endable) -> None:
    """`endable` has ended."""
    if endable in _open:
        _open.remove(endable)


def _note_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    global _uncaught
    if threading.current_thread() is threading.main_thread():
        _uncaught = True
    _previous_hook(kind, error, trace)


def _end_all() -> None:
    global _failed
    if os.getpid() != _pid:
        return
    for endable in list(_open):
        try:
            endable.abandon() if _uncaught else endable.close()
        except BaseException:  # noqa: BLE001 - nobody is left to catch it: it is shown, and makes the exit code
            _failed = True
            print("easyckpt: the last save is NOT durable:", file=sys.stderr)  # noqa: T201 - logging may be gone
            traceback.print_exc()


def _exit_code() -> None:
    if _failed and os.getpid() == _pid:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exception in an exit handler alone would end in exit code 0


# Handlers run in reverse order: ours for the exit code was registered before any that a program registers later.
atexit.register(_exit_code)
atexit.register(_end_all)
