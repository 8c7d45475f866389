"""Two tensors, streamed and compared to the bit, in the order of their indices whatever their memory formats are."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from easyckpt.contents import Stretch
from easyckpt.format.difference import differing_bits, element_text, further, largest_difference
from easyckpt.format.dtypes import DTYPES
from easyckpt.pieces import boxes, gather, whole_box

#: Tensors whose memory formats differ are compared block by block, each of at most this size.
_BLOCK_BYTES = 8 << 20

Outcome = tuple[float | None, int, str]
"""Largest difference, elements that differ, note."""


def compare_tensors(one: Stretch, other: Stretch) -> Outcome | None:
    """Compare two tensors element by element; None where they are equal to the bit."""
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
    for start, shape in boxes(whole_box(one), _BLOCK_BYTES // item):
        a, b = gather(one, start, shape, item), gather(other, start, shape, item)
        back = [other.spec.order.index(dimension) for dimension in spec.order]
        twin = b.permute(*back, len(back)).reshape(-1)
        yield _Positions(shape, spec.order, start, 0), a.reshape(-1), twin


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
