"""Reading one rank's part of a checkpoint: each byte once, verified before anybody sees it.

A rank's own tensors come from its own shard; replicated ones from rank 0's where that rank alone wrote them. Both land
in one buffer, in large reads past the page cache straight to their places, and every chunk that holds a byte that is
needed is compared with its checksum while the next one is read. What sizes are believed was checked first: manifest
against index, index against layout, file against both.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol, TypeVar

from easyckpt import catalog
from easyckpt.errors import DamagedCheckpoint, FormatError
from easyckpt.format import layout as names
from easyckpt.format.checksum import CHUNK_BYTES, ChunkHasher, digest_bytes, file_digest
from easyckpt.format.codec import path_text
from easyckpt.format.image import Leaf, align
from easyckpt.format.manifest import Index, Manifest
from easyckpt.loading.placing import Part, plan_of
from easyckpt.loading.snapshot import Snapshot, check_world_size
from easyckpt.memory.mapping import Mapping
from easyckpt.storage.base import FileReader, Storage

Result = TypeVar("Result")

#: Chunks that are read, and then compared, in one go.
_RUN = 4
#: Runs that may wait for their comparison while reading goes on.
_AHEAD = 2


class Submit(Protocol):
    """Runs a job somewhere else and promises its result; jobs may be run one after the other."""

    def __call__(self, job: Callable[[], Result], /) -> Future[Result]:
        """Hand `job` over."""
        ...


class OpenCheckpoint(Protocol):
    """Reads and verifies one rank's part of a checkpoint: `open_storage`, or what another dialect has in its place."""

    def __call__(
        self,
        storage: Storage,
        directory: str,
        /,
        *,
        rank: int,
        world_size: int,
        attempt: str | None,
        image: memoryview | None,
        submit: Submit,
    ) -> Snapshot:
        """The part of `rank`, every byte of it verified."""


def run_now(job: Callable[[], Result], /) -> Future[Result]:
    """The Submit for whoever has no thread to spare."""
    future: Future[Result] = Future()
    try:
        future.set_result(job())
    except Exception as error:  # noqa: BLE001 - it belongs to whoever asks for the result
        future.set_exception(error)
    return future


def telling(submit: Submit, busy: Callable[[], None]) -> Submit:
    """`submit`, and `busy` is called for each piece: what a reader hands over was just read.

    So ranks that have less to read go on waiting for this one.
    """

    def submit_and_tell(job: Callable[[], Result], /) -> Future[Result]:
        busy()
        return submit(job)

    return submit_and_tell


def everything(leaf: Leaf) -> bool:
    """Ask for every tensor."""
    return True


def agreed_manifest(storage: Storage, directory: str, attempt: str | None, world_size: int) -> Manifest:
    """The manifest in `directory`: of the `attempt` that the ranks agreed on, if any, and of `world_size` ranks.

    Raises DamagedCheckpoint where another attempt is there by now, WorldSizeChanged, another FormatError, or OSError.
    """
    where = os.path.join(storage.root, directory)
    manifest = catalog.read_manifest(storage, directory)
    if attempt and manifest.attempt != attempt:
        raise DamagedCheckpoint(f"{where} was replaced while it was being restored: try again")
    check_world_size(where, manifest.world_size, world_size)
    return manifest


def open_storage(
    storage: Storage,
    directory: str,
    *,
    rank: int,
    world_size: int,
    attempt: str | None = None,
    image: memoryview | None = None,
    submit: Submit = run_now,
    wanted: Callable[[Leaf], bool] = everything,
) -> Snapshot:
    """Read and verify this rank's part of the checkpoint in `directory`.

    `image` is page-aligned writable memory to read into (a free slot's); fresh memory is taken where there is none or
    it is too small. `submit` hands checksums to another thread, one job for each piece that was read. Only tensors that
    are `wanted` are read. `attempt` makes sure that it is the checkpoint that the ranks agreed on. Raises
    DamagedCheckpoint naming file, tensor and chunk, another FormatError, WorldSizeChanged, or OSError.
    """
    where = os.path.join(storage.root, directory)
    manifest = agreed_manifest(storage, directory, attempt, world_size)
    index = read_index(storage, directory, manifest, rank)
    owner = index
    if rank != 0 and not index.shard.write_replicated and any(leaf.replicated for leaf in index.layout.leaves):
        owner = read_index(storage, directory, manifest, 0)
    plan = plan_of(index, owner, wanted, where)
    for part in plan.parts:
        path = f"{directory}/{part.shard.name}"
        _check_size(storage.root, path, _size_of(storage, path), part.shard.size)
    if image is None or image.nbytes < plan.nbytes:
        image = fresh_memory(plan.nbytes, present=wanted is everything)
    for part in plan.parts:
        _read_shard(storage, directory, part, image, submit)
    return Snapshot(
        step=manifest.step,
        timeline=manifest.timeline,
        layout=index.layout,
        objects=index.objects,
        image=image,
        places=plan.places,
    )


def fresh_memory(nbytes: int, *, present: bool) -> memoryview:
    """Memory of this process alone; `present`: all of it will be written."""
    memory = Mapping(None, 0, max(nbytes, mmap.PAGESIZE))
    if present:
        memory.populate(threads=min(4, os.cpu_count() or 1))  # faults of single pages would slow the reads
    return memory.view()


