"""What is in a committed checkpoint, for those who look into it: every tensor and every other value by its place.

Bytes are streamed: in pieces of at most one chunk, past the cache, each chunk compared with its checksum before anybody
sees it. So any checkpoint can be read in little memory, however large one of its tensors is.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from easyckpt import catalog
from easyckpt.catalog import Entry
from easyckpt.errors import DamagedCheckpoint
from easyckpt.format.canonical import dumps
from easyckpt.format.checksum import CHUNK_BYTES, chunk_digests
from easyckpt.format.codec import Path, path_text, path_to_json
from easyckpt.format.flat import Container, Plain, TensorRef, flatten, path_key_of
from easyckpt.format.image import Leaf, LeafSpec
from easyckpt.format.manifest import Index, Manifest
from easyckpt.loading.reader import read_index
from easyckpt.state.components import Saved, read_saved
from easyckpt.storage.base import FileReader, Storage

#: Chunks of one shard that are kept: tensors that two checkpoints hold in different orders are then not read anew.
_KEPT = 3

OnBytes = Callable[[int], None]


def ignore(count: int) -> None:
    """The OnBytes for whoever shows no progress."""


class Stretch(Protocol):
    """One tensor, wherever its bytes are: contiguous with its dimensions in `spec.order`."""

    @property
    def spec(self) -> LeafSpec:
        """What it is, and where in the state."""
        ...

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        ...

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Its bytes from `begin` on, at least one element and at most up to `end`, as a flat uint8 tensor.

        What is returned is only lent: it may change at the next read of any tensor of the same file. Raises
        DamagedCheckpoint where the bytes are not those that were committed.
        """
        ...


@dataclass(slots=True)
class Component:
    """One component of the state on one rank."""

    name: str
    kind: str = ""
    """``module``, ``optimizer`` and so on: what wrote it."""
    tensors: dict[bytes, Stretch] = field(default_factory=dict)
    """By :func:`place` of each reference to a tensor: tied ones have several."""
    primary: list[bytes] = field(default_factory=list)
    """The places of the tensors that this rank wrote, in the order of the checkpoint, each tensor once."""
    ties: dict[bytes, Path] = field(default_factory=dict)
    """Of references to a tensor that is stored elsewhere: where."""
    values: dict[bytes, Plain | Container] = field(default_factory=dict)
    """All that is not a tensor, by place."""
    paths: dict[bytes, Path] = field(default_factory=dict)

    def add(self, path: Path) -> bytes:
        """Note `path`; returns its place."""
        key = place(path)
        self.paths.setdefault(key, path)
        return key


def place(path: Path) -> bytes:
    """A key for `path` that tells 1 from True and 1.0."""
    return dumps(path_to_json(path))


class Opened:
    """A checkpoint to be looked into, rank by rank. Close it (or use ``with``) to close its files."""

    def __init__(self, storage: Storage, entry: Entry, on_bytes: OnBytes = ignore) -> None:
        """Raises FormatError for a manifest that cannot be read, DamagedCheckpoint for what is no valid checkpoint."""
        where = f"{storage.root}/{entry.name}"
        try:
            self.manifest: Manifest = catalog.read_manifest(storage, entry.name)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{where}: {entry.problem or 'it is gone'}") from None
        if entry.problem is not None:
            raise DamagedCheckpoint(f"{where}: {entry.problem}")
        self._storage, self._directory, self._on_bytes = storage, entry.name, on_bytes
        self._shards: dict[int, _Shard] = {}
        self._first: Index | None = None

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return self.manifest.world_size

    def index(self, rank: int) -> Index:
        """The index of `rank`, checked. Raises FormatError naming the file."""
        if rank == 0 and self._first is not None:
            return self._first
        index = read_index(self._storage, self._directory, self.manifest, rank)
        if rank == 0:
            self._first = index
        return index

    def components(self, rank: int) -> dict[str, Component]:
        """What `rank` holds, in the order of the checkpoint; what another rank wrote for it too."""
        index = self.index(rank)
        stretches = self._stretches(index)
        trees = index.layout.trees if isinstance(index.layout.trees, dict) else {}
        objects = index.objects.get("trees") if isinstance(index.objects, dict) else None
        objects = objects if isinstance(objects, dict) else {}
        found: dict[str, Component] = {}
        for name in trees:
            found[name] = _component(read_saved(name, index.layout, trees, objects), stretches)
        alone = index.rank == 0 or index.shard.write_replicated
        for stretch in stretches:
            if stretch.spec.replicated and not alone:
                continue
            component = found.setdefault(str(stretch.spec.path[0]), Component(str(stretch.spec.path[0]), "unknown"))
            key = component.add(stretch.spec.path)
            component.tensors.setdefault(key, stretch)
            component.primary.append(key)
        return found

    def _stretches(self, index: Index) -> list[_Stored]:
        """One for each leaf; those that rank 0 alone wrote are read from there."""
        shared = not index.shard.write_replicated and index.rank != 0
        first = {place(leaf.path): leaf for leaf in self.index(0).layout.leaves if leaf.replicated} if shared else {}
        own, owner = self._shard(index), self._shard(self.index(0)) if shared else self._shard(index)
        result = []
        for leaf in index.layout.leaves:
            if not (shared and leaf.replicated):
                result.append(_Stored(leaf, own))
                continue
            twin = first.get(place(leaf.path))
            if twin is None or (twin.dtype, twin.shape, twin.order) != (leaf.dtype, leaf.shape, leaf.order):
                raise DamagedCheckpoint(
                    f"{own.where}: {path_text(leaf.path)[:200]} is replicated, and rank 0 does not hold it"
                )
            result.append(_Stored(twin, owner))
        return result

    def _shard(self, index: Index) -> _Shard:
        if index.rank not in self._shards:
            if self._shards.keys() - {0}:  # ranks are looked at one after the other
                for rank in self._shards.keys() - {0}:
                    self._shards.pop(rank).close()
            self._shards[index.rank] = _Shard(self._storage, self._directory, index, self._on_bytes)
        return self._shards[index.rank]

    def close(self) -> None:
        """Close its files. A second call does nothing."""
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _component(saved: Saved, stretches: list[_Stored]) -> Component:
    component = Component(saved.name, saved.kind)
    for path, item in _places(saved):
        key = component.add(path)
        if not isinstance(item, TensorRef):
            component.values[key] = item
            continue
        saved.ref(item.number)  # raises where there is none
        stretch = stretches[saved.numbers[item.number]]
        component.tensors[key] = stretch
        if stretch.spec.path != path:
            component.ties[key] = stretch.spec.path
    return component


