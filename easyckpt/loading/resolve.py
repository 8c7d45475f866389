"""Which snapshots and checkpoints a load may try, and in which order. Pure: it looks at what others have found."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from easyckpt.catalog import Catalog, Entry
from easyckpt.errors import ForeignFormat, PeerError
from easyckpt.format.canonical import Json
from easyckpt.format.manifest import Manifest, RootRecord
from easyckpt.memory.slot import SlotMeta

Tier = Literal["memory", "storage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One state that could be restored. The same on all ranks."""

    step: int
    tier: Tier
    timeline: str
    source: str
    """Storage: the directory in the root. Memory: ``""``; each rank has a slot of its own for this step."""
    attempt: str = ""
    """Storage: the commit attempt that wrote it, so that all ranks read the same bytes."""
    problem: str | None = None
    """Why it cannot be restored, known without reading it. It is still a candidate: passed over loudly."""

    def __str__(self) -> str:
        return self.source or f"the snapshot of step {self.step} in memory"

    def to_json(self) -> dict[str, Json]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Candidate:
        """Back from :meth:`to_json`, sent by another rank. Raises PeerError."""
        try:
            return cls(**value)
        except TypeError:
            raise PeerError(f"rank 0 sent a candidate that this version does not understand: {value!r:.200}") from None


def candidates(
    catalog: Catalog,
    record: RootRecord | None,
    memory: Iterable[SlotMeta],
    *,
    run: str,
    arena_id: str,
    step: int | None = None,
) -> list[Candidate]:
    """Return what may be restored, the newest step first, memory before storage at the same step.

    `memory` are slots of which every rank holds its own. Only states in the past of the newest timeline count, and of
    temporary directories only the newest whole one that could be rolled forward. `step` asks for that step alone.
    Committed directories that cannot be read are listed with their problem, so that passing them over is never
    silent. Raises ForeignFormat when the root holds checkpoints of another run.
    """
    found = [*_from_memory(memory, record, run, arena_id), *_from_storage(catalog, record, run)]
    return sorted(
        (candidate for candidate in found if step is None or candidate.step == step),
        key=lambda candidate: (-candidate.step, candidate.tier, candidate.problem is not None),
    )


def _from_memory(memory: Iterable[SlotMeta], record: RootRecord | None, run: str, arena_id: str) -> Iterable[Candidate]:
    for meta in memory:
        ours = meta.run == run and meta.arena_id == arena_id
        if ours and record is not None and record.on_ancestry(meta.timeline, meta.step):
            yield Candidate(step=meta.step, tier="memory", timeline=meta.timeline, source="")


def _from_storage(catalog: Catalog, record: RootRecord | None, run: str) -> Iterable[Candidate]:
    runs = {run} if record is None else record.runs
    committed = catalog.of_kind("committed")
    for entry in committed:
        if entry.manifest is not None:
            _check_run(entry, entry.manifest, runs)
        if entry.manifest is None or _in_the_past(record, entry.manifest):
            yield _candidate(entry)
    taken = {entry.step for entry in committed if entry.valid}
    leftovers = [
        entry
        for entry in catalog.of_kind("temporary")
        if entry.valid
        and entry.step not in taken
        and entry.manifest is not None
        and (record is None or record.is_past(entry.manifest.run, entry.manifest.timeline, entry.step))
    ]
    if leftovers:
        yield _candidate(max(leftovers, key=lambda entry: (entry.step, entry.attempt or "")))


def _candidate(entry: Entry) -> Candidate:
    return Candidate(
        step=entry.step,
        tier="storage",
        timeline=entry.timeline or "",
        source=entry.name,
        attempt=entry.manifest.attempt if entry.manifest is not None else "",
        problem=entry.problem,
    )


def _in_the_past(record: RootRecord | None, manifest: Manifest) -> bool:
    """Whether it lies in the past of the newest timeline. A root that knows none has only what was put there."""
    return record is None or not record.timelines or record.on_ancestry(manifest.timeline, manifest.step)


def _check_run(entry: Entry, manifest: Manifest, runs: Collection[str]) -> None:
    if manifest.run not in runs:
        ours = ", ".join(sorted(runs))
        raise ForeignFormat(
            f"{entry.name} belongs to run {manifest.run}, this root to {ours}: two jobs have written into it, or a "
            "checkpoint was copied here by hand. Give each job a root of its own, or move that directory away; to "
            "begin a run from another run's checkpoint, copy it into an empty root, or call easyckpt.restore(its root, "
            "state) in a new root's job."
        )


def no_such_step(root: str, step: int, committed: Sequence[int]) -> str:
    """The message for a `step` that was asked for and is not there; `committed` are those that are."""
    there = ", ".join(map(str, sorted(set(committed)))) or "none"
    return (
        f"{root} holds no step {step} on the current line of training; committed there: {there} "
        f"(`easyckpt ls {root} --all` also lists what was set aside)"
    )
