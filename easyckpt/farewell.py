"""How a Checkpointer ends: what is not durable is made so, or told; then it lets go of what it holds.

It lets go in order, each step whatever becomes of the others, in bounded time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from easyckpt import ending
from easyckpt.errors import EasyckptError, UsageError
from easyckpt.events import EventLog, Warned
from easyckpt.opening import OpenedRoot
from easyckpt.saving import remains
from easyckpt.saving.emergency import SignalWatcher
from easyckpt.saving.housekeeper import Housekeeper
from easyckpt.saving.parts import SaverParts
from easyckpt.saving.saver import Saver

logger = logging.getLogger("easyckpt")

#: Seconds that background threads get to write out logs and let go at the end.
FAREWELL_SECONDS = 10.0
#: Seconds that the coordinator's thread gets to end after that.
LAST_WORDS_SECONDS = 1.0


class Farewell:
    """Of one Checkpointer. A storage that hangs must not keep the process from ending."""

    def __init__(self, parts: SaverParts, saver: Saver, opened: OpenedRoot, housekeeper: Housekeeper) -> None:
        self._parts, self._saver, self._opened, self._housekeeper = parts, saver, opened, housekeeper
        self.signals: SignalWatcher | None = None
        """Watches signals for this Checkpointer, if anything does."""
        self.begun = False
        """It has come to its end, whichever: nothing is saved any more."""
        self.undurable: EasyckptError | None = None
        """What `close` has to raise still."""
        self._hangs = ""
        """What has not ended in time, in words."""

    def close(self, *, owes: bool, keep_arena: bool) -> None:
        """Commit the newest snapshot and let go; leaves in `undurable` what has gone wrong, if anything is owed."""
        try:
            self.begun = True
            self._saver.close(self._parts.config.close_timeout)
        except BaseException as error:
            if not isinstance(error, EasyckptError) or isinstance(error, UsageError):  # (a signal handler's)
                self._close_interrupted()
                raise
            self.undurable = error if owes else None
        done = self.undurable is None and self._saver.all_committed()
        self._let_go(remove_arena=done and not keep_arena, linger=FAREWELL_SECONDS)

    def _close_interrupted(self) -> None:
        try:
            self._drain()
        finally:
            self.undurable = self._saver.lost("close() was interrupted")
            self._let_go(remove_arena=False, linger=0.0)

    def abandon(self) -> None:
        """End after an exception: start nothing new, drain for a bounded time, keep what is in memory."""
        try:
            self.begun = True
            self._drain()
        finally:
            self._let_go(remove_arena=False, linger=0.0)

    def leave(self, *, keep_arena: bool) -> None:
        """End where nobody wants the newest snapshot on storage: what was to be flushed has been waited for."""
        try:
            self.begun = True
            self._saver.lose_window()
            self._parts.coordinator.abort(self._parts.config.close_timeout)
        finally:
            self._let_go(remove_arena=not keep_arena, linger=FAREWELL_SECONDS)

    def _drain(self) -> None:
        coordinator, events = self._parts.coordinator, self._parts.events
        try:
            coordinator.offer(None)
            self._saver.lose_window()
            coordinator.see_emergency_through(lambda: self.signals is not None and self.signals.flushing)
            if not coordinator.abort(self._parts.config.exception_drain_timeout):
                events.emit(Warned(message="a flush was still running when the job ended in an exception"))
        except KeyboardInterrupt:
            events.emit(Warned(message="interrupted again: what was being flushed is abandoned"))
            coordinator.hurry()
        remains.say_after_exception(self._parts, ending.ends_by())

    def _let_go(self, *, remove_arena: bool, linger: float) -> None:
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
        if self.signals is not None:
            steps = [self.signals.stop, *steps, self.signals.pass_on]
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
