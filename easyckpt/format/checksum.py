"""Checksums of files: one xxh3 digest per chunk, and one over all of them.

Chunks are counted from byte 0 of a file, whatever pieces it was written in, so a writer, a reader and a verifier
that work with buffers of different sizes get the same digests. xxhash releases the GIL while it works on a large
buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import xxhash

if TYPE_CHECKING:
    import ctypes
    import mmap

    Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap | ctypes.Array[ctypes.c_ubyte]

#: Bytes that one chunk digest covers; the last chunk of a file is shorter.
CHUNK_BYTES = 8 * 1024 * 1024


class ChunkHasher:
    """Digests a stream that comes in pieces of any size."""

    __slots__ = ("_digests", "_filled", "_hash", "size")

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._hash = xxhash.xxh3_64()
        self._filled = 0
        self.size = 0

    def update(self, buffer: Buffer) -> None:
        """Take the next piece: contiguous memory, read as bytes."""
        view = memoryview(buffer)
        if view.nbytes == 0:
            return
        if view.ndim != 1 or view.format != "B":
            view = view.cast("B")
        self.size += view.nbytes
        position = 0
        while position < view.nbytes:
            piece = view[position : position + CHUNK_BYTES - self._filled]
            self._hash.update(piece)
            self._filled += piece.nbytes
            position += piece.nbytes
            if self._filled == CHUNK_BYTES:
                self._end_chunk()

    def finish(self) -> list[str]:
        """Return the digests of all chunks (none for an empty stream). The hasher is not used afterwards."""
        if self._filled:
            self._end_chunk()
        return self._digests

    def _end_chunk(self) -> None:
        self._digests.append(self._hash.hexdigest())
        self._hash.reset()
        self._filled = 0


def chunk_count(size: int) -> int:
    """How many chunk digests a file of `size` bytes has."""
    return -(-size // CHUNK_BYTES)


def chunk_digests(buffers: Iterable[Buffer]) -> list[str]:
    """Return the chunk digests (16 hex digits each) of the concatenation of `buffers`."""
    hasher = ChunkHasher()
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.finish()


def file_digest(size: int, chunks: Sequence[str]) -> str:
    """Return the digest of a whole file, ``xxh3:<16 hex digits>``, from its size and its chunk digests."""
    return "xxh3:" + xxhash.xxh3_64_hexdigest(f"{size}:{''.join(chunks)}".encode("ascii"))


def digest_bytes(data: Buffer) -> str:
    """Return the :func:`file_digest` of a file that holds `data`."""
    hasher = ChunkHasher()
    hasher.update(data)
    return file_digest(hasher.size, hasher.finish())
