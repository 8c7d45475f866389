"""Writing a ``.pth`` state dict as a stream: torch.save makes the archive, and the tensors' bytes come piece by piece.

torch.save is asked to leave the bytes of storages out (``torch.serialization.skip_data``); it then skips over their
places in the file, one after the other, and that is where they are written. The archive's checksums, which torch.save
cannot know then, are put in on the way, so that it is a sound zip file for everybody.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, cast

import torch

#: Gives the bytes of storage number n, in pieces.
Pieces = Callable[[int], Iterator[memoryview]]
Write = Callable[[memoryview], None]

_DESCRIPTOR, _ENTRY = b"PK\x07\x08", b"PK\x01\x02"
_ENTRY_HEAD = struct.Struct("<4s6H3L5H2L")


def save(value: Any, sizes: Sequence[int], pieces: Pieces, write: Write) -> None:
    """Write `value` as torch.save does, through `write`.

    Its storages, in the order in which they are met, have the bytes `sizes`, which come from `pieces`.
    """
    sink = _Archive(sizes, pieces, write)
    with torch.serialization.skip_data():
        torch.save(value, cast(IO[bytes], sink))
    sink.finish()


class _Archive:
    """The file that torch.save writes to: it only ever writes, and skips over what `pieces` gives."""

    def __init__(self, sizes: Sequence[int], pieces: Pieces, write: Write) -> None:
        self._pieces, self._write = pieces, write
        self._position = 0
        self._storages = [number for number, size in reversed(list(enumerate(sizes))) if size]  # the next one last
        self._crc: int | None = None  # of the storage whose descriptor comes next
        self._checksums: dict[int, int] = {}  # by number of the storage
        self._failure: BaseException | None = None
        self._tail = bytearray()  # what was written since the last storage: the directory of the archive is in it

    def write(self, data: memoryview | bytes) -> int:
        """Take what torch.save writes."""
        text = bytes(data)
        if self._crc is not None:
            if text[:4] == _DESCRIPTOR:
                text = _DESCRIPTOR + struct.pack("<L", self._crc) + text[8:]
            self._crc = None
        self._tail += text
        self._position += len(text)
        return len(text)

    def seek(self, count: int, whence: int = 0) -> int:
        """Fill the place of a storage, over which torch.save skips."""
        if whence != 1 or count < 0 or not self._storages:
            raise OSError("this version of torch writes archives in another way than this one of easyckpt knows")
        number = self._storages.pop()
        self._position += count
        if self._failure is None:
            try:
                self._fill(number, count)
            except BaseException as error:  # noqa: BLE001 - raised by `finish`: torch would put its own in its place
                self._failure = error
        return self._position

    def _fill(self, number: int, count: int) -> None:
        self._flush()
        crc = written = 0
        for piece in self._pieces(number):
            crc = zlib.crc32(piece, crc)
            self._write(piece)
            written += piece.nbytes
        if written != count:
            raise OSError(f"torch left {count} bytes for a storage of {written}")
        self._crc = self._checksums[number] = crc

    def tell(self) -> int:
        """How much was written."""
        return self._position

    def flush(self) -> None:
        """Nothing is held back that could be written yet."""

    def finish(self) -> None:
        """Put the storages' checksums into the archive's directory, and write it. Raises what has failed before."""
        if self._failure is not None:
            raise self._failure
        if self._storages:
            raise OSError(f"torch left no place for {len(self._storages)} storages")
        position = self._tail.find(_ENTRY)
        while self._tail[position : position + 4] == _ENTRY:
            fields = _ENTRY_HEAD.unpack_from(self._tail, position)
            name_size, extra_size, comment_size = fields[10:13]
            begin = position + _ENTRY_HEAD.size
            folder, _, number = bytes(self._tail[begin : begin + name_size]).decode("utf-8").rpartition("/")
            if folder.endswith("/data") and number.isdecimal() and int(number) in self._checksums:
                struct.pack_into("<L", self._tail, position + 16, self._checksums[int(number)])
            position = begin + name_size + extra_size + comment_size
        self._flush()

    def _flush(self) -> None:
        self._write(memoryview(bytes(self._tail)))
        self._tail.clear()
