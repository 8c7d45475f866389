"""Files of weights (``.safetensors``, ``.pth``) as components of tensors and values, to be compared like checkpoints.

Nothing in a file is run: the torch reader may build tensors and plain values only. Little of a file is in memory at a
time, however large it or one of its tensors is.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from easyckpt.contents import Component, OnBytes
from easyckpt.errors import DamagedCheckpoint, ForeignFormat, UsageError
from easyckpt.format import codec, layout
from easyckpt.format.codec import Path
from easyckpt.format.dtypes import dtype_name
from easyckpt.format.flat import TensorRef, flatten
from easyckpt.format.leaf import LeafSpec
from easyckpt.format.safetensors import header_size, parse_header
from easyckpt.memory.pages import MappedFile
from easyckpt.state.tensors import dense_order, require_supported
from easyckpt.storage.base import FileReader
from easyckpt.storage.local import LocalStorage

#: The one component of a file that is a plain table of tensors.
WHOLE = "tensors"
#: Bytes that are read in one go.
_PIECE = 4 << 20


class TensorFile:
    """A file, opened. Close it (or use ``with``)."""

    def __init__(self, path: str, on_bytes: OnBytes) -> None:
        """Raises ForeignFormat for what is no file of this kind, UnsupportedValue for what cannot be compared."""
        self._closing = ExitStack()
        kind = layout.weights_format(path)
        if kind is None:
            raise UsageError(f"{path}: neither a checkpoint nor {layout.WEIGHTS_FILE}")
        read = _safetensors if kind == "safetensors" else _torch_file
        try:
            self.components: dict[str, Component] = read(path, on_bytes, self._closing)
        except BaseException:
            self._closing.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()


def _spec(path: Path, dtype: str, shape: tuple[int, ...], order: tuple[int, ...]) -> LeafSpec:
    return LeafSpec(path, dtype, shape, order, "cpu", replicated=False)


# .safetensors


def _safetensors(path: str, on_bytes: OnBytes, closing: ExitStack) -> dict[str, Component]:
    directory, name = os.path.split(os.path.realpath(path))
    reader = closing.enter_context(LocalStorage(directory).reader(name))
    try:
        begin = header_size(_bytes(reader, 0, 8), reader.size)
        entries = parse_header(_bytes(reader, 8, begin - 8), reader.size - begin)
    except ForeignFormat as error:
        raise ForeignFormat(f"{path}: {error}") from None
    component = Component(WHOLE)
    source = _Source(reader, begin, on_bytes)
    for entry in sorted(entries, key=lambda entry: entry.key):
        key = component.add((WHOLE, entry.key))
        spec = _spec((entry.key,), entry.dtype, entry.shape, tuple(range(len(entry.shape))))
        component.tensors[key] = _InFile(spec, entry.end - entry.begin, entry.begin, source)
        component.primary.append(key)
    return {WHOLE: component}


def _bytes(reader: FileReader, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    return bytes(buffer[: reader.read_into(buffer, offset)])


class _Source:
    """The data of a file, block by block."""

    def __init__(self, reader: FileReader, start: int, on_bytes: OnBytes) -> None:
        self._reader, self._start, self._on_bytes = reader, start, on_bytes
        self._memory = mmap.mmap(-1, _PIECE)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._held = -1

    def read(self, begin: int, end: int, item: int) -> torch.Tensor:
        position = self._start + begin
        block, inside = divmod(position, _PIECE)
        if inside + item > _PIECE:  # an element over the end of a block: headers need not be aligned
            data = bytearray(_bytes(self._reader, position, item))
            return torch.frombuffer(data, dtype=torch.uint8)
        if block != self._held:
            self._held = -1
            count = self._reader.read_into(self._memory, block * _PIECE)
            if count < min(_PIECE, self._reader.size - block * _PIECE):
                raise DamagedCheckpoint("a file became shorter while it was read")
            self._held = block
            self._on_bytes(count)
        count = min(end - begin, (_PIECE - inside) // item * item)
        return self._tensor[inside : inside + count].clone()  # aligned for its dtype


@dataclass(frozen=True, slots=True)
class _InFile:
    """A tensor in a file of plain data."""

    spec: LeafSpec
    nbytes: int
    offset: int
    source: _Source

    @property
    def position(self) -> tuple[str, int]:
        return "", self.offset

    def read(self, begin: int, end: int) -> torch.Tensor:
        item = self.nbytes // max(1, math.prod(self.spec.shape)) or 1
        return self.source.read(self.offset + begin, self.offset + end, item)


# .pth


def _torch_file(path: str, on_bytes: OnBytes, closing: ExitStack) -> dict[str, Component]:
    value = _load(path)
    named = isinstance(value, Mapping) and bool(value)
    parts = value if named and all(isinstance(key, str) for key in value) else {}
    if not parts or any(isinstance(part, torch.Tensor) for part in parts.values()):
        parts = {WHOLE: value}  # a state_dict is one component
    pages = MappedFile(path)
    return {name: _parted(name, part, pages, on_bytes) for name, part in parts.items()}


def _load(path: str) -> Any:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ForeignFormat(f"{path}: is not a regular file")  # a pipe would be waited for
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n", 1)[0]
        raise ForeignFormat(f"{path}: holds more than tensors and plain values, and is not read: {reason}") from None
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - a foreign file may raise anything
        raise ForeignFormat(f"{path}: torch cannot read it: {' '.join(str(error).split())[:300]}") from None


def _parted(name: str, value: Any, pages: MappedFile, on_bytes: OnBytes) -> Component:
    tensors: list[torch.Tensor] = []

    def on_tensor(path: Path, tensor: torch.Tensor) -> int:
        tensors.append(require_supported(tensor.detach(), path))
        return len(tensors) - 1

    component = Component(name)
    for path, item in flatten(codec.encode(value, (name,), on_tensor), (name,)):
        if isinstance(value, Mapping) and (path == (name,) or path[1:2] == ("_metadata",)):
            continue  # which kind of dict it was, and torch's versions of modules, say nothing about the weights
        key = component.add(path)
        if isinstance(item, TensorRef):
            component.tensors[key] = _Mapped.of(tensors[item.number], path, pages, on_bytes)
            component.primary.append(key)
        else:
            component.values[key] = item
    return component


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A tensor whose storage is mapped from a file; pages that were read are let go of again."""

    spec: LeafSpec
    nbytes: int
    tensor: torch.Tensor
    dense: bool
    pages: MappedFile
    on_bytes: OnBytes

    @classmethod
    def of(cls, tensor: torch.Tensor, path: Path, pages: MappedFile, on_bytes: OnBytes) -> _Mapped:
        order = dense_order(tensor)
        spec = _spec(path, dtype_name(tensor.dtype), tuple(tensor.shape), order or tuple(range(tensor.dim())))
        return cls(spec, tensor.numel() * tensor.element_size(), tensor, order is not None, pages, on_bytes)

    @property
    def position(self) -> tuple[str, int]:
        return "", 0  # in the order of the file's own table

    def read(self, begin: int, end: int) -> torch.Tensor:
        end = min(end, begin + _PIECE, self.nbytes)
        storage = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self.tensor.untyped_storage())
        first = int(self.tensor.storage_offset()) * self.tensor.element_size()
        if self.dense:
            source = storage[first + begin : first + end]
            piece = source.clone()
            self.pages.forget(source.data_ptr(), source.numel())
        else:
            piece = self._gather(storage, first, begin, end)
            self.pages.forget(storage.data_ptr(), storage.numel())
        self.on_bytes(end - begin)
        return piece

    def _gather(self, storage: torch.Tensor, first: int, begin: int, end: int) -> torch.Tensor:
        """Elements of a strided view, one by one in their logical order."""
        item = self.tensor.element_size()
        rest = torch.arange(begin // item, end // item, device="cpu")
        places = torch.full_like(rest, first)
        for size, stride in zip(reversed(self.spec.shape), reversed(self.tensor.stride()), strict=True):
            places += rest % size * (stride * item)
            rest //= size
        return storage[(places[:, None] + torch.arange(item, device="cpu")).reshape(-1)]
