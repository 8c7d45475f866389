"""One rank's part of a flush: a sealed slot goes to storage as a shard and its index, both durable.

The shard's bytes are those of the slot: large aligned writes straight out of its memory, while a second thread
computes the checksums of the same bytes. A file is described by a *file plan*, so that files of any other layout are
written, checksummed and made durable by the same code.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from easyckpt import failpoints
from easyckpt.errors import OutOfSpace, SaveFailed
from easyckpt.format import layout as names
from easyckpt.format.canonical import dumps
from easyckpt.format.checksum import CHUNK_BYTES, ChunkHasher, digest_bytes, file_digest
from easyckpt.format.codec import path_to_json
from easyckpt.format.image import Layout, align, shard_header, written_bytes
from easyckpt.format.manifest import FileRecord, Index, ShardRecord
from easyckpt.memory.slot import SlotMeta
from easyckpt.saving.worker import Worker
from easyckpt.storage.base import ALIGNMENT, Buffer, FileWriter, Storage

SHARD_BEGIN = failpoints.declare("writer.shard.begin", "the shard's file exists and is empty")
SHARD_CHUNK = failpoints.declare("writer.shard.chunk", "one more piece of the shard is written")
SHARD_WRITTEN = failpoints.declare("writer.shard.written", "the shard is written to its exact length, not synced")
SHARD_SYNCED = failpoints.declare("writer.shard.synced", "the shard is durable, its index does not exist")
INDEX_WRITTEN = failpoints.declare("writer.index.written", "the index is written, not synced")
INDEX_SYNCED = failpoints.declare("writer.index.synced", "shard and index are durable, nobody was told")

#: One write. Between two writes a flush can be abandoned.
WRITE_BYTES = 16 * 1024 * 1024
#: Shorter parts, and what does not fill a block, are gathered in an aligned buffer of this size.
GATHER_BYTES = 1024 * 1024

_INDEX_MARGIN = 64 * 1024


class SnapshotBytes(Protocol):
    """What the writer reads a snapshot from: a sealed slot, or live tensors while training waits."""

    @property
    def meta(self) -> SlotMeta: ...  # noqa: D102

    @property
    def static(self) -> bytes: ...  # noqa: D102

    @property
    def objects(self) -> bytes: ...  # noqa: D102

    def body(self, nbytes: int) -> Iterable[Buffer]:
        """The first `nbytes` of the image, in parts."""

    def at(self, offset: int, nbytes: int) -> Buffer:
        """The bytes of the leaf that lies at `offset`."""

    def still_sealed(self) -> bool:
        """Whether it has been this same snapshot up to now."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file to be written: its name, and its bytes in order.

    `parts` are ranges of a slot, or an iterator of buffers as a streaming encoder makes them. It is read once; a
    buffer must keep its content until the file is written.
    """

    name: str
    parts: Iterable[Buffer]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What one plan became."""

    size: int
    chunks: tuple[str, ...]

    @property
    def record(self) -> FileRecord:
        """As the manifest lists it."""
        return FileRecord(self.size, file_digest(self.size, self.chunks))


def never() -> bool:
    """For writes that nobody abandons."""
    return False