def read_index(storage: Storage, directory: str, manifest: Manifest, rank: int) -> Index:
    """Read the index of `rank`, checked against the manifest. Raises FormatError naming the file."""
    name = names.index_file(rank)
    where = f"{storage.root}/{directory}/{name}"
    data = _read_listed(storage, directory, manifest, name)
    try:
        index = Index.from_bytes(data)
    except FormatError as error:
        raise type(error)(f"{where}: {error}") from error
    mine = (index.run, index.timeline, index.step, index.world_size, index.rank)
    if mine != (manifest.run, manifest.timeline, manifest.step, manifest.world_size, rank):
        raise DamagedCheckpoint(f"{where} is the index of another checkpoint or rank than its manifest says")
    shard = index.shard
    listed = manifest.files.get(shard.name)
    digest = file_digest(shard.size, shard.chunks)
    if shard.name != names.shard_file(rank) or listed is None or (listed.size, listed.digest) != (shard.size, digest):
        raise DamagedCheckpoint(f"{where} describes another {shard.name} than the manifest")
    return index


def _read_listed(storage: Storage, directory: str, manifest: Manifest, name: str) -> bytes:
    path = f"{directory}/{name}"
    record = manifest.files.get(name)
    if record is None:
        raise DamagedCheckpoint(f"{storage.root}/{directory}: the manifest lists no {name}")
    _check_size(storage.root, path, _size_of(storage, path), record.size)
    data = storage.read(path)
    if len(data) != record.size or digest_bytes(data) != record.digest:
        raise DamagedCheckpoint(f"{storage.root}/{path}: its bytes are not those that were committed")
    return data


def _size_of(storage: Storage, path: str) -> int:
    try:
        return storage.stat_size(path)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{storage.root}/{path} is missing") from None


def _check_size(root: str, path: str, found: int, expected: int) -> None:
    if found != expected:
        kind = "truncated" if found < expected else "longer than what was committed"
        raise DamagedCheckpoint(f"{root}/{path} is {kind}: {found} bytes, the manifest says {expected}")


def _read_shard(storage: Storage, directory: str, part: Part, image: memoryview, submit: Submit) -> None:
    runs = _needed_runs(part)
    if not runs:
        return
    path = f"{directory}/{part.shard.name}"
    waiting: deque[Future[None]] = deque()
    with storage.reader(path) as reader:
        _check_size(storage.root, path, reader.size, part.shard.size)
        try:
            for run in runs:
                pieces = [_read_piece(reader, *piece) for piece in _pieces(part, run, image)]
                waiting.append(submit(_Comparison(f"{storage.root}/{path}", part, run, pieces)))
                if len(waiting) > _AHEAD:
                    waiting.popleft().result()
        finally:
            wait(waiting)  # also after an error: the memory must not be used behind the caller's back
    for comparison in waiting:
        comparison.result()


def _needed_runs(part: Part) -> list[range]:
    """The chunks that hold bytes of needed leaves, neighbours together."""
    chunks: set[int] = set()
    for leaf in part.needed:
        if leaf.nbytes:
            begin = part.shard.header_bytes + leaf.offset
            chunks.update(range(begin // CHUNK_BYTES, (begin + leaf.nbytes - 1) // CHUNK_BYTES + 1))
    runs: list[range] = []
    for chunk in sorted(chunks):
        if runs and runs[-1].stop == chunk and len(runs[-1]) < _RUN:
            runs[-1] = range(runs[-1].start, chunk + 1)
        else:
            runs.append(range(chunk, chunk + 1))
    return runs


def _pieces(part: Part, run: range, image: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """(offset in the file, bytes, memory in whole blocks) for the reads of `run`, in order."""
    begin, end = run.start * CHUNK_BYTES, min(run.stop * CHUNK_BYTES, part.shard.size)
    if begin < part.begin:  # the header, or another rank's own tensors: read for the checksum only
        size = min(end, part.begin) - begin
        yield begin, size, memoryview(mmap.mmap(-1, align(size)))
        begin += size
    if begin < end:
        place = part.place + begin - part.begin
        yield begin, end - begin, image[place : place + align(end - begin)]


def _read_piece(reader: FileReader, offset: int, size: int, memory: memoryview) -> memoryview:
    return memory[: min(size, reader.read_into(memory, offset))]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Compares chunks, as they were read, with their checksums."""

    where: str
    part: Part
    run: range
    pieces: list[memoryview]

    def __call__(self) -> None:
        """Raise DamagedCheckpoint if they differ."""
        hasher = ChunkHasher()
        for piece in self.pieces:
            hasher.update(piece)
        found = hasher.finish()
        for number, chunk in enumerate(self.run):
            if found[number : number + 1] != [self.part.shard.chunks[chunk]]:
                raise DamagedCheckpoint(
                    f"{self.where}: chunk {chunk} (bytes from {chunk * CHUNK_BYTES} on) does not match its checksum; "
                    f"it holds {self._tensors(chunk)}"
                )

    def _tensors(self, chunk: int) -> str:
        begin = chunk * CHUNK_BYTES - self.part.shard.header_bytes
        inside = [
            path_text(leaf.path)[:200]
            for leaf in self.part.needed
            if leaf.nbytes and leaf.offset < begin + CHUNK_BYTES and leaf.offset + leaf.nbytes > begin
        ]
        return inside[0] + (f" and {len(inside) - 1} others" if len(inside) > 1 else "")
