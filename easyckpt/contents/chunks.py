"""The bytes of one file of a checkpoint, chunk by chunk, each compared with its checksum when it is read."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch

from easyckpt.contents.held import OnBytes
from easyckpt.errors import DamagedCheckpoint
from easyckpt.format.checksum import CHUNK_BYTES, chunk_digests
from easyckpt.storage.base import FileReader, Storage

#: Chunks of a file that are kept: tensors that two checkpoints hold in different orders are then not read anew.
_KEPT = 3


class ChunkedFile:
    """Opened when something is read; close it."""

    def __init__(self, storage: Storage, path: str, size: int, chunks: Sequence[str], on_bytes: OnBytes) -> None:
        """`chunks` are the digests of the file's chunks, which has `size` bytes."""
        self.where = f"{storage.root}/{path}"
        self._storage, self._path, self._size, self._digests, self._on_bytes = storage, path, size, chunks, on_bytes
        self._reader: FileReader | None = None
        self._chunks: dict[int, torch.Tensor] = {}
        self._memory: dict[int, mmap.mmap] = {}
        self._free: list[mmap.mmap] = []

    def read(self, position: int, limit: int, item: int) -> torch.Tensor:
        """Whole elements of `item` bytes from byte `position` of the file on, at least one, at most `limit` bytes."""
        number, inside = divmod(position, CHUNK_BYTES)
        if inside + item > CHUNK_BYTES:  # an element over the end of a chunk: files of others need not be aligned
            head = self._chunk(number)[inside:].clone()
            return torch.cat([head, self._chunk(number + 1)[: item - head.numel()]])
        count = min(limit, (CHUNK_BYTES - inside) // item * item)
        piece = self._chunk(number)[inside : inside + count]
        return piece.clone() if position % item else piece  # what is viewed as another dtype must be aligned for it

    def _chunk(self, number: int) -> torch.Tensor:
        if number in self._chunks:
            self._chunks[number] = self._chunks.pop(number)  # the newest stands last
            return self._chunks[number]
        offset = number * CHUNK_BYTES
        size = min(CHUNK_BYTES, self._size - offset)
        if len(self._free) + len(self._chunks) < _KEPT:
            self._free.append(mmap.mmap(-1, CHUNK_BYTES))
        elif not self._free:
            oldest = next(iter(self._chunks))
            del self._chunks[oldest]
            self._free.append(self._memory.pop(oldest))
        memory = self._free[-1]
        count = self._opened().read_into(memory, offset)
        with memoryview(memory) as view, view[: min(count, size)] as piece:
            if chunk_digests([piece]) != [self._digests[number]]:
                raise DamagedCheckpoint(
                    f"{self.where}: chunk {number}: its bytes are not those that were committed; see `easyckpt verify`"
                )
        self._on_bytes(size)
        self._memory[number] = self._free.pop()
        self._chunks[number] = torch.frombuffer(memory, dtype=torch.uint8, count=size)
        return self._chunks[number]

    def _opened(self) -> FileReader:
        if self._reader is None:
            self._reader = opened(self._storage, self._path, self._size)
        return self._reader

    def close(self) -> None:
        """It may be read again."""
        reader, self._reader = self._reader, None
        self._chunks.clear()
        self._memory.clear()
        self._free.clear()
        if reader is not None:
            reader.close()


def opened(storage: Storage, path: str, size: int) -> FileReader:
    """Open a file that must have `size` bytes, past the cache. Raises DamagedCheckpoint."""
    try:
        storage.drop_cache(path)
        reader = storage.reader(path)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{storage.root}/{path} is missing") from None
    if reader.size != size:
        found = reader.size
        reader.close()
        raise DamagedCheckpoint(f"{storage.root}/{path} has {found} bytes, the manifest says {size}")
    return reader


def digests_of(reader: FileReader, on_bytes: Callable[[int], None]) -> list[str]:
    """The digests of a file's chunks as they are now, in bounded memory."""
    digests: list[str] = []
    memory = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # not closed by name: an interrupt's frames may hold it
    for offset in range(0, reader.size, CHUNK_BYTES):
        expected = min(CHUNK_BYTES, reader.size - offset)
        digests += chunk_digests([memory[: min(reader.read_into(memory, offset), expected)]])
        on_bytes(expected)
    return digests
