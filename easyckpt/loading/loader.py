"""The loading half of a Checkpointer: which candidates there are, and restoring the first that all ranks find whole."""

from __future__ import annotations

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
from easyckpt.distributed.rendezvous import Channel, LocalChannel
from easyckpt.errors import DamagedCheckpoint, ForeignFormat, NoCheckpoint, StorageError
from easyckpt.events import Event, Warned
from easyckpt.format.layout import ROOT_FILE, NamingScheme, NativeNaming
from easyckpt.loading.apply import restore_agreed
from easyckpt.loading.reader import Submit, open_storage, run_now
from easyckpt.loading.resolve import Candidate, candidates
from easyckpt.loading.snapshot import Snapshot, open_memory
from easyckpt.memory.arena import Arena
from easyckpt.memory.slot import Slot, SlotMeta
from easyckpt.state.apply import apply_all, check_all
from easyckpt.state.capture import StateCapture
from easyckpt.storage.base import Storage
from easyckpt.storage.local import LocalStorage

logger = logging.getLogger("easyckpt")


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
    steps_lost: int
    """Steps between the newest candidate and the restored one."""


class Loader:
    """See the module's docstring. All methods belong to the training thread; all ranks call them."""

    def __init__(
        self,
        *,
        storage: Storage,
        naming: NamingScheme,
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
        self._storage, self._naming = storage, naming
        self._arena, self._channel, self._ranks = arena, channel, ranks
        self._run, self._arena_id = run, arena_id
        self._capture, self._timeout, self._submit, self._emit = capture, timeout, submit, emit

    def load(self, *, step: int | None, strict: bool, components: Collection[str] | None) -> Outcome:
        """Restore the newest candidate (or `step`) that is whole on all ranks. Raises as Checkpointer.load does."""
        found, committed = self._candidates(step)
        if step is not None and not found:
            raise NoCheckpoint(_no_such_step(self._storage.root, step, committed))
        live = self._capture.components
        taken = restore_agreed(
            self._channel,
            found,
            self._open,
            lambda snapshot: check_all(
                live, snapshot.layout, snapshot.layout.trees, snapshot.objects, strict=strict, components=components
            ),
            lambda snapshot: apply_all(
                live,
                snapshot.layout,
                snapshot.layout.trees,
                snapshot.objects,
                snapshot.leaf,
                strict=strict,
                components=components,
            ),
            timeout=self._timeout,
            skipped=self._passed_over,
        )
        if taken is None:
            return Outcome(Restored(0, None, None, self._ranks.world_size, None), -1, 0)
        path = os.path.join(self._storage.root, taken.source) if taken.tier == "storage" else None
        restored = Restored(taken.step, taken.tier, path, self._ranks.world_size, taken.timeline)
        # A newer commit that could not be restored counts for nothing: what was restored may be the newest good state.
        newest = max((number for number in committed if number <= taken.step), default=-1)
        return Outcome(restored, newest, max(candidate.step for candidate in found) - taken.step)

    def _candidates(self, step: int | None) -> tuple[list[Candidate], list[int]]:
        """Rank 0's list of candidates for all, and the committed steps on the line."""
        own = [[meta.timeline, meta.step] for meta in self._arena.sealed()]
        held = self._channel.exchange("load: steps in memory", own, self._timeout)
        everywhere = {tuple(key) for key in own}.intersection(*({tuple(key) for key in keys} for keys in held))
        memory = [meta for meta in self._arena.sealed() if (meta.timeline, meta.step) in everywhere]

        def work() -> dict[str, Any]:
            # On the thread that rotates, behind what it was told before: a checkpoint that is about to go is none.
            listing = self._submit(lambda: self._list(memory, step))
            try:
                return listing.result(self._timeout)
            except FutureTimeout:
                raise StorageError(f"{self._storage.root}: no answer for {self._timeout:g} s (peer_timeout)") from None

        answer = done_by_rank_0(self._channel, self._ranks, "load: candidates", work, self._timeout)
        return [Candidate.from_json(value) for value in answer["candidates"]], list(answer["committed"])

    def _list(self, memory: Sequence[SlotMeta], step: int | None) -> dict[str, Any]:
        record = catalog.read_root(self._storage)
        found = catalog.scan(self._storage, self._naming)
        listed = candidates(found, record, memory, run=self._run, arena_id=self._arena_id, step=step)
        every = candidates(found, record, (), run=self._run, arena_id=self._arena_id)
        names = {entry.name for entry in found.committed()}
        committed = [candidate.step for candidate in every if candidate.source in names]
        return {"candidates": [candidate.to_json() for candidate in listed], "committed": committed}

    def _open(self, candidate: Candidate) -> Snapshot:
        rank, world_size = self._ranks.rank, self._ranks.world_size
        if candidate.tier == "memory":
            view = self._arena.view(candidate.step, candidate.timeline)
            return open_memory(view, rank=rank, world_size=world_size, where=self._arena.directory)
        slot = self._borrowed_slot(candidate)
        snapshot = None
        try:
            snapshot = open_storage(
                self._storage,
                candidate.source,
                rank=rank,
                world_size=world_size,
                attempt=candidate.attempt,
                image=None if slot is None else slot.image,
                submit=self._submit,
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

    def _passed_over(self, candidate: Candidate, reason: str) -> None:
        self._emit(Warned(step=candidate.step, message=f"{candidate} cannot be restored and is passed over: {reason}"))


def _no_such_step(root: str, step: int, committed: Sequence[int]) -> str:
    there = ", ".join(map(str, sorted(set(committed)))) or "none"
    return (
        f"{root} holds no step {step} on the current line of training; committed there: {there} "
        f"(`easyckpt ls {root} --all` also lists what was set aside)"
    )


def restore_read_only(root: str, state: Mapping[str, Any], *, step: int | None) -> Restored:
    """Restore `state` from storage without owning anything. See `easyckpt.restore`."""
    storage = LocalStorage(root)
    record = catalog.read_root(storage)
    if record is None:
        raise ForeignFormat(f"{root} is not a checkpoint root: it has no {ROOT_FILE}")
    found = catalog.scan(storage, NativeNaming())
    listed = candidates(found, record, (), run=record.run, arena_id="", step=step)
    if not listed and step is not None:
        every = candidates(found, record, (), run=record.run, arena_id="")
        raise NoCheckpoint(_no_such_step(root, step, [candidate.step for candidate in every]))
    if not listed:
        raise NoCheckpoint(f"{root} holds no checkpoint")
    capture = StateCapture(state)
    names = set(state)
    metrics: dict[str, Any] = {}
    world_size = 1

    def open_candidate(candidate: Candidate) -> Snapshot:
        nonlocal world_size
        world_size = catalog.read_manifest(storage, candidate.source).world_size
        # Replicated state is whole in rank 0's part, whatever the number of ranks that saved it.
        source, attempt = candidate.source, candidate.attempt
        return open_storage(storage, source, rank=0, world_size=world_size, attempt=attempt, submit=run_now)

    def apply(snapshot: Snapshot) -> None:
        metrics.update(snapshot.metrics)
        layout = snapshot.layout
        apply_all(capture.components, layout, layout.trees, snapshot.objects, snapshot.leaf, components=names)

    taken = restore_agreed(
        LocalChannel(),
        listed,
        open_candidate,
        lambda snapshot: check_all(
            capture.components, snapshot.layout, snapshot.layout.trees, snapshot.objects, components=names
        ),
        apply,
        timeout=1.0,
    )
    if taken is None:
        raise DamagedCheckpoint(f"{root}: nothing could be restored")
    path = os.path.join(storage.root, taken.source)
    return Restored(taken.step, "storage", path, world_size, taken.timeline, metrics)
