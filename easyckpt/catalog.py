"""What a root holds: discovery, and verification of every byte.

Discovery looks at the directory itself; ``latest`` is a hint for people and scripts and is never believed. One bad
entry never hides the others: it is listed with its problem.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from easyckpt.errors import DamagedCheckpoint, EasyckptError
from easyckpt.format import layout
from easyckpt.format.checksum import CHUNK_BYTES, chunk_count, chunk_digests, file_digest
from easyckpt.format.codec import path_text
from easyckpt.format.layout import NamingScheme
from easyckpt.format.manifest import FileRecord, Index, Manifest, RootRecord
from easyckpt.storage.base import FileReader, Storage

Kind = Literal["committed", "stale", "temporary", "trash"]

#: A larger record is not ours; reading it could exhaust the memory.
MAX_RECORD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One directory in a root."""

    step: int
    """The step in its name; -1 where the name of something in the trash has none."""
    name: str
    kind: Kind
    manifest: Manifest | None = None
    """The commit record, if there is one that can be read."""
    problem: str | None = None
    """Why it is no valid checkpoint; None for a valid one, and for trash, which is not looked into."""
    attempt: str | None = None
    """Of a temporary directory: the attempt in its name."""
    timeline: str | None = None
    """Of a stale directory: the timeline in its name, for which it was set aside; else the manifest's."""

    @property
    def valid(self) -> bool:
        """Whether the manifest parses, fits the name, and all of its files are there in their sizes."""
        return self.manifest is not None and self.problem is None

    @property
    def nbytes(self) -> int:
        """Bytes of the files that the manifest lists; 0 where there is none to say it."""
        return sum(file.size for file in self.manifest.files.values()) if self.manifest is not None else 0


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything in a root that has a name of ours."""

    entries: list[Entry] = field(default_factory=list)
    """By step, then by name."""
    stray: list[str] = field(default_factory=list)
    """Small temporary files that a crash left in the root; never those around the lease, which others may be using."""

    def committed(self) -> list[Entry]:
        """The valid committed checkpoints, oldest step first."""
        return [entry for entry in self.entries if entry.kind == "committed" and entry.valid]

    def of_kind(self, kind: Kind) -> list[Entry]:
        """All entries of one kind, valid or not, oldest step first."""
        return [entry for entry in self.entries if entry.kind == kind]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint's bytes."""

    file: str
    tensor: str | None
    """The first tensor that it touches, as people write its path."""
    chunk: int | None
    """The chunk of the file, counted from 0."""
    message: str


# Discovery.


def scan(storage: Storage, naming: NamingScheme) -> Catalog:
    """List what is in the root; an empty catalog where the root does not exist. Raises only if it cannot be listed."""
    try:
        names = storage.listdir("")
    except FileNotFoundError:
        return Catalog()
    entries, stray = [], []
    for name in names:
        entry = _classify(name, naming)
        if entry is not None:
            entry = _examined(storage, entry)
            if entry.problem is None or storage.exists(name):  # else rotated away since the listing
                entries.append(entry)
        elif layout.is_temp_file(name) and not layout.is_beside_lease(name):
            stray.append(name)
    entries.sort(key=lambda entry: (entry.step, entry.name))
    return Catalog(entries, stray)


def inspect(storage: Storage, name: str, naming: NamingScheme) -> Entry:
    """Look at one directory, whatever its name; one without a name of ours counts as committed under its manifest."""
    entry = _classify(name, naming)
    if entry is not None:
        return _examined(storage, entry)
    return _examined(storage, Entry(step=-1, name=name, kind="committed"))


def read_manifest(storage: Storage, name: str) -> Manifest:
    """The commit record of the directory `name`. Raises FormatError, FileNotFoundError or another OSError."""
    return Manifest.from_bytes(_read_record(storage, f"{name}/{layout.MANIFEST}"))


def read_root(storage: Storage) -> RootRecord | None:
    """The root's own record, None where there is none. Raises FormatError naming the file."""
    try:
        data = _read_record(storage, layout.ROOT_FILE)
    except FileNotFoundError:
        return None
    try:
        return RootRecord.from_bytes(data)
    except EasyckptError as error:
        raise type(error)(f"{storage.root}/{layout.ROOT_FILE}: {error}") from error


def write_root(storage: Storage, record: RootRecord) -> None:
    """Make `record` the root's own, atomically and durably; the root is created where it is missing."""
    storage.makedirs("")
    storage.replace(layout.ROOT_FILE, record.to_bytes())


