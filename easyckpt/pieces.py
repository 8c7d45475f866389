"""Tensors piece by piece, in the order of their indices or block by block, however they lie in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

import torch

from easyckpt.contents import Stretch
from easyckpt.format.dtypes import ITEM_BYTES

#: Bytes of one piece.
_PIECE = 4 << 20
#: Bytes of one piece of a tensor that lies in another order, all of which is read for each.
_SLAB = 16 << 20

Index = tuple[int, ...]
#: Its first index, and its shape.
Box = tuple[Index, Index]


def stored_pieces(stretch: Stretch) -> Iterator[torch.Tensor]:
    """The bytes as they are stored, in pieces of whole elements that are lent until the next one."""
    begin = 0
    while begin < stretch.nbytes:
        piece = stretch.read(begin, min(begin + _PIECE, stretch.nbytes))
        yield piece
        begin += piece.numel()


def logical_pieces(stretch: Stretch) -> Iterator[torch.Tensor]:
    """The bytes in the order of the indices, in pieces of whole elements that are lent until the next one."""
    order = stretch.spec.order
    if [d for d in order if stretch.spec.shape[d] != 1] == [d for d in sorted(order) if stretch.spec.shape[d] != 1]:
        yield from stored_pieces(stretch)
        return
    item = ITEM_BYTES[stretch.spec.dtype]
    for start, shape in boxes(whole_box(stretch), _SLAB // item, first_dimension):
        block = gather(stretch, start, shape, item)
        back = [order.index(dimension) for dimension in range(len(order))]
        yield block.permute(*back, len(back)).reshape(-1)


def whole_box(stretch: Stretch) -> Box:
    """All of the tensor."""
    return (0,) * len(stretch.spec.shape), stretch.spec.shape


def longest_dimension(shape: Index) -> int:
    """Cut there, boxes become nearly cubes."""
    return max(range(len(shape)), key=lambda dimension: shape[dimension])


def first_dimension(shape: Index) -> int:
    """Cut there, boxes follow each other in the order of the indices."""
    return next(dimension for dimension, size in enumerate(shape) if size > 1)


def boxes(box: Box, limit: int, cut: Callable[[Index], int] = longest_dimension) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` elements."""
    start, shape = box
    if math.prod(shape) <= max(limit, 1):
        yield box
        return
    where = cut(shape)
    half = shape[where] // 2
    for offset, size in ((0, half), (half, shape[where] - half)):
        begin = (*start[:where], start[where] + offset, *start[where + 1 :])
        yield from boxes((begin, (*shape[:where], size, *shape[where + 1 :])), limit, cut)


def gather(stretch: Stretch, start: Index, shape: Index, item: int) -> torch.Tensor:
    """The bytes of a block, in the order in which the tensor is stored: (*shape in that order, item)."""
    order, whole = stretch.spec.order, stretch.spec.stored_shape
    begin, size = [start[d] for d in order], [shape[d] for d in order]
    inner = len(order)
    while inner and size[inner - 1] == whole[inner - 1]:
        inner -= 1  # dimensions that the block has in full are one run of memory
    inner = max(inner - 1, 0)
    run = math.prod(size[inner:]) * item
    target = torch.empty(math.prod(size) * item, dtype=torch.uint8, device="cpu")
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
