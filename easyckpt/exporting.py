"""Weights out of a checkpoint into a file of their own, cast to another precision, as a stream.

The checkpoint is only read. The file is written beside its final name, made durable, and renamed.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from easyckpt import exporting_torch
from easyckpt.contents import Component, OnBytes, Stretch, ignore
from easyckpt.errors import UsageError
from easyckpt.format import layout
from easyckpt.format.codec import Path, path_text
from easyckpt.format.dtypes import DTYPES, ITEM_BYTES, dtype_name
from easyckpt.format.flat import Container
from easyckpt.format.safetensors import make_header
from easyckpt.pieces import logical_pieces, memory_of, stored_pieces
from easyckpt.storage.base import ALIGNMENT, Buffer, FileReader, FileWriter, WritableBuffer
from easyckpt.storage.local import LocalStorage

_BUFFER = 8 << 20
#: Elements that are cast in one go.
_CAST = 1 << 16


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the file to be."""

    key: str
    """As the module's state_dict has it."""
    stretch: Stretch
    dtype: str
    """What it is written as."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.stretch.spec.shape

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(slots=True)
class Exported:
    """What became of an export."""

    file_bytes: int = 0
    cast: int = 0
    """Tensors whose dtype was changed."""
    tied: dict[str, str] = field(default_factory=dict)
    """Keys whose tensor is another key's."""
    overflows: dict[str, int] = field(default_factory=dict)
    """By key: finite values that the new dtype has not, and that became infinite."""
    left_out: list[str] = field(default_factory=list)
    """Paths of what is no tensor and so no weight: a module's extra state."""


def plan(component: Component, dtype: torch.dtype, result: Exported) -> list[Weight]:
    """What is to be written of `component`: floating tensors as `dtype`, all others as they are.

    Raises UsageError where its tensors have no names of their own, as those of an optimizer.
    """
    weights: list[Weight] = []
    names: dict[Path, str] = {}
    for key, stretch in component.tensors.items():
        path = component.paths[key]
        if len(path) != 2 or type(path[1]) is not str:
            raise UsageError(
                f"component {component.name!r} is no state dict: {path_text(path)[:200]} has no name of its own in it"
            )
        kind = DTYPES[stretch.spec.dtype]
        wanted = dtype if kind.is_floating_point and not stretch.spec.dtype.endswith("_x2") else kind
        result.cast += wanted is not kind
        weights.append(Weight(path[1], stretch, dtype_name(wanted)))
        if stretch.spec.path in names:
            result.tied[path[1]] = names[stretch.spec.path]
        names.setdefault(stretch.spec.path, path[1])
    for key, value in component.values.items():
        path = component.paths[key]
        if len(path) > 1 and path[1] != "_metadata" and not (isinstance(value, Container) and len(path) == 1):
            result.left_out.append(path_text(path))
    if not weights:
        raise UsageError(f"component {component.name!r} holds no tensors")
    return weights


def export(weights: list[Weight], path: str, result: Exported, on_bytes: OnBytes = ignore) -> None:
    """Write `weights` to `path`, whose ending says in which format, atomically and durably. What is there is replaced.

    Raises UnsupportedValue for what the format cannot hold, DamagedCheckpoint where bytes are not as committed.
    """
    directory, _, name = path.rpartition("/")
    storage = LocalStorage(directory or "/" if path.startswith("/") else directory or ".")
    scratch = _Scratch(storage.root, layout.temp_file(name, secrets.token_hex(8)))
    temporary = layout.temp_file(name, secrets.token_hex(8))
    writer = storage.create(temporary)
    try:
        with writer, _Stream(writer, on_bytes) as stream, scratch:
            if layout.weights_format(name) == "safetensors":
                _write_safetensors(weights, stream, result, scratch)
            else:
                _write_torch(weights, stream, result)
            result.file_bytes = stream.finish()
        storage.rename(temporary, name)
        storage.sync_dir("")
    except BaseException:
        if storage.exists(temporary):
            storage.remove(temporary)
        raise


def _write_safetensors(weights: list[Weight], stream: _Stream, result: Exported, scratch: _Scratch) -> None:
    """Tied tensors are written under each of their names: load_state_dict(strict=True) asks for all of them."""
    weights = sorted(weights, key=lambda weight: -ITEM_BYTES[weight.dtype])  # so that all are aligned
    stream.write(memoryview(make_header(((w.key, w.dtype, w.shape) for w in weights), {"format": "pt"})))
    for weight in weights:
        for piece in _cast(weight, logical_pieces(weight.stretch, scratch), result):
            stream.write(piece)


