"""Whether a checkpoint's bytes are what was committed: every file, chunk by chunk, and which tensors are hurt."""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from easyckpt.catalog import Entry, misfit
from easyckpt.errors import EasyckptError
from easyckpt.format import layout
from easyckpt.format.checksum import CHUNK_BYTES, chunk_count, chunk_digests, file_digest
from easyckpt.format.codec import path_text
from easyckpt.format.manifest import FileRecord, Index, Manifest
from easyckpt.format.parts import locate, read_part
from easyckpt.storage.base import FileReader, Storage


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint's bytes."""

    file: str
    tensor: str | None
    """The first tensor that it touches, as people write its path."""
    chunk: int | None
    """The chunk of the file, counted from 0."""
    message: str


def verify(storage: Storage, entry: Entry, on_bytes: Callable[[int], None] | None = None) -> list[Problem]:
    """Read every byte that the manifest lists, past the cache and in bounded memory; [] means all is as committed.

    `on_bytes` hears how many bytes each piece had. Damage is returned, not raised, all of it.
    """
    count = on_bytes or _ignore
    manifest = entry.manifest
    if manifest is None:
        return [Problem(layout.MANIFEST, None, None, entry.problem or "cannot be read")]
    contradiction = misfit(entry, manifest)
    problems = [Problem(layout.MANIFEST, None, None, contradiction)] if contradiction else _check_parts(manifest)
    indexes: dict[str, Index] = {}
    # Indexes first: they say which tensors a damaged chunk of a shard holds.
    for name in sorted(manifest.files, key=lambda name: (layout.parse_index_file(name) is None, name)):
        is_index = layout.parse_index_file(name) is not None
        check = _Check(storage, f"{entry.name}/{name}", manifest.files[name], indexes.get(name), keep=is_index)
        problems += check.run(count)
        if is_index and not check.problems:
            problems += _read_index(check.content(), name, manifest, indexes)
    return problems


def _check_parts(manifest: Manifest) -> list[Problem]:
    """Whether the parts, where there are some, say of each tensor where its bytes are."""
    problems, first = [], None
    for rank in range(len(manifest.parts)):
        try:
            part = read_part(manifest.parts, rank, manifest.files)
            first = first or part
            locate(part, first)
        except EasyckptError as error:
            problems.append(Problem(layout.MANIFEST, None, None, f"part of rank {rank}: {error}"))
            if first is None:
                break  # nothing of the others can be told without rank 0's
    return problems


def _ignore(count: int) -> None:
    pass


def _read_index(data: bytes, name: str, manifest: Manifest, indexes: dict[str, Index]) -> list[Problem]:
    """Parse an index whose bytes are as committed, and add it to `indexes` under its shard's name."""
    try:
        index = Index.from_bytes(data)
    except EasyckptError as error:
        return [Problem(name, None, None, str(error))]
    problems = []
    for what in ("run", "timeline", "step", "world_size"):
        mine, theirs = getattr(index, what), getattr(manifest, what)
        if mine != theirs:
            problems.append(Problem(name, None, None, f"is of {what} {mine}, the manifest of {theirs}"))
    if index.rank != layout.parse_index_file(name) or index.shard.name != layout.shard_file(index.rank):
        problems.append(Problem(name, None, None, f"is the index of rank {index.rank} and of {index.shard.name}"))
    record = manifest.files.get(index.shard.name)
    digest = file_digest(index.shard.size, index.shard.chunks)
    if record is None or (record.size, record.digest) != (index.shard.size, digest):
        problems.append(Problem(name, None, None, f"describes another {index.shard.name} than the manifest"))
    if not problems:
        indexes[index.shard.name] = index
    return problems


class _Check:
    """Reads one file and compares it with what was committed."""

    def __init__(self, storage: Storage, path: str, record: FileRecord, index: Index | None, *, keep: bool) -> None:
        self.problems: list[Problem] = []
        self._storage = storage
        self._path = path
        self._name = path.rpartition("/")[2]
        self._record = record
        self._index = index
        self._kept: list[bytes] | None = [] if keep else None
        self._unreadable: dict[int, str] = {}

    def content(self) -> bytes:
        """The bytes that were checked; of an index only, all other files may be larger than memory."""
        return b"".join(self._kept or ())

    def run(self, on_bytes: Callable[[int], None]) -> list[Problem]:
        """Return the problems found."""
        try:
            self._storage.drop_cache(self._path)
            with self._storage.reader(self._path) as reader:
                if reader.size == self._record.size:
                    self._compare(self._digests(reader, on_bytes))
                else:
                    self._add(f"has {reader.size} bytes, the manifest says {self._record.size}")
        except FileNotFoundError:
            self._add("is missing")
        except (EasyckptError, OSError) as error:
            self._add(f"cannot be read: {error}")
        return self.problems

    def _digests(self, reader: FileReader, on_bytes: Callable[[int], None]) -> list[str]:
        digests: list[str] = []
        view = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # not closed by name: an interrupt's frames may hold it
        for chunk in range(chunk_count(reader.size)):
            offset = chunk * CHUNK_BYTES
            expected = min(CHUNK_BYTES, reader.size - offset)
            try:
                size = reader.read_into(view, offset)
            except OSError as error:
                self._unreadable[chunk] = f"cannot be read: {error}"
                digests.append("unreadable")
                continue
            piece = view[: min(size, expected)]
            digests += chunk_digests([piece])
            if self._kept is not None:
                self._kept.append(bytes(piece))
            on_bytes(expected)
        return digests

    def _compare(self, digests: list[str]) -> None:
        if file_digest(self._record.size, digests) == self._record.digest:
            return
        before = len(self.problems)
        expected = self._index.shard.chunks if self._index is not None else [None] * len(digests)
        for chunk, (found, wanted) in enumerate(zip(digests, expected, strict=True)):
            if chunk in self._unreadable:
                self._add(self._unreadable[chunk], chunk)
            elif wanted is not None and found != wanted:
                self._add("its bytes are not those that were committed", chunk)
        if len(self.problems) == before:
            self._add("its bytes are not those that were committed")

    def _add(self, message: str, chunk: int | None = None) -> None:
        tensors = [] if chunk is None or self._index is None else tensors_in_chunk(self._index, chunk)
        if len(tensors) > 1:
            message += f" (tensors from {tensors[0]} to {tensors[-1]}, {len(tensors)} in all)"
        self.problems.append(Problem(self._name, tensors[0] if tensors else None, chunk, message))


def tensors_in_chunk(index: Index, chunk: int) -> list[str]:
    """Paths of the tensors of which the shard's chunk holds bytes, in the order of the file."""
    begin = chunk * CHUNK_BYTES - index.shard.header_bytes
    end = min(begin + CHUNK_BYTES, index.shard.size - index.shard.header_bytes)
    leaves = sorted((leaf for leaf in index.layout.leaves if leaf.nbytes), key=lambda leaf: leaf.offset)
    first = bisect_right([leaf.offset + leaf.nbytes for leaf in leaves], begin)
    last = bisect_left([leaf.offset for leaf in leaves], end)
    return [path_text(leaf.path) for leaf in leaves[first:last]]
