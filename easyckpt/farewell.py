"""How a Checkpointer lets go of what it holds: in order, each step whatever becomes of the others, in bounded time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from easyckpt.errors import EasyckptError
from easyckpt.events import EventLog, Warned
from easyckpt.opening import OpenedRoot
from easyckpt.saving.emergency import SignalWatcher
from easyckpt.saving.housekeeper import Housekeeper
from easyckpt.saving.parts import SaverParts

logger = logging.getLogger("easyckpt")

#: Seconds that background threads get to write out logs and let go at the end.
FAREWELL_SECONDS = 10.0
#: Seconds that the coordinator's thread gets to end after that.
LAST_WORDS_SECONDS = 1.0


class Farewell:
    """Of one Checkpointer. A storage that hangs must not keep the process from ending."""

    def __init__(
        self, parts: SaverParts, opened: OpenedRoot, housekeeper: Housekeeper, signals: SignalWatcher | None
    ) -> None:
        self._parts, self._opened, self._housekeeper, self._signals = parts, opened, housekeeper, signals
        self._hangs = ""
        """What has not ended in time, in words."""

    def let_go(self, *, remove_arena: bool, linger: float) -> None:
        """Where one of the steps is interrupted, the others follow all the same.

        `linger`: seconds that other ranks get to hear the last of what was said to them.
        """
        parts = self._parts
        steps: list[Callable[[], object]] = [
            parts.stager.close,
            parts.accumulation.close,
            lambda: self._end_flusher(FAREWELL_SECONDS),
            lambda: parts.coordinator.desert(LAST_WORDS_SECONDS),
            lambda: self._end_flusher(LAST_WORDS_SECONDS),  # Ctrl-C may have ended the waiting at once
            lambda: self._housekeeper.ask_to_stop(self._last_duty()),
            self._end_housekeeping,
            lambda: parts.arena.close(remove=remove_arena, keep_owner=self._hangs != ""),
            parts.mailbox.close,
            lambda: parts.channel.close(linger),
            lambda: parts.events.close(write=self._hangs == ""),
        ]
        if self._signals is not None:
            steps = [self._signals.stop, *steps, self._signals.pass_on]
        with contextlib.ExitStack() as last_first:
            for step in reversed(steps):
                last_first.callback(step)

    def _end_flusher(self, seconds: float) -> None:
        self._hangs = "a flush is still running"  # also where Ctrl-C ends the waiting
        if self._parts.flusher.stop(seconds):
            self._hangs = ""

    def _last_duty(self) -> Callable[[], None] | None:
        """What the housekeeper is to do last: give the lease back. Not while a flush runs, which goes on under it."""
        return None if self._hangs else lambda: release_lease(self._opened, self._parts.events)

    def _end_housekeeping(self) -> None:
        if not self._housekeeper.stop(FAREWELL_SECONDS, self._last_duty()):
            self._hangs = self._hangs or "storage does not answer"
        if self._hangs:
            logger.warning(
                "%s: %s after %g s: the newest log lines may be missing, and this process owns the root until it ends",
                self._opened.storage.root,
                self._hangs,
                FAREWELL_SECONDS,
            )


def release_lease(opened: OpenedRoot, events: EventLog) -> None:
    """Give the root back, where this rank owns it. What storage refuses is told."""
    if opened.lease is not None:
        try:
            opened.lease.release()
        except (EasyckptError, OSError) as error:
            events.emit(Warned(message=f"giving the lease back failed: {error}"))
