"""The end of a process that did not close its Checkpointers: drain them, and let no failure pass for success."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from multiprocessing import parent_process, util
from typing import Protocol


class Endable(Protocol):
    """What a process must not end without ending."""

    def close(self) -> None:
        """End cleanly; raises what was not durable."""

    def abandon(self) -> None:
        """End after an uncaught exception: start nothing new, drain for a bounded time."""


#: multiprocessing ends its processes by itself, without exit handlers where they were forked. It calls what has a
#: higher priority first: ours before the pools and queues that a program may need, the exit code after all of these.
FIRST, LAST = 1000, -1000

_open: list[Endable] = []
_pid = os.getpid()
_finalized_pid = -1
_failed = False
_survived: BaseException | None = None
"""The newest exception that was shown as an uncaught one, after which the program has gone on."""


def watch(endable: Endable) -> None:
    """`endable` is ended at the end of the process, unless `forget` comes first."""
    global _pid, _finalized_pid, _failed
    if os.getpid() != _pid:  # a forked child that makes Checkpointers of its own
        _pid, _failed = os.getpid(), False
        _open.clear()
    if _finalized_pid != _pid and parent_process() is not None:
        _finalized_pid = _pid
        util.Finalize(None, _end_all, exitpriority=FIRST)
        util.Finalize(None, _exit_code, exitpriority=LAST)
    _open.append(endable)


def forget(endable: Endable) -> None:
    """`endable` has ended."""
    if endable in _open:
        _open.remove(endable)


def goes_on() -> None:
    """The program trains: no exception that was shown by now has ended it."""
    global _survived
    _survived = getattr(sys, "last_value", None)


def is_clean(error: BaseException | None) -> bool:
    """Whether a program that ends by `error` ends well."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))


def ends_by() -> BaseException | None:
    """The exception that passes, or that has ended the program."""
    passing = sys.exc_info()[1]  # multiprocessing ends its processes while it passes
    if passing is not None:
        return passing
    # The interpreter keeps there what it shows as uncaught, and so does an interactive one, which goes on.
    shown: BaseException | None = getattr(sys, "last_value", None)
    return None if shown is _survived or hasattr(sys, "ps1") else shown


def _end_all() -> None:
    global _failed
    if os.getpid() != _pid:
        return
    abandoned = not is_clean(ends_by())
    while _open:
        endable = _open.pop(0)
        try:
            endable.abandon() if abandoned else endable.close()
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
