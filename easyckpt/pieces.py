"""Tensors piece by piece, in the order of their indices or block by block, however they lie in memory."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import Protocol

import torch

from easyckpt.contents import Stretch
from easyckpt.format.dtypes import ITEM_BYTES
from easyckpt.storage.base import Buffer, WritableBuffer

#: Bytes of one piece.
_PIECE = 4 << 20
#: Bytes of one piece of a tensor that lies in another order.
_SLAB = 16 << 20
#: Something of each size that an element may have.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

Index = tuple[int, ...]
#: Its first index, and its shape.
Box = tuple[Index, Index]


class Scratch(Protocol):
    """A file for what does not fit into memory, as a FileWriter and a FileReader have it."""

    def write_at(self, buffer: Buffer, offset: int) -> None:
        """Write all of `buffer`."""
        ...

    def read_into(self, buffer: WritableBuffer, offset: int) -> int:
        """Fill `buffer`."""
        ...


def stored_pieces(stretch: Stretch) -> Iterator[torch.Tensor]:
    """The bytes as they are stored, in pieces of whole elements that are lent until the next one."""
    begin = 0
    while begin < stretch.nbytes:
        piece = stretch.read(begin, min(begin + _PIECE, stretch.nbytes))
        yield piece
        begin += piece.numel()


def logical_pieces(stretch: Stretch, scratch: Scratch) -> Iterator[torch.Tensor]:
    """The bytes in the order of the indices, in pieces of whole elements that are lent until the next one.

    Each byte is read once: what is too large to be put into that order in memory goes through `scratch`.
    """
    order, shape = stretch.spec.order, stretch.spec.shape
    if [d for d in order if shape[d] != 1] == [d for d in sorted(order) if shape[d] != 1]:
        yield from stored_pieces(stretch)
        return
    item = ITEM_BYTES[stretch.spec.dtype]
    limit = _SLAB // item
    # The same memory again and again: what the allocator is given back it may keep.
    one, other = (torch.frombuffer(mmap.mmap(-1, _SLAB), dtype=torch.uint8) for _ in range(2))
    for box in boxes(whole_box(stretch), limit, _first_in_both(order)):
        if math.prod(box[1]) > limit:
            yield from _reordered(stretch, box, item, scratch, (one, other))
            continue
        gather(stretch, *box, item, one)
        stored = _elements(one, item, [box[1][d] for d in order])
        _elements(other, item, box[1]).permute(*order).copy_(stored)
        yield other[: math.prod(box[1]) * item]


def _reordered(
    stretch: Stretch, box: Box, item: int, scratch: Scratch, memory: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The bytes of a block that is one run of memory, in the order of the indices.

    It is read slab by slab, in the order of memory, and each slab is cut up by the panels that are to come out, one
    after the other in the order of the indices. Scratch holds a panel's parts beside each other.
    """
    order, limit, (one, other) = stretch.spec.order, _SLAB // item, memory
    slabs = list(boxes(box, limit, lambda shape: next(dimension for dimension in order if shape[dimension] > 1)))
    panels = list(boxes(box, limit, first_dimension))
    begins = list(accumulate((math.prod(shape) * item for _, shape in panels), initial=0))
    written = begins[:-1]
    for slab in slabs:
        gather(stretch, *slab, item, one)
        stored = _elements(one, item, [slab[1][d] for d in order])
        for number, panel in enumerate(panels):
            part = _overlap(slab, panel)
            if part is not None:
                _elements(other, item, [part[1][d] for d in order]).copy_(stored[_slices(part, slab, order)])
                size = math.prod(part[1]) * item
                scratch.write_at(memory_of(other[:size]), written[number])
                written[number] += size
    for panel, (begin, end) in zip(panels, pairwise(begins), strict=True):
        scratch.read_into(memory_of(one[: end - begin]), begin)
        view, position = _elements(other, item, panel[1]).permute(*order), 0
        for slab in slabs:
            part = _overlap(slab, panel)
            if part is not None:
                view[_slices(part, panel, order)] = _elements(one[position:], item, [part[1][d] for d in order])
                position += math.prod(part[1]) * item
        yield other[: end - begin]


def _elements(data: torch.Tensor, item: int, shape: Sequence[int]) -> torch.Tensor:
    """The first of flat bytes as elements of `item` bytes, whatever they mean."""
    return data[: math.prod(shape) * item].view(_WORDS[item]).view(*shape)


def _overlap(one: Box, other: Box) -> Box | None:
    begin = tuple(map(max, one[0], other[0]))
    ends = (min(a + m, b + n) for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True))
    shape = tuple(end - first for first, end in zip(begin, ends, strict=True))
    return (begin, shape) if all(size > 0 for size in shape) else None


def _slices(part: Box, box: Box, order: Index) -> tuple[slice, ...]:
    """Where `part` is in `box`, dimension by dimension in the order of memory."""
    return tuple(slice(part[0][d] - box[0][d], part[0][d] - box[0][d] + part[1][d]) for d in order)


def memory_of(data: torch.Tensor) -> memoryview:
    """The memory of `data`, flat uint8, which must outlive what looks at it. (Torch may be without numpy.)"""
    return memoryview((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())).cast("B")


def whole_box(stretch: Stretch) -> Box:
    """All of the tensor."""
    return (0,) * len(stretch.spec.shape), stretch.spec.shape


def longest_dimension(shape: Index) -> int:
    """Cut there, boxes become nearly cubes."""
    return max(range(len(shape)), key=lambda dimension: shape[dimension])


def first_dimension(shape: Index) -> int:
    """Cut there, boxes follow each other in the order of the indices."""
    return next(dimension for dimension, size in enumerate(shape) if size > 1)


def _first_in_both(order: Index) -> Callable[[Index], int | None]:
    """Cut there, boxes follow each other in the order of the indices and in that of memory, as long as that goes."""

    def cut(shape: Index) -> int | None:
        first = first_dimension(shape)
        return first if first == next(dimension for dimension in order if shape[dimension] > 1) else None

    return cut


def boxes(box: Box, limit: int, cut: Callable[[Index], int | None] = longest_dimension) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` elements, or as far as `cut` says where."""
    start, shape = box
    where = None if math.prod(shape) <= max(limit, 1) else cut(shape)
    if where is None:
        yield box
        return
    half = shape[where] // 2
    for offset, size in ((0, half), (half, shape[where] - half)):
        begin = (*start[:where], start[where] + offset, *start[where + 1 :])
        yield from boxes((begin, (*shape[:where], size, *shape[where + 1 :])), limit, cut)


def gather(stretch: Stretch, start: Index, shape: Index, item: int, memory: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of a block, in the order in which the tensor is stored: (*shape in that order, item).

    They are put into the first of `memory`, flat bytes, if that is given.
    """
    order, whole = stretch.spec.order, stretch.spec.stored_shape
    begin, size = [start[d] for d in order], [shape[d] for d in order]
    inner = len(order)
    while inner and size[inner - 1] == whole[inner - 1]:
        inner -= 1  # dimensions that the block has in full are one run of memory
    inner = max(inner - 1, 0)
    run = math.prod(size[inner:]) * item
    nbytes = math.prod(size) * item
    target = torch.empty(nbytes, dtype=torch.uint8, device="cpu") if memory is None else memory[:nbytes]
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
