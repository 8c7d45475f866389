"""Which slot the next snapshot goes into: the arena's choice, by what the ledger knows of all ranks."""

from __future__ import annotations

import logging
import time

from easyckpt.config import CheckpointConfig
from easyckpt.errors import StorageError
from easyckpt.memory.arena import Arena
from easyckpt.memory.slot import Slot
from easyckpt.saving.ledger import Ledger
from easyckpt.state.capture import Capture

logger = logging.getLogger("easyckpt")

#: Room in a slot's tail beside what the layout needs now: objects grow by a few digits from step to step.
TAIL_SLACK_BYTES = 64 << 10
NO_MEMORY = "there is no memory for a snapshot"


class Slots:
    """Belongs to the training thread."""

    def __init__(self, arena: Arena, ledger: Ledger, config: CheckpointConfig) -> None:
        self._arena, self._ledger, self._config = arena, ledger, config
        self._first = True
        self._failure = self._told = ""

    def acquire(self, step: int, capture: Capture, timeline: str, *, deadline: float | None = None) -> Slot | None:
        """A slot for the snapshot of `step`, made or grown in the background where none is large enough.

        None where none is free, until `deadline` (by the monotonic clock) if that is given, or where memory turns out
        to hold none at all, or when all saving has ended meanwhile.
        """
        slot = self._try(step, capture, timeline)
        while slot is None and deadline is not None and self._arena.count > 0 and time.monotonic() < deadline:
            if self._ledger.fatal is not None:
                break  # all ranks raise it at the same step, not at this one alone
            with self._ledger.lock:
                # The arena may also have grown meanwhile, which rings no bell here.
                self._ledger.changed.wait(0.05)
            slot = self._try(step, capture, timeline)
        return slot

    def why_none(self, capture: Capture) -> str:
        """In words, why `acquire` has given nothing."""
        if self._arena.count == 0:
            return NO_MEMORY
        if self._failure:
            return self._failure
        return "no slot is free" if self._arena.ready(capture.layout.image_bytes) else "memory is growing"

    def _try(self, step: int, capture: Capture, timeline: str) -> Slot | None:
        self._failure = ""
        try:
            self._reserve(capture)
            with self._ledger.lock:
                slot = self._take(step, capture.layout.image_bytes, timeline)
            self._told = self._told if slot is None else ""
            return slot
        except StorageError as error:
            # Not raised: this is one rank, and the others would wait for it in their next collective.
            self._failure = str(error)
            if self._failure != self._told:
                self._told = self._failure
                logger.warning("no slot for the snapshot of step %d (nor later, until that changes): %s", step, error)
            return None

    def _reserve(self, capture: Capture) -> None:
        layout = capture.layout
        tail = len(layout.encoded) + 2 * len(capture.objects) + TAIL_SLACK_BYTES
        if not self._arena.ready(layout.image_bytes):
            self._arena.ensure(layout.image_bytes, tail)
        if self._first:
            # The very first snapshot is worth waiting for: a job killed before it has nothing.
            self._arena.wait_ready(self._config.peer_timeout)
            self._first = False

    def _take(self, step: int, nbytes: int, timeline: str) -> Slot | None:
        floor = self._ledger.floor
        keep_from = floor + (self._arena.count == 1)  # a single slot can only be written over: the arena has warned
        slot = self._arena.acquire(step, nbytes, keep_from if floor >= 0 else None, self._ledger.held())
        if slot is None and self._drop_useless(timeline):
            slot = self._arena.acquire(step, nbytes, keep_from if floor >= 0 else None, self._ledger.held())
        return slot

    def _drop_useless(self, timeline: str) -> bool:
        """Give up snapshots that can never become the floor, since another rank has skipped theirs.

        Ranks that keep such snapshots, each of other steps, would hold no step in common any more, and skip for ever.
        """
        useless = self._ledger.useless - self._ledger.held()
        return bool(useless and self._arena.drop(lambda meta: meta.step in useless and meta.timeline == timeline))