def _classify(name: str, naming: NamingScheme) -> Entry | None:
    """The entry that a name alone tells of."""
    step = naming.parse_committed(name)
    if step is not None:
        return Entry(step=step, name=name, kind="committed")
    temporary = naming.parse_temporary(name)
    if temporary is not None:
        return Entry(step=temporary[0], name=name, kind="temporary", attempt=temporary[1])
    stale = naming.parse_stale(name)
    if stale is not None:
        return Entry(step=stale[0], name=name, kind="stale", timeline=stale[1])
    before = naming.parse_trash(name)
    if before is not None:
        inner = _classify(before, naming)
        return Entry(step=-1 if inner is None else inner.step, name=name, kind="trash")
    return None


def _examined(storage: Storage, entry: Entry) -> Entry:
    if entry.kind == "trash":
        return entry
    manifest = None
    try:
        manifest = read_manifest(storage, entry.name)
        problem = _misfit(entry, manifest) or _missing_files(storage, entry.name, manifest)
    except FileNotFoundError:
        problem = f"no {layout.MANIFEST}: never committed"
    except EasyckptError as error:
        problem = f"{layout.MANIFEST}: {error}"
    except OSError as error:
        problem = f"{layout.MANIFEST} cannot be read: {error}"
    return Entry(
        step=manifest.step if manifest is not None and entry.step < 0 else entry.step,
        name=entry.name,
        kind=entry.kind,
        manifest=manifest,
        problem=problem,
        attempt=entry.attempt,
        timeline=entry.timeline or (manifest.timeline if manifest else None),
    )


def _misfit(entry: Entry, manifest: Manifest) -> str | None:
    """What of the manifest contradicts the name, or itself."""
    if entry.step not in (-1, manifest.step):
        return f"the manifest is of step {manifest.step}"
    if entry.attempt not in (None, manifest.attempt):
        return f"the manifest is of attempt {manifest.attempt}"
    shards = {rank for name in manifest.files if (rank := layout.parse_shard_file(name)) is not None}
    indexes = {rank for name in manifest.files if (rank := layout.parse_index_file(name)) is not None}
    if (shards or indexes) and not shards == indexes == set(range(manifest.world_size)):
        return f"the manifest does not list a shard and an index for each of {manifest.world_size} ranks"
    return None


def _missing_files(storage: Storage, directory: str, manifest: Manifest) -> str | None:
    for name, record in manifest.files.items():
        try:
            size = storage.stat_size(f"{directory}/{name}")
        except FileNotFoundError:
            return f"{name} is missing"
        except (EasyckptError, OSError) as error:
            return f"{name}: {error}"
        if size != record.size:
            return f"{name} has {size} bytes, the manifest says {record.size}"
    return None


def _read_record(storage: Storage, path: str) -> bytes:
    size = storage.stat_size(path)
    if size > MAX_RECORD_BYTES:
        raise DamagedCheckpoint(f"{path} has {size} bytes, which no record of ours has")
    return storage.read(path)


# Verification.


def verify(storage: Storage, entry: Entry, on_bytes: Callable[[int], None] | None = None) -> list[Problem]:
    """Read every byte that the manifest lists, past the cache and in bounded memory; [] means all is as committed.

    `on_bytes` hears how many bytes each piece had. Damage is returned, not raised, all of it.
    """
    count = on_bytes or _ignore
    manifest = entry.manifest
    if manifest is None:
        return [Problem(layout.MANIFEST, None, None, entry.problem or "cannot be read")]
    misfit = _misfit(entry, manifest)
    problems = [Problem(layout.MANIFEST, None, None, misfit)] if misfit else []
    indexes: dict[str, Index] = {}
    # Indexes first: they say which tensors a damaged chunk of a shard holds.
    for name in sorted(manifest.files, key=lambda name: (layout.parse_index_file(name) is None, name)):
        is_index = layout.parse_index_file(name) is not None
        check = _Check(storage, f"{entry.name}/{name}", manifest.files[name], indexes.get(name), keep=is_index)
        problems += check.run(count)
        if is_index and not check.problems:
            problems += _read_index(check.content(), name, manifest, indexes)
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
        with mmap.mmap(-1, CHUNK_BYTES) as buffer, memoryview(buffer) as view:
            for chunk in range(chunk_count(reader.size)):
                offset = chunk * CHUNK_BYTES
                expected = min(CHUNK_BYTES, reader.size - offset)
                try:
                    size = reader.read_into(view, offset)
                except OSError as error:
                    self._unreadable[chunk] = f"cannot be read: {error}"
                    digests.append("unreadable")
                    continue
                with view[: min(size, expected)] as piece:
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
