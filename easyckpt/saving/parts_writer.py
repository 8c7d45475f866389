"""One rank's files of a flush, where the files have another framework's layout: see `easyckpt.format.parts`.

Which files there are, and which bytes of the snapshot go where, is said by a *plan* of the integration's. What no file
of the framework has a place for is carried by the part itself, or by a file of its own where it is large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from easyckpt.errors import OutOfSpace, SaveFailed
from easyckpt.format.checksum import digest_bytes
from easyckpt.format.image import Layout
from easyckpt.format.manifest import FileRecord
from easyckpt.format.parts import CARRIED, Place, part_text
from easyckpt.format.trainer_names import carried_file, part_file
from easyckpt.saving.writer import FilePlan, ShardWriter, SnapshotBytes, never
from easyckpt.storage.base import Buffer, Storage

#: More than this is not carried by the part, which every look at the checkpoint reads.
_CARRIED_BYTES = 1 << 20
_MARGIN = 1 << 20


@dataclass(slots=True)
class PlannedFile:
    """A file to be written, and which leaves it holds as they lie in the image."""

    name: str
    parts: list[Buffer] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    """Leaf number -> offset in the file."""
    nbytes: int = 0

    def add(self, data: Buffer, leaf: int | None = None) -> None:
        """Append `data`, which are the bytes of `leaf`, if it is given."""
        if leaf is not None:
            self.places[leaf] = self.nbytes
        self.parts.append(data)
        self.nbytes += memoryview(data).nbytes


@dataclass(frozen=True, slots=True)
class PlannedFiles:
    """All of one rank's."""

    files: Sequence[PlannedFile]
    whole: bool = True
    """The checkpoint is to hold the whole state, not only what these files hold: it can be restored."""


class Plan(Protocol):
    """The integration's: which files a rank writes of a snapshot."""

    def __call__(self, view: SnapshotBytes, layout: Layout) -> PlannedFiles:
        """The files. Runs in the background; buffers of `view` are not copied."""


class PartsWriter(ShardWriter):
    """A `SnapshotWriter`. Used by one thread at a time."""

    def __init__(self, storage: Storage, plan: Plan, *, min_free_bytes: int = 0) -> None:
        super().__init__(storage, min_free_bytes=min_free_bytes)
        self._plan = plan

    def write(
        self, directory: str, view: SnapshotBytes, *, write_replicated: bool, abandoned: Callable[[], bool] = never
    ) -> dict[str, FileRecord]:
        """As `ShardWriter.write`; the part goes into a file of its own until the commit takes it into the manifest."""
        layout, rank = self.layout_of(view), view.meta.rank
        plan = self._plan(view, layout)
        planned = list(plan.files)
        places: list[Place | None] = [None] * len(layout.leaves)
        for file in planned:
            for leaf, offset in file.places.items():
                places[leaf] = (file.name, offset)
        carried = self._carry(view, layout, places, rank=rank, write_replicated=write_replicated)
        own = PlannedFile(carried_file(rank), list(carried.parts), {}, carried.nbytes)
        if plan.whole and carried.nbytes > _CARRIED_BYTES:
            planned.append(own)
        self._check_room(view, planned)
        records = {}
        folders = {file.name.rpartition("/")[0] for file in planned} - {""}
        for folder in folders:
            self._storage.makedirs(f"{directory}/{folder}")
        for file in planned:
            records[file.name] = self.write_file(directory, FilePlan(file.name, file.parts), abandoned).record
        for folder in folders:  # the directory itself is synced by whoever has made it
            self._storage.sync_dir(f"{directory}/{folder}")
        if plan.whole:
            inline = b"".join(map(bytes, carried.parts)) if carried.nbytes <= _CARRIED_BYTES else b""
            for leaf, offset in carried.places.items():
                places[leaf] = (CARRIED if inline or not carried.nbytes else own.name, offset)
            text = part_text(layout, bytes(view.objects), places, inline)
            records[part_file(rank)] = self.write_file(directory, FilePlan(part_file(rank), [text]), abandoned).record
        if not view.still_sealed():
            raise SaveFailed(f"the snapshot of step {view.meta.step} was given up while its files were being written")
        return records

    def gather(
        self, directory: str, files: Mapping[str, tuple[int, str]], world_size: int
    ) -> tuple[dict[str, tuple[int, str]], list[bytes]]:
        """Rank 0, before the commit: take the parts of all ranks out of `directory`.

        Returns the files that are left, and the texts of the parts. Once an attempt: a failure ends it.
        """
        left, texts = dict(files), []
        names = [part_file(rank) for rank in range(world_size)]
        if not any(name in files for name in names):
            return left, []
        for rank, name in enumerate(names):
            size, digest = left.pop(name)
            text = self._storage.read(f"{directory}/{name}")
            if len(text) != size or digest != digest_bytes(text):
                raise SaveFailed(f"{directory}/{name}: its bytes are not those that rank {rank} has written")
            texts.append(text)
        for name in names:
            self._storage.remove(f"{directory}/{name}")
        return left, texts

    def _carry(
        self,
        view: SnapshotBytes,
        layout: Layout,
        places: Sequence[Place | None],
        *,
        rank: int,
        write_replicated: bool,
    ) -> PlannedFile:
        """The leaves that this rank has to write and for which no planned file has a place."""
        carried = PlannedFile(CARRIED)
        for number, leaf in enumerate(layout.leaves):
            mine = not leaf.replicated or write_replicated or rank == 0
            if mine and places[number] is None:
                carried.add(view.at(leaf.offset, leaf.nbytes) if leaf.nbytes else b"", number)
        return carried

    def _check_room(self, view: SnapshotBytes, planned: Sequence[PlannedFile]) -> None:
        needed = sum(file.nbytes for file in planned) + 2 * len(view.static) + _MARGIN + self._min_free_bytes
        free = self._storage.free_bytes()
        if free < needed:
            raise OutOfSpace(
                f"{self._storage.root}: its part needs {needed} bytes for step {view.meta.step}, {free} are free. "
                "Free space or raise the quota; a lower save_total_limit keeps fewer checkpoints."
            )
