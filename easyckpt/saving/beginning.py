"""The beginning of a line of training: before its first save, by all ranks together."""

from __future__ import annotations

import threading
import time
from concurrent import futures

from easyckpt.distributed.agree import done_by_rank_0
from easyckpt.errors import NotLoaded, StorageError
from easyckpt.format.manifest import RootRecord
from easyckpt.saving.line import Origin
from easyckpt.saving.parts import SaverParts
from easyckpt.saving.staging import SnapshotIdentity

#: Between two looks at what the flusher's thread does for the training thread.
POLL_SECONDS = 0.05


def begin_line(parts: SaverParts, origin: Origin | None) -> SnapshotIdentity:
    """Rank 0 opens the line that goes on from `origin` in the root, every rank drops what lies past the fork.

    `origin` is None where nothing was loaded. Returns what the line's snapshots are told by.
    """

    def work() -> dict[str, object]:
        if origin is None and parts.arena.sealed():
            raise NotLoaded("a run before has left snapshots in shared memory: call load() before the first save")
        record, committed = _opened_line(parts, origin)
        return {"timeline": record.timelines[-1].id, "committed": committed}

    timeout = parts.config.peer_timeout
    answer = done_by_rank_0(parts.channel, parts.ranks, "the first save", work, timeout)
    timeline, committed = str(answer["timeline"]), int(answer["committed"])
    kept = None if origin is None or origin.timeline is None else (origin.timeline, origin.step)
    parts.arena.drop(lambda meta: (meta.timeline, meta.step) != kept)
    holds = kept is not None and any((meta.timeline, meta.step) == kept for meta in parts.arena.sealed())
    memory = {"holds": holds, "none": parts.arena.count == 0}
    answers = parts.channel.exchange("the first save: what is in memory", memory, timeout)
    everywhere = all(answer["holds"] for answer in answers) and not (origin is not None and origin.again)
    parts.coordinator.ledger.blocking |= any(answer["none"] for answer in answers)
    parts.coordinator.begin_line(timeline, committed=committed, adopted=kept if everywhere else None)
    return SnapshotIdentity(
        run=parts.run,
        arena_id=parts.arena_id,
        incarnation=parts.incarnation,
        timeline=timeline,
        rank=parts.ranks.rank,
        world_size=parts.ranks.world_size,
    )


def _opened_line(parts: SaverParts, origin: Origin | None) -> tuple[RootRecord, int]:
    """Rank 0: have the line opened on the flusher's thread, behind a flush that a signal may have begun.

    Other ranks wait in the channel, which belongs to this thread: it tells them that the other one gets on.
    """
    root, config, got_on = parts.storage.root, parts.config, threading.Event()
    future = parts.flusher.open_line(origin, parts.metrics, incarnation=parts.incarnation, busy=got_on.set)
    limit = config.commit_timeout + 2 * config.peer_timeout  # what a flush may take at most
    begun = moved = time.monotonic()
    try:
        while not futures.wait([future], POLL_SECONDS).done:
            now = time.monotonic()
            if got_on.is_set() or not future.running():
                got_on.clear()
                moved = now
                parts.channel.busy()
            if now - begun > limit and future.cancel():
                raise StorageError(f"{root}: a flush before the first save has not ended for {limit:g} s")
            if now - moved > config.peer_timeout and not parts.ranks.alone:
                patience = config.peer_timeout
                raise StorageError(f"{root}: no answer for {patience:g} s, while a line of training was opened")
        return future.result()
    finally:
        future.cancel()  # what was given up, or interrupted, is not done later