def _places(saved: Saved) -> Iterator[tuple[Path, TensorRef | Container | Plain]]:
    """All that a component holds, each under the path that people know it by."""
    root: Path = (saved.name,)
    if saved.kind == "module" and saved.static is not None:
        names = saved.fields(saved.static).items("names")
        yield from (((*root, name), TensorRef(number)) for number, name in enumerate(names))
    elif saved.kind == "optimizer":
        yield from _optimizer_places(saved, root)
    else:
        for part in (saved.static, saved.dynamic):
            if part is not None:
                yield from flatten(part, root)


def _optimizer_places(saved: Saved, root: Path) -> Iterator[tuple[Path, TensorRef | Container | Plain]]:
    static, dynamic = saved.fields(saved.static), saved.fields(saved.dynamic)
    values = iter(dynamic.items("values"))
    for entry in static.items("entries"):
        fields = saved.fields(entry)
        of = fields.raw("of")
        owner = path_key_of(saved.fields(of).raw("key")) if type(of) is dict else of
        where = (*root, "state", owner)
        for item in fields.items("items"):
            if type(item) is not list or len(item) != 2:
                raise saved.damaged("an entry of its state is no pair")
            path = where if fields.raw("whole") is True else (*where, path_key_of(item[0]))
            if type(item[1]) is int:
                yield path, TensorRef(item[1])
            else:
                yield from flatten(next(values, None), path)
    for number, group in enumerate(dynamic.items("groups")):
        yield from flatten(group, (*root, "param_groups", number))
    for name in ("groups", "names", "parameters"):  # counts, names and shapes of the parameters
        for number, value in enumerate(static.items(name)):
            if name == "parameters" and type(value) is list:
                value = value[1:]  # noqa: PLW2901 - where a parameter lived is no part of the state
            yield (*root, name, number), Plain(value)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a shard."""

    spec: Leaf
    shard: _Shard

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.shard.read(self.spec, begin, end)


class _Shard:
    """The bytes of one shard file, chunk by chunk, each compared with its checksum when it is read."""

    def __init__(self, storage: Storage, directory: str, index: Index, on_bytes: OnBytes) -> None:
        self._path = f"{directory}/{index.shard.name}"
        self.where = f"{storage.root}/{self._path}"
        self._storage, self._record, self._on_bytes = storage, index.shard, on_bytes
        self._reader: FileReader | None = None
        self._chunks: dict[int, torch.Tensor] = {}
        self._memory: dict[int, mmap.mmap] = {}
        self._free: list[mmap.mmap] = []

    def read(self, leaf: Leaf, begin: int, end: int) -> torch.Tensor:
        position = self._record.header_bytes + leaf.offset + begin
        if self._record.header_bytes + leaf.offset + leaf.nbytes > self._record.size:
            raise DamagedCheckpoint(f"{self.where} does not hold {path_text(leaf.path)[:200]}")
        number, inside = divmod(position, CHUNK_BYTES)
        # Offsets in a file are multiples of the item size, and so are chunks: no element lies in two of them.
        return self._chunk(number)[inside : inside + min(end, leaf.nbytes) - begin]

    def _chunk(self, number: int) -> torch.Tensor:
        if number in self._chunks:
            self._chunks[number] = self._chunks.pop(number)  # the newest stands last
            return self._chunks[number]
        offset = number * CHUNK_BYTES
        size = min(CHUNK_BYTES, self._record.size - offset)
        if len(self._free) + len(self._chunks) < _KEPT:
            self._free.append(mmap.mmap(-1, CHUNK_BYTES))
        elif not self._free:
            oldest = next(iter(self._chunks))
            del self._chunks[oldest]
            self._free.append(self._memory.pop(oldest))
        memory = self._free[-1]
        count = self._opened().read_into(memory, offset)
        with memoryview(memory) as view, view[: min(count, size)] as piece:
            if chunk_digests([piece]) != [self._record.chunks[number]]:
                raise DamagedCheckpoint(
                    f"{self.where}: chunk {number}: its bytes are not those that were committed; see `easyckpt verify`"
                )
        self._on_bytes(size)
        self._memory[number] = self._free.pop()
        self._chunks[number] = torch.frombuffer(memory, dtype=torch.uint8, count=size)
        return self._chunks[number]

    def _opened(self) -> FileReader:
        if self._reader is None:
            try:
                self._storage.drop_cache(self._path)
                self._reader = self._storage.reader(self._path)
            except FileNotFoundError:
                raise DamagedCheckpoint(f"{self.where} is missing") from None
        if self._reader.size != self._record.size:
            raise DamagedCheckpoint(
                f"{self.where} has {self._reader.size} bytes, the manifest says {self._record.size}"
            )
        return self._reader

    def close(self) -> None:
        reader, self._reader = self._reader, None
        self._chunks.clear()
        self._memory.clear()
        self._free.clear()
        if reader is not None:
            reader.close()