class ShardWriter:
    """Writes this rank's files of a flush. Used by one thread at a time. Subclasses write files of other layouts.

    `hash_threads` 1 computes checksums beside the writes, 0 between them.
    """

    def __init__(self, storage: Storage, *, hash_threads: int = 1, min_free_bytes: int = 0) -> None:
        assert hash_threads in (0, 1), "one thread hashes faster than storage writes"
        self._storage = storage
        self._hash_threads = hash_threads
        self._min_free_bytes = min_free_bytes
        self._prepared: Layout | None = None  # set by the training thread at any moment: read it once
        self._layout: Layout | None = None

    def prepare(self, layout: Layout) -> None:
        """Hand over the layout of the slots to come, so that it need not be parsed out of their static bytes.

        From any thread.
        """
        self._prepared = layout

    def write(
        self, directory: str, view: SnapshotBytes, *, write_replicated: bool, abandoned: Callable[[], bool] = never
    ) -> dict[str, FileRecord]:
        """Write and fsync shard and index of `view` into the existing `directory`; returns both files' records.

        The caller syncs the directory. `abandoned` is asked before every write: SaveFailed once it is true, and
        where the slot has not kept the snapshot to the end: the bytes would be of several steps. Raises OutOfSpace
        before anything is written when the storage has too little room.
        """
        meta = view.meta
        layout = self.layout_of(view)
        header = shard_header(layout, write_replicated)
        nbytes = written_bytes(layout, write_replicated)
        self._check_space(view, len(header) + nbytes)

        shard = FilePlan(names.shard_file(meta.rank), itertools.chain((header,), view.body(nbytes)))
        written = self.write_file(directory, shard, abandoned)
        if not view.still_sealed():
            raise SaveFailed(f"the snapshot of step {meta.step} was given up while {shard.name} was being written")
        record = ShardRecord(
            name=shard.name,
            size=written.size,
            header_bytes=len(header),
            write_replicated=write_replicated,
            chunks=written.chunks,
        )
        index_name = names.index_file(meta.rank)
        index = self._write_index(f"{directory}/{index_name}", _index(meta, layout, record, view.objects), abandoned)
        return {shard.name: written.record, index_name: index}

    def write_file(self, directory: str, plan: FilePlan, abandoned: Callable[[], bool] = never) -> WrittenFile:
        """Write one file to its exact length and fsync it."""
        hashing = _Hashing(self._hash_threads)
        try:
            with self._storage.create(f"{directory}/{plan.name}") as file:
                failpoints.hit(SHARD_BEGIN)
                size = _write_parts(file, plan, hashing, abandoned)
                failpoints.hit(SHARD_WRITTEN)
                file.sync()
                failpoints.hit(SHARD_SYNCED)
            return WrittenFile(size, tuple(hashing.finish()))
        finally:
            hashing.stop()

    def gather(
        self, directory: str, files: Mapping[str, tuple[int, str]], world_size: int
    ) -> tuple[dict[str, tuple[int, str]], list[bytes]]:
        """Rank 0, before the commit: the files of all ranks, and what of them belongs into the manifest."""
        return dict(files), []

    def layout_of(self, view: SnapshotBytes) -> Layout:
        """The layout of `view`, parsed only where it was neither handed over nor asked for just before."""
        digest = view.meta.layout_digest
        for known in (self._prepared, self._layout):
            if known is not None and known.digest == digest:
                self._layout = known
                return known
        self._layout = layout = Layout.from_bytes(view.static)
        return layout

    def _write_index(self, path: str, data: bytes, abandoned: Callable[[], bool]) -> FileRecord:
        _check_abandoned(abandoned, path)
        with self._storage.create(path) as file:
            file.write_at(data, 0)
            failpoints.hit(INDEX_WRITTEN)
            file.sync()
        failpoints.hit(INDEX_SYNCED)
        return FileRecord(len(data), digest_bytes(data))

    def _check_space(self, view: SnapshotBytes, shard_bytes: int) -> None:
        chunks = -(-shard_bytes // CHUNK_BYTES)
        index_bytes = len(view.static) + len(view.objects) + 20 * chunks + _INDEX_MARGIN
        needed = shard_bytes + index_bytes + self._min_free_bytes
        free = self._storage.free_bytes()
        if free < needed:
            kept = f" ({self._min_free_bytes} of them to stay free)" if self._min_free_bytes else ""
            raise OutOfSpace(
                f"{self._storage.root}: its part needs {needed} bytes for step {view.meta.step}{kept}, "
                f"{free} are free. Free space or raise the quota; a lower max_ckpt_num keeps fewer checkpoints."
            )


def index_digests(view: SnapshotBytes, layout: Layout | None = None) -> dict[str, str]:
    """Digest of each replicated leaf of `view` with its form, by its path (as JSON text, which is exact)."""
    layout = Layout.from_bytes(view.static) if layout is None else layout
    return {
        dumps(path_to_json(leaf.path)).decode("ascii"): (
            f"{leaf.dtype}{list(leaf.shape)}{list(leaf.order)} " + digest_bytes(view.at(leaf.offset, leaf.nbytes))
        )
        for leaf in layout.leaves
        if leaf.replicated
    }


def replicated_digest(view: SnapshotBytes, layout: Layout | None = None) -> str:
    """One digest of all replicated leaves of `view`: equal on two ranks if and only if their leaves are."""
    return digest_bytes(dumps(dict(sorted(index_digests(view, layout).items()))))


def _index(meta: SlotMeta, layout: Layout, shard: ShardRecord, objects: bytes) -> bytes:
    index = Index(
        run=meta.run,
        timeline=meta.timeline,
        step=meta.step,
        rank=meta.rank,
        world_size=meta.world_size,
        layout=layout,
        objects=None,
        shard=shard,
    )
    return index.to_bytes(objects)


def _write_parts(file: FileWriter, plan: FilePlan, hashing: _Hashing, abandoned: Callable[[], bool]) -> int:
    offset = 0
    for piece, blocks in _pieces(plan.parts, hashing.wait):
        _check_abandoned(abandoned, plan.name)
        hashing.update(piece)
        file.write_at(blocks, offset)
        offset += piece.nbytes
        failpoints.hit(SHARD_CHUNK)
    file.truncate(offset)
    return offset


def _check_abandoned(abandoned: Callable[[], bool], name: str) -> None:
    if abandoned():
        raise SaveFailed(f"the flush was abandoned while {name} was being written")


def _pieces(parts: Iterable[Buffer], hashed: Callable[[], None]) -> Iterator[tuple[memoryview, memoryview]]:
    """Cut a stream into writes: (bytes of the stream, what to write for them: the same in whole blocks).

    Long parts are taken from where they lie. The gather buffer is used again when the consumer comes back for more and
    `hashed`, which waits for the checksums, has returned.
    """
    gather = memoryview(mmap.mmap(-1, GATHER_BYTES))  # page-aligned
    filled = 0
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest.nbytes:
            if filled == GATHER_BYTES or (filled and filled % ALIGNMENT == 0 and rest.nbytes >= GATHER_BYTES):
                yield gather[:filled], gather[:filled]
                hashed()
                filled = 0
            if not filled and rest.nbytes >= GATHER_BYTES:
                size = min(WRITE_BYTES, rest.nbytes // ALIGNMENT * ALIGNMENT)
                yield rest[:size], rest[:size]
            else:
                size = min(rest.nbytes, GATHER_BYTES - filled)
                gather[filled : filled + size] = rest[:size]
                filled += size
            rest = rest[size:]
    if filled:
        yield gather[:filled], gather[: align(filled)]


class _Hashing:
    """Chunk checksums of one file, computed beside its writes by a thread that lives as long as the file is open."""

    def __init__(self, threads: int) -> None:
        self._hasher = ChunkHasher()
        self._jobs: list[Future[None]] = []
        self._worker: Worker | None = None
        if threads:
            with contextlib.suppress(RuntimeError):  # no new threads while the interpreter ends: hash between writes
                self._worker = Worker("easyckpt-hash")

    def update(self, piece: memoryview) -> None:
        """Take the next piece, whose bytes must stay until `wait` or `finish` has returned."""
        if self._worker is None:
            self._hasher.update(piece)
        else:
            self._jobs.append(self._worker.submit(functools.partial(self._hasher.update, piece)))

    def wait(self) -> None:
        """Return when all pieces so far are hashed."""
        for job in self._jobs:
            job.result()
        self._jobs.clear()

    def finish(self) -> list[str]:
        """Return the chunk digests of all pieces."""
        self.wait()
        return self._hasher.finish()

    def stop(self) -> None:
        """End the thread; pieces that are still queued are hashed first, which takes milliseconds."""
        if self._worker is not None:
            self._worker.stop(None)
