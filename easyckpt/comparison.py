"""Two checkpoints, compared to the bit: which tensors and which other values differ, and by how much.

What counts is what a program would get back: a tensor's elements in their logical order, whatever memory format each
side kept them in, and the other state value by value. Where a tensor lived (CPU or GPU) does not count.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import torch

from easyckpt.catalog import Entry
from easyckpt.contents import Component, OnBytes, Opened, Stretch, ignore
from easyckpt.format.canonical import dumps
from easyckpt.format.codec import Path, path_text
from easyckpt.format.difference import differing_bits, element_text, further, largest_difference
from easyckpt.format.dtypes import DTYPES
from easyckpt.format.flat import Container, Plain
from easyckpt.storage.base import Storage

#: Tensors whose memory formats differ are compared block by block, each of at most this size.
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor, or one value of the other state, that differs."""

    component: str
    """The first element of the path."""
    path: str
    """As people write it."""
    rank: int
    largest: float | None
    """Largest absolute difference; 0 where only zeros' signs differ, NaN where a NaN is on one side or both, an int for
    whole numbers (exactly). None: not a matter of numbers."""
    differing: int
    """Elements whose bits differ; 0 for what cannot be compared element by element, and for what is no tensor."""
    note: str
    """What differs, such as ``only in A`` or ``[0, 3]: 0.1 against 0.2``."""


@dataclass(slots=True)
class Compared:
    """One component, over all ranks."""

    component: str
    tensors: int = 0
    """Tensors compared, those on one side only too; tied ones and what all ranks share count once."""
    values: int = 0
    """Values that are no tensors."""
    nbytes: int = 0
    """Bytes of the tensors (of the first checkpoint's, where it has them)."""
    differing: int = 0
    """Tensors and values that differ."""
    largest: float | None = None
    """The largest of the differences that are numbers; NaN where one is NaN."""
    first: str | None = None
    """Path of the first that differs, in the order of the checkpoint: tensors before other values."""

    @property
    def equal(self) -> bool:
        """Whether everything is equal to the bit."""
        return self.differing == 0


@dataclass(slots=True)
class Comparison:
    """What two checkpoints have in common."""

    components: dict[str, Compared] = field(default_factory=dict)
    """By name, in the order of the first checkpoint; those of the second alone come last."""
    differences: list[Difference] = field(default_factory=list)
    """All of them, by rank, and then in the order of the checkpoint."""

    @property
    def equal(self) -> bool:
        """Whether everything is equal to the bit."""
        return not self.differences


def compare(one: tuple[Storage, Entry], other: tuple[Storage, Entry], on_bytes: OnBytes | None = None) -> Comparison:
    """Compare two checkpoints, all ranks, streaming both past the cache in bounded memory.

    `on_bytes` hears how many bytes were read, of both together. Raises DamagedCheckpoint where bytes are not what was
    committed: what differs by accident is no difference.
    """
    result = Comparison()
    with Opened(*one, on_bytes or ignore) as here, Opened(*other, on_bytes or ignore) as there:
        for rank in range(max(here.world_size, there.world_size)):
            mine = here.components(rank) if rank < here.world_size else {}
            theirs = there.components(rank) if rank < there.world_size else {}
            compare_components(mine, theirs, rank, result)
    return result


def compare_components(mine: dict[str, Component], theirs: dict[str, Component], rank: int, result: Comparison) -> None:
    """Compare what one rank (or one file) holds on both sides, and add it to `result`."""
    for name in {**mine, **theirs}:
        total = result.components.setdefault(name, Compared(name))
        one, other = mine.get(name), theirs.get(name)
        for found in _component(one, other, rank, total):
            result.differences.append(found)
            total.differing += 1
            total.largest = further(total.largest, found.largest)
            total.first = total.first or found.path


def _component(one: Component | None, other: Component | None, rank: int, total: Compared) -> Iterator[Difference]:
    if one is None or other is None:
        alone = one or other
        assert alone is not None
        total.tensors += len(alone.primary)
        total.nbytes += sum(alone.tensors[key].nbytes for key in alone.primary)
        total.values += sum(isinstance(value, Plain) for value in alone.values.values())
        yield Difference(alone.name, alone.name, rank, None, 0, "only in B" if one is None else "only in A")
        return
    if one.kind != other.kind:
        yield Difference(one.name, one.name, rank, None, 0, f"kind {one.kind} against {other.kind}")
    primary = dict.fromkeys([*one.primary, *other.primary])
    found: dict[bytes, Difference] = {}
    # In the order of the file, so that each of its bytes is read once; told in the order of the checkpoint.
    for key in sorted(primary, key=lambda key: _offset(one.tensors.get(key))):
        a, b = one.tensors.get(key), other.tensors.get(key)
        total.tensors += 1
        total.nbytes += sum(side.nbytes for side in (a or b,) if side)
        outcome = _tensors(a, b, key in other.values or key in one.values)
        if outcome is not None:
            path = one.paths[key] if key in one.paths else other.paths[key]
            found[key] = Difference(one.name, path_text(path), rank, *outcome)
    yield from (found[key] for key in primary if key in found)
    yield from _others(one, other, rank, total)


