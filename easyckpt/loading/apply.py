"""Deciding together, then applying: no rank changes anything before all have verified all that they will apply."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Sequence

from easyckpt.distributed.rendezvous import Channel
from easyckpt.errors import DamagedCheckpoint, PartlyApplied, PeerError
from easyckpt.loading.resolve import Candidate
from easyckpt.loading.snapshot import Snapshot
from easyckpt.loading.verify import Check, Open, Vote, verify

logger = logging.getLogger("easyckpt")

#: Puts a snapshot that all ranks found good into the live objects.
Apply = Callable[[Snapshot], None]
#: Hears why a candidate was passed over.
Skipped = Callable[[Candidate, str], None]


def _warn(candidate: Candidate, reason: str) -> None:
    logger.warning("cannot restore %s, trying the one before: %s", candidate, reason)


def restore_agreed(
    channel: Channel,
    candidates: Sequence[Candidate],
    open_candidate: Open,
    check: Check,
    apply: Apply,
    *,
    timeout: float,
    skipped: Skipped = _warn,
) -> Candidate | None:
    """Restore the first of `candidates` that every rank finds whole; all ranks call it and all get the same.

    Rank 0's list counts. Damage on any rank makes all ranks go on to the next candidate; `skipped` hears of it on
    every rank. Returns None when there were no candidates. Raises on every rank: DamagedCheckpoint when all of them
    are damaged (never a silent start from nothing), StateMismatch or WorldSizeChanged when one is whole but not for
    this job, the first error of any other kind; in all these cases nothing was applied. PartlyApplied when applying
    failed on some rank, or a rank was lost meanwhile. `timeout` bounds the wait for a rank that gets on no more.
    """
    sent = channel.broadcast("restore: candidates", [candidate.to_json() for candidate in candidates], timeout)
    agreed = [Candidate.from_json(value) for value in sent] if isinstance(sent, list) else []
    passed_over = []
    for candidate in agreed:
        with _collector_paused():
            reason = _try(channel, candidate, open_candidate, check, apply, timeout=timeout)
        if reason is None:
            return candidate
        skipped(candidate, reason)
        passed_over.append(f"\n  - {candidate}: {reason}")
    if agreed:
        raise DamagedCheckpoint(
            f"none of {len(agreed)} candidates can be restored, and training is not started from nothing by itself:"
            f"{''.join(passed_over)}\nCopy one of them from a backup, or give the job a new root to start again."
        )
    return None


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Without the cyclic garbage collector: tens of thousands of new objects would make it walk the heap again and
    again, and none of them is garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _try(
    channel: Channel, candidate: Candidate, open_candidate: Open, check: Check, apply: Apply, *, timeout: float
) -> str | None:
    """Restore `candidate`. Returns None once all ranks have applied it, or why it is damaged (nothing was applied)."""
    vote, snapshot, failure = verify(candidate, open_candidate, check)
    try:
        answers = channel.exchange(f"restore: vote on step {candidate.step}", vote.to_json(), timeout)
        votes = [Vote.from_json(answer) for answer in answers]
        if failure is not None and vote.verdict != "damaged":
            raise failure
        for verdict in ("failed", "refused"):
            for rank, other in enumerate(votes):
                if other.verdict == verdict:
                    raise other.rebuilt(rank)
        damaged = [f"rank {rank}: {other.reason}" for rank, other in enumerate(votes) if other.verdict == "damaged"]
        if damaged:
            return "; ".join(damaged)
        assert snapshot is not None
        _apply_together(channel, candidate, snapshot, apply, timeout)
        return None
    finally:
        if snapshot is not None:
            snapshot.close()


def _apply_together(channel: Channel, candidate: Candidate, snapshot: Snapshot, apply: Apply, timeout: float) -> None:
    """Apply on this rank and hear from the others. Raises PartlyApplied on all ranks if it failed on any."""
    failure: Exception | None = None
    try:
        apply(snapshot)
    except Exception as error:  # noqa: BLE001 - the other ranks must hear of it
        failure = error
    name = f"restore: apply step {candidate.step}"
    try:
        answers = channel.exchange(name, None if failure is None else str(failure), timeout)
    except PeerError as error:
        failure = failure or error
        answers = []
    if isinstance(failure, PartlyApplied):
        raise failure
    if failure is not None:
        raise PartlyApplied(
            f"{candidate} was verified, but applying it failed: {failure}. Build the objects anew before going on"
        ) from failure
    failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer is not None]
    if failed:
        raise PartlyApplied(
            f"{candidate} was applied here, but not everywhere ({'; '.join(failed)}). Build the objects anew before "
            "going on"
        )
