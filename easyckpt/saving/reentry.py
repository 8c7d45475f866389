"""Calls that must not be made while their own thread is inside one: they would wait for a lock that it holds.

Signal handlers make such calls: Python runs them on the main thread, wherever that is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from easyckpt.errors import UsageError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Inside = set[int]
"""The threads that are inside a call. Changed without a lock, each thread for itself."""


class Guarded(Protocol):
    """An object with calls that exclude each other on one thread."""

    _inside: Inside
    """Shared by all that excludes each other."""


Owner = TypeVar("Owner", bound=Guarded)


def refuse(what: str) -> UsageError:
    """Why `what` cannot be done here."""
    return UsageError(
        f"{what} was called inside of another call of the same Checkpointer on the same thread, as by a signal handler "
        "that interrupts it. Set a flag in the handler and call save() in the training loop, or leave the signal to "
        "the Checkpointer (signals=..., and `preempted` in the loop)"
    )


def entered(
    inside: Inside, method: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call `method` with this thread counted as inside."""
    me = threading.get_ident()
    # Ctrl-C may come between any two lines: before `add`, and once more before the first `discard`.
    try:
        try:
            inside.add(me)
            return method(*args, **kwargs)
        finally:
            inside.discard(me)
    finally:
        inside.discard(me)


def guarded(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Have `method` raise UsageError where its thread is inside a guarded call of the same object already."""

    @functools.wraps(method)
    def call(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if threading.get_ident() in self._inside:
            raise refuse(f"{method.__name__}()")
        return entered(self._inside, method, self, *args, **kwargs)

    return call