def _write_torch(weights: list[Weight], stream: _Stream, result: Exported) -> None:
    """Tied tensors are one tensor under several names, and memory formats are kept, as torch.save does it."""
    own = [weight for weight in weights if weight.key not in result.tied]
    made = {weight.key: _stand_in(weight) for weight in own}
    state = {weight.key: made[result.tied.get(weight.key, weight.key)] for weight in weights}

    def pieces(number: int) -> Iterator[memoryview]:
        return _cast(own[number], stored_pieces(own[number].stretch), result)

    exporting_torch.save(state, [weight.nbytes for weight in own], pieces, stream.write)


def _stand_in(weight: Weight) -> torch.Tensor:
    """A tensor of which only the form is looked at: memory that nobody touches takes no room."""
    spec = weight.stretch.spec
    stored = torch.empty(spec.stored_shape, dtype=DTYPES[weight.dtype], device="cpu")
    return stored.permute([spec.order.index(dimension) for dimension in range(len(spec.order))])


def _cast(weight: Weight, pieces: Iterator[torch.Tensor], result: Exported) -> Iterator[memoryview]:
    """The bytes of `weight` as they are to be written."""
    source, target = DTYPES[weight.stretch.spec.dtype], DTYPES[weight.dtype]
    for data in pieces:
        if source is target:
            yield memory_of(data)
            continue
        # Small pieces: what is made on the way comes from the same memory again and again.
        for begin in range(0, data.numel(), _CAST * source.itemsize):
            values = data[begin : begin + _CAST * source.itemsize].view(source)
            if source.itemsize == 1:
                values = values.to(torch.float32)  # what every torch can do with young dtypes
            cast = values.to(target)
            lost = int((cast.isinf() & ~values.isinf()).sum())
            if lost:
                result.overflows[weight.key] = result.overflows.get(weight.key, 0) + lost
            yield memory_of(cast.view(torch.uint8))


class _Stream:
    """Bytes of any sizes, one after the other, as large aligned writes."""

    def __init__(self, writer: FileWriter, on_bytes: OnBytes) -> None:
        self._writer, self._on_bytes = writer, on_bytes
        self._memory = mmap.mmap(-1, _BUFFER)
        self._view = memoryview(self._memory)
        self._filled = self._written = 0

    def write(self, data: memoryview) -> None:
        """Append `data`, which is copied."""
        data = data.cast("B")
        while data.nbytes:
            count = min(data.nbytes, _BUFFER - self._filled)
            self._view[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == _BUFFER:
                self._writer.write_at(self._view, self._written)
                self._written, self._filled = self._written + _BUFFER, 0
                self._on_bytes(_BUFFER)

    def finish(self) -> int:
        """Write what is left, to the exact length, and make it durable; returns the length."""
        size = self._written + self._filled
        block = -(-self._filled // ALIGNMENT) * ALIGNMENT
        self._writer.write_at(self._view[:block], self._written)
        self._writer.truncate(size)
        self._writer.sync()
        return size

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BufferError):  # what was interrupted still looks at it: it goes with that
            self._view.release()
            self._memory.close()


class _Scratch:
    """A file beside the one that is written, made when it is needed, without a name: nothing of it stays behind."""

    def __init__(self, directory: str, name: str) -> None:
        self._storage, self._name = LocalStorage(directory, direct_io=False), name
        self._closing = contextlib.ExitStack()
        self._files: tuple[FileWriter, FileReader] | None = None

    def write_at(self, buffer: Buffer, offset: int) -> None:
        """Write all of `buffer`, to whatever place."""
        self._opened()[0].write_at(buffer, offset)

    def read_into(self, buffer: WritableBuffer, offset: int) -> int:
        """Read what was written."""
        return self._opened()[1].read_into(buffer, offset)

    def _opened(self) -> tuple[FileWriter, FileReader]:
        if self._files is None:
            writer = self._closing.enter_context(self._storage.create(self._name))
            try:
                self._files = writer, self._closing.enter_context(self._storage.reader(self._name))
            finally:
                self._storage.remove(self._name)
        return self._files

    def __enter__(self) -> _Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
