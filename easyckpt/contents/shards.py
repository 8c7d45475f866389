"""Checkpoints of shards and indexes, as the engine writes them by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from easyckpt.contents.chunks import ChunkedFile
from easyckpt.contents.held import Held, OnBytes, place
from easyckpt.errors import DamagedCheckpoint
from easyckpt.format.codec import path_text
from easyckpt.format.dtypes import ITEM_BYTES
from easyckpt.format.image import Leaf
from easyckpt.format.manifest import Index, Manifest
from easyckpt.loading.reader import read_index
from easyckpt.storage.base import Storage


class Shards:
    """The `Source` of one."""

    def __init__(self, storage: Storage, directory: str, manifest: Manifest, on_bytes: OnBytes) -> None:
        self._storage, self._directory, self._manifest, self._on_bytes = storage, directory, manifest, on_bytes
        self._shards: dict[int, ChunkedFile] = {}
        self._first: Index | None = None

    def held(self, rank: int) -> Held:
        """See `Source`. Those leaves that rank 0 alone wrote are read from there."""
        index = self._index(rank)
        shared = not index.shard.write_replicated and rank != 0
        own = self._shard(index)
        first = self._index(0) if shared else index
        owner = self._shard(first)
        twins = {place(leaf.path): leaf for leaf in first.layout.leaves if leaf.replicated} if shared else {}
        stretches, written = [], []
        for leaf in index.layout.leaves:
            mine = not (shared and leaf.replicated)
            twin = leaf if mine else twins.get(place(leaf.path))
            if twin is None or (twin.dtype, twin.shape, twin.order) != (leaf.dtype, leaf.shape, leaf.order):
                raise DamagedCheckpoint(
                    f"{own.where}: {path_text(leaf.path)[:200]} is replicated, and rank 0 does not hold it"
                )
            stretches.append(_Stored(twin, own, index) if mine else _Stored(twin, owner, first))
            written.append(mine)
        return Held(index.layout, index.objects, stretches, written)

    def _index(self, rank: int) -> Index:
        if rank == 0 and self._first is not None:
            return self._first
        index = read_index(self._storage, self._directory, self._manifest, rank)
        if rank == 0:
            self._first = index
        return index

    def _shard(self, index: Index) -> ChunkedFile:
        if index.rank not in self._shards:
            for rank in self._shards.keys() - {0}:  # ranks are looked at one after the other
                self._shards.pop(rank).close()
            path = f"{self._directory}/{index.shard.name}"
            shard = ChunkedFile(self._storage, path, index.shard.size, index.shard.chunks, self._on_bytes)
            self._shards[index.rank] = shard
        return self._shards[index.rank]

    def close(self) -> None:
        """See `Source`."""
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a shard."""

    spec: Leaf
    file: ChunkedFile
    index: Index

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def position(self) -> tuple[str, int]:
        return self.index.shard.name, self.index.shard.header_bytes + self.spec.offset

    def read(self, begin: int, end: int) -> torch.Tensor:
        _, offset = self.position
        if offset + self.nbytes > self.index.shard.size:
            raise DamagedCheckpoint(f"{self.file.where} does not hold {path_text(self.spec.path)[:200]}")
        return self.file.read(offset + begin, min(end, self.nbytes) - begin, ITEM_BYTES[self.spec.dtype])