def _offset(stretch: Stretch | None) -> float:
    return math.inf if stretch is None else getattr(stretch.spec, "offset", 0)


Outcome = tuple[float | None, int, str]
"""Largest difference, elements that differ, note."""


def _tensors(one: Stretch | None, other: Stretch | None, value: bool) -> Outcome | None:
    """Compare two tensors; None where they are equal. `value`: one side has something else there, told elsewhere."""
    if one is None or other is None:
        return None if value else (None, 0, "only in B" if one is None else "only in A")
    a, b = one.spec, other.spec
    if a.shape != b.shape:
        return None, 0, f"shape {a.shape} against {b.shape}"
    if a.dtype != b.dtype:
        return None, 0, f"{a.dtype} against {b.dtype}"
    largest, count, note = None, 0, ""
    for positions, piece, twin in _pieces(one, other) if _same_order(one, other) else _blocks(one, other):
        differing, apart = largest_difference(piece, twin, DTYPES[a.dtype])
        if differing and not count:
            note = _first(positions, piece, twin, DTYPES[a.dtype])
        count += differing
        largest = further(largest, apart)
    return (largest, count, note) if count else None


def _same_order(one: Stretch, other: Stretch) -> bool:
    """Whether equal tensors have their bytes in the same order: dimensions of size 1 may stand anywhere."""
    a, b = ([d for d in stretch.spec.order if stretch.spec.shape[d] != 1] for stretch in (one, other))
    return a == b


class _Positions:
    """Where in a tensor the elements of one piece are."""

    def __init__(self, shape: tuple[int, ...], order: tuple[int, ...], start: tuple[int, ...], skipped: int) -> None:
        self._shape, self._order, self._start, self._skipped = shape, order, start, skipped

    def of(self, number: int) -> list[int]:
        """Index of element `number` of the piece."""
        index = [0] * len(self._shape)
        rest = self._skipped + number
        for dimension in reversed(self._order):
            rest, index[dimension] = divmod(rest, self._shape[dimension])
        return [here + offset for here, offset in zip(index, self._start, strict=True)]


Piece = tuple[_Positions, torch.Tensor, torch.Tensor]


