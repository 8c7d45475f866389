"""Checkpoints whose files have another framework's layout: see `easyckpt.format.parts`.

The manifest has one checksum for each file. So the first tensor that is read of a file has all of the file read, and
the digests of its chunks compared with that; what is read afterwards is compared with these digests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from easyckpt.contents.chunks import ChunkedFile, digests_of, opened
from easyckpt.contents.held import Held, OnBytes, ignore
from easyckpt.errors import DamagedCheckpoint, FormatError
from easyckpt.format.checksum import file_digest
from easyckpt.format.dtypes import ITEM_BYTES
from easyckpt.format.image import Leaf
from easyckpt.format.layout import MANIFEST
from easyckpt.format.manifest import Manifest
from easyckpt.format.parts import CARRIED, Part, Place, locate, read_part
from easyckpt.storage.base import Storage


class Parts:
    """The `Source` of one. One file is open at a time."""

    def __init__(self, storage: Storage, directory: str, manifest: Manifest, on_bytes: OnBytes) -> None:
        self._storage, self._directory, self._manifest, self._on_bytes = storage, directory, manifest, on_bytes
        self._where = f"{storage.root}/{directory}"
        self._first: Part | None = None
        self._verified: dict[str, list[str]] = {}
        self._open: tuple[str, ChunkedFile] | None = None

    def held(self, rank: int) -> Held:
        """See `Source`."""
        part = self._part(rank)
        try:
            located = locate(part, part if rank == 0 else self._part(0))
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{self._where}: {error}") from None
        stretches = [
            _Placed(leaf, there, owner, self) for leaf, (owner, there) in zip(part.layout.leaves, located, strict=True)
        ]
        return Held(part.layout, part.objects, stretches, part.written)

    def _part(self, rank: int) -> Part:
        if rank == 0 and self._first is not None:
            return self._first
        try:
            part = read_part(self._manifest.parts, rank, self._manifest.files)
        except FormatError as error:
            raise type(error)(f"{self._where}/{MANIFEST}: {error}") from error
        if rank == 0:
            self._first = part
        return part

    def file(self, name: str) -> ChunkedFile:
        """A file that was verified as a whole."""
        if self._open is not None and self._open[0] == name:
            return self._open[1]
        self.close()
        path, record = f"{self._directory}/{name}", self._manifest.files[name]
        if name not in self._verified:
            with opened(self._storage, path, record.size) as reader:
                digests = digests_of(reader, self._on_bytes)
            if file_digest(record.size, digests) != record.digest:
                raise DamagedCheckpoint(
                    f"{self._where}/{name}: its bytes are not those that were committed; see `easyckpt verify`"
                )
            self._verified[name] = digests
        file = ChunkedFile(self._storage, path, record.size, self._verified[name], ignore)
        self._open = name, file
        return file

    def close(self) -> None:
        """See `Source`."""
        if self._open is not None:
            self._open[1].close()
        self._open = None


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor in one of the files, or in the part itself."""

    spec: Leaf
    position: Place
    owner: Part
    source: Parts

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    def read(self, begin: int, end: int) -> torch.Tensor:
        name, offset = self.position
        end = min(end, self.nbytes)
        if name == CARRIED:
            return torch.frombuffer(bytearray(self.owner.carried[offset + begin : offset + end]), dtype=torch.uint8)
        return self.source.file(name).read(offset + begin, end - begin, ITEM_BYTES[self.spec.dtype])
