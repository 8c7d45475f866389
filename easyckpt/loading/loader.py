"""The loading half of a Checkpointer: which candidates there are, and restoring the first that all ranks find whole."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, Literal

from easyckpt import catalog
from easyckpt.distributed.agree import done_by_rank_0
from easyckpt.distributed.ranks import Ranks
from easyckpt.distributed.rendezvous import Channel
from easyckpt.errors import NoCheckpoint, StorageError
from easyckpt.events import Event, Warned
from easyckpt.format.layout import NamingScheme
from easyckpt.format.manifest import RootRecord
from easyckpt.loading.apply import restore_agreed
from easyckpt.loading.progress import newest_step_logged, steps_lost
from easyckpt.loading.reader import OpenCheckpoint, Submit, telling
from easyckpt.loading.resolve import Candidate, candidates, no_such_step
from easyckpt.loading.snapshot import Snapshot, open_memory
from easyckpt.memory.arena import Arena
from easyckpt.memory.slot import Slot, SlotMeta
from easyckpt.state.apply import apply_all, check_all, judge_all
from easyckpt.state.capture import StateCapture
from easyckpt.state.components import Component
from easyckpt.storage.base import Storage

logger = logging.getLogger("easyckpt")

#: Lines of a list in a message.
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Restored:
    """What a load has restored."""

    step: int
    """Finished steps of the restored state; 0 where there was nothing."""
    tier: Literal["memory", "storage"] | None
    """Where it came from; None where there was nothing."""
    path: str | None
    """The checkpoint's directory; None from memory or from nothing."""
    world_size: int
    """Ranks that saved it (or, from nothing, that are here)."""
    timeline: str | None
    """The line of training that it belongs to."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Newest logged metrics at that step."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A load's result for the engine."""

    restored: Restored
    newest_committed: int
    """Newest committed step, up to the restored one, of the line that was loaded from; -1: none."""
    steps_lost: int | None
    """Finished steps after the restored one, as far as memory and the run's logs tell; None: they tell nothing."""
    nbytes: int = 0
    """Of this rank's state that was read and verified."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """What rank 0 has found; the same on all ranks."""

    candidates: list[Candidate]
    committed: list[int]
    """Committed steps on the line."""
    seen: list[int]
    """Steps that are known to have been finished."""


class Loader:
    """See the module's docstring. All methods belong to the training thread; all ranks call them."""

    def __init__(
        self,
        *,
        storage: Storage,
        naming: NamingScheme,
        open_checkpoint: OpenCheckpoint,
        arena: Arena,
        channel: Channel,
        ranks: Ranks,
        run: str,
        arena_id: str,
        capture: StateCapture,
        timeout: float,
        submit: Submit,
        emit: Callable[[Event], None],
    ) -> None:
        self._storage, self._naming, self._open_checkpoint = storage, naming, open_checkpoint
        self._arena, self._channel, self._ranks = arena, channel, ranks
        self._run, self._arena_id = run, arena_id
        self._capture, self._timeout, self._submit, self._emit = capture, timeout, submit, emit

    def load(
        self, *, step: int | None, strict: bool, components: Collection[str] | None, timeline: str | None = None
    ) -> Outcome:
        """Restore the newest candidate (or `step`, of that `timeline`, if one is named) that is whole on all ranks.

        Raises as Checkpointer.load does.
        """
        listing = self._candidates(step, timeline)
        found, committed = listing.candidates, listing.committed
        if step is not None and not found:
            raise NoCheckpoint(no_such_step(self._storage.root, step, committed))
        live = self._capture.components
        nbytes = 0

        def apply(snapshot: Snapshot) -> None:
            nonlocal nbytes
            nbytes, image = snapshot.layout.image_bytes, snapshot.layout
            apply_all(live, image, image.trees, snapshot.objects, snapshot.leaf, strict=strict, components=components)

        taken = restore_agreed(
            self._channel,
            found,
            self._open,
            lambda snapshot: fit(snapshot, live, strict, components, self._left_out),
            apply,
            timeout=self._timeout,
            skipped=self._passed_over,
        )
        lost = steps_lost(0 if taken is None else taken.step, [candidate.step for candidate in found], listing.seen)
        if taken is None:
            return Outcome(Restored(0, None, None, self._ranks.world_size, None), -1, lost)
        path = os.path.join(self._storage.root, taken.source) if taken.tier == "storage" else None
        restored = Restored(taken.step, taken.tier, path, self._ranks.world_size, taken.timeline)
        # A newer commit that could not be restored counts for nothing: what was restored may be the newest good state.
        newest = max((number for number in committed if number <= taken.step), default=-1)
        return Outcome(restored, newest, lost, nbytes)

    def _candidates(self, step: int | None, timeline: str | None) -> _Listing:
        """Rank 0's list of candidates for all."""
        own = [[meta.timeline, meta.step] for meta in self._arena.sealed()]
        held = self._channel.exchange("load: steps in memory", own, self._timeout)
        everywhere = {tuple(key) for key in own}.intersection(*({tuple(key) for key in keys} for keys in held))
        memory = [meta for meta in self._arena.sealed() if (meta.timeline, meta.step) in everywhere]
        somewhere = {int(number) for keys in (own, *held) for _, number in keys}

        def work() -> dict[str, Any]:
            # On the thread that rotates, behind what it was told before: a checkpoint that is about to go is none.
            listing = self._submit(lambda: self._list(memory, somewhere, step, timeline))
            try:
                return listing.result(self._timeout)
            except FutureTimeout:
                raise StorageError(f"{self._storage.root}: no answer for {self._timeout:g} s (peer_timeout)") from None

        answer = done_by_rank_0(self._channel, self._ranks, "load: candidates", work, self._timeout)
        found = [Candidate.from_json(value) for value in answer["candidates"]]
        return _Listing(found, list(answer["committed"]), list(answer["seen"]))

    def _list(
        self, memory: Sequence[SlotMeta], somewhere: Collection[int], step: int | None, timeline: str | None
    ) -> dict[str, Any]:
        found = catalog.scan(self._storage, self._naming)

        def those_of(record: RootRecord | None) -> list[Candidate]:
            listed = candidates(found, record, memory, run=self._run, arena_id=self._arena_id, step=step)
            return [candidate for candidate in listed if timeline in (None, candidate.timeline)]

        record = self._with_something(catalog.read_root(self._storage), those_of)
        listed = those_of(record)
        every = candidates(found, record, (), run=self._run, arena_id=self._arena_id)
        names = {entry.name for entry in found.committed()}
        committed = [candidate.step for candidate in every if candidate.source in names]
        seen = list(somewhere)
        if (logged := newest_step_logged(self._storage)) is not None:
            seen.append(logged)
        elif record is None or not record.timelines:
            seen.append(0)  # nothing was ever saved here
        return {"candidates": [candidate.to_json() for candidate in listed], "committed": committed, "seen": seen}

    def _with_something(
        self, record: RootRecord | None, candidates_of: Callable[[RootRecord], list[Candidate]]
    ) -> RootRecord | None:
        """`record` up to the newest line that has something to go on from.

        Where a line from nothing leaves older ones beside it, it hides them only once it has something itself.
        """
        while self._naming.shared and record is not None and len(record.timelines) > 1:
            if candidates_of(record):
                break
            record = dataclasses.replace(record, timelines=record.timelines[:-1])
        return record

    def _open(self, candidate: Candidate) -> Snapshot:
        rank, world_size = self._ranks.rank, self._ranks.world_size
        if candidate.tier == "memory":
            view = self._arena.view(candidate.step, candidate.timeline)
            return open_memory(view, rank=rank, world_size=world_size, where=self._arena.directory)
        slot = self._borrowed_slot(candidate)
        snapshot = None
        try:
            snapshot = self._open_checkpoint(
                self._storage,
                candidate.source,
                rank=rank,
                world_size=world_size,
                attempt=candidate.attempt,
                image=None if slot is None else slot.image,
                submit=telling(self._submit, self._channel.busy),
            )
        finally:
            if slot is not None:
                release = functools.partial(self._arena.release, slot)
                if snapshot is None:
                    release()
                else:
                    snapshot.on_close = release
        return snapshot

    def _borrowed_slot(self, candidate: Candidate) -> Slot | None:
        """A free slot is memory that is there already; fresh memory would have to be touched first."""
        try:
            return self._arena.acquire(candidate.step, 0, None, ())
        except StorageError as error:  # it says nothing about the candidate, which can be read without
            self._emit(Warned(step=candidate.step, message=f"{candidate} is read into fresh memory: {error}"))
            return None

    def _left_out(self, step: int, what: list[str]) -> None:
        self._emit(Warned(step=step, message=left_out_text(step, what)))

    def _passed_over(self, candidate: Candidate, reason: str) -> None:
        self._emit(Warned(step=candidate.step, message=f"{candidate} cannot be restored and is passed over: {reason}"))


def fit(
    snapshot: Snapshot,
    live: Mapping[str, Component],
    strict: bool,
    components: Collection[str] | None,
    left_out: Callable[[int, list[str]], None],
) -> list[str]:
    """What keeps `snapshot` from being applied; `left_out` hears what is passed over since `strict` is off."""
    layout, objects = snapshot.layout, snapshot.objects
    problems = check_all(live, layout, layout.trees, objects, strict=strict, components=components)
    if not problems:
        judge_all(live, layout, objects, snapshot.leaf, snapshot.step, components=components)
    if not strict and not problems:
        missing = check_all(live, layout, layout.trees, objects, strict=True, components=components)
        if missing:
            left_out(snapshot.step, missing)
    return problems


def left_out_text(step: int, what: list[str]) -> str:
    """The warning about what a restore of `step` passes over."""
    more = [f"and {len(what) - _SHOWN} more"] if len(what) > _SHOWN else []
    listed = "".join(f"\n  - {line}" for line in what[:_SHOWN] + more)
    return f"step {step} is restored in part only, as strict=False says; left out:{listed}"