def _pieces(one: Stretch, other: Stretch) -> Iterator[Piece]:
    """Equal stretches of both, as long as both sides have them in memory."""
    spec, begin = one.spec, 0
    item = DTYPES[spec.dtype].itemsize
    while begin < one.nbytes:
        piece = one.read(begin, one.nbytes)
        twin = other.read(begin, begin + piece.numel())
        piece = piece[: twin.numel()]
        yield _Positions(spec.shape, spec.order, (0,) * len(spec.shape), begin // item), piece, twin
        begin += piece.numel()


def _blocks(one: Stretch, other: Stretch) -> Iterator[Piece]:
    """Equal blocks of both, with their elements in the order of the first side."""
    spec = one.spec
    item = DTYPES[spec.dtype].itemsize
    for start, shape in _boxes((0,) * len(spec.shape), spec.shape, _BLOCK_BYTES // item):
        a, b = _gather(one, start, shape, item), _gather(other, start, shape, item)
        back = [other.spec.order.index(dimension) for dimension in spec.order]
        twin = b.permute(*back, len(back)).reshape(-1)
        yield _Positions(shape, spec.order, start, 0), a.reshape(-1), twin


Index = tuple[int, ...]


def _boxes(start: Index, shape: Index, limit: int) -> Iterator[tuple[Index, Index]]:
    """Cut a box (its first index and its shape) into boxes of at most `limit` elements, nearly cubes."""
    if math.prod(shape) <= limit:
        yield start, shape
        return
    longest = max(range(len(shape)), key=lambda dimension: shape[dimension])
    half = shape[longest] // 2
    for offset, size in ((0, half), (half, shape[longest] - half)):
        yield from _boxes(
            tuple(here + (offset if d == longest else 0) for d, here in enumerate(start)),
            tuple(size if d == longest else here for d, here in enumerate(shape)),
            limit,
        )


def _gather(stretch: Stretch, start: Index, shape: Index, item: int) -> torch.Tensor:
    """The bytes of a block, in the order in which the tensor is stored: (*shape in that order, item)."""
    order, whole = stretch.spec.order, stretch.spec.stored_shape
    begin, size = [start[d] for d in order], [shape[d] for d in order]
    inner = len(order)
    while inner and size[inner - 1] == whole[inner - 1]:
        inner -= 1  # dimensions that the block has in full are one run of memory
    inner = max(inner - 1, 0)
    run = math.prod(size[inner:]) * item
    target = torch.empty(math.prod(size) * item, dtype=torch.uint8)
    strides = [math.prod(whole[d + 1 :]) * item for d in range(len(whole))]
    tail = begin[inner] * strides[inner] if order else 0
    position = 0
    for outer in product(
        *(range(first, first + count) for first, count in zip(begin[:inner], size[:inner], strict=True))
    ):
        offset = tail + sum(here * stride for here, stride in zip(outer, strides, strict=False))
        for piece in _run(stretch, offset, offset + run):
            target[position : position + piece.numel()] = piece
            position += piece.numel()
    return target.view(*size, item)


def _run(stretch: Stretch, begin: int, end: int) -> Iterator[torch.Tensor]:
    while begin < end:
        piece = stretch.read(begin, end)
        yield piece
        begin += piece.numel()


def _first(positions: _Positions, piece: torch.Tensor, twin: torch.Tensor, dtype: torch.dtype) -> str:
    """The first element that differs, with both of its values."""
    item, number = dtype.itemsize, 0
    for begin in range(0, piece.numel(), 1 << 20):
        a, b = piece[begin : begin + (1 << 20)], twin[begin : begin + (1 << 20)]
        if not torch.equal(a, b):
            number = begin // item + int(differing_bits(a, b, dtype).to(torch.uint8).argmax())
            break
    here, there = (element_text(side[number * item :][:item].clone(), dtype) for side in (piece, twin))
    both = f"{here} against {there}" if here != there else f"{here} of other bits"
    index = positions.of(number)
    return f"{index}: {both}" if index else both


def _others(one: Component, other: Component, rank: int, total: Compared) -> Iterator[Difference]:
    """What is no tensor, and which tensors are tied."""
    told: Path | None = None
    for key in {**one.paths, **other.paths}:
        path = one.paths[key] if key in one.paths else other.paths[key]
        a, b = one.values.get(key), other.values.get(key)
        total.values += isinstance(a, Plain) or isinstance(b, Plain)
        if told is not None and path[: len(told)] == told:
            continue
        largest = None
        if a is None and b is None:
            note = _tied(key, one, other)
        elif _identity(a) == _identity(b):
            continue
        else:
            note, largest = _values(a, b, one.tensors.get(key), other.tensors.get(key))
            told = path if isinstance(a, Container) or isinstance(b, Container) else None  # not what is in it, too
        if note:
            yield Difference(one.name, path_text(path), rank, largest, 0, note)


def _identity(value: Plain | Container | None) -> tuple[str, bytes] | None:
    """Equal for equal values only: Python's 1, 1.0 and True are three."""
    if value is None:
        return None
    return ("plain", dumps(value.json)) if isinstance(value, Plain) else ("container", value.kind.encode("utf-8"))


def _tied(key: bytes, one: Component, other: Component) -> str:
    """How a tensor is tied on one side and not, or elsewhere, on the other; empty where it is alike or only on one."""
    a, b = one.ties.get(key), other.ties.get(key)
    if a == b or key not in one.tensors or key not in other.tensors:
        return ""
    words = ["a tensor of its own" if tie is None else f"tied to {path_text(tie)}" for tie in (a, b)]
    return f"{words[0]} against {words[1]}"


def _values(
    a: Plain | Container | None, b: Plain | Container | None, tensor_a: Stretch | None, tensor_b: Stretch | None
) -> tuple[str, float | None]:
    words = []
    for value, tensor in ((a, tensor_a), (b, tensor_b)):
        if value is None:
            words.append("" if tensor is None else "a tensor")
        else:
            words.append(str(value) if isinstance(value, Plain) else f"a {value.kind}")
    if "" in words:
        return ("only in A" if words[0] else "only in B"), None
    largest = None
    if isinstance(a, Plain) and isinstance(b, Plain):
        x, y = a.number, b.number
        if x is not None and y is not None:
            with contextlib.suppress(OverflowError):  # a whole number that no float holds
                largest = abs(x - y)
    return (f"{words[0]} against {words[1]}" if words[0] != words[1] else f"{words[0]} of other bits"), largest
