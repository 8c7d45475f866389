"""A snapshot as the engine would make it, in a bytearray: whole blocks of memory by layout, no torch in between."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from easyckpt.format.dtypes import DTYPES
from easyckpt.format.image import Layout
from easyckpt.state.apply import apply_all, check_all
from easyckpt.state.capture import Capture, StateCapture


@dataclass
class Image:
    layout: Layout
    data: bytearray
    objects: bytes

    def leaf(self, number: int) -> torch.Tensor:
        """The tensor in the saved shape, lent: its memory is the image's."""
        leaf = self.layout.leaves[number]
        dtype = DTYPES[leaf.dtype]
        if not leaf.nbytes:
            return torch.empty(leaf.shape, dtype=dtype)
        piece = memoryview(self.data)[leaf.offset : leaf.offset + leaf.nbytes]
        flat = torch.frombuffer(piece, dtype=torch.uint8).view(dtype)
        return flat.reshape(leaf.stored_shape).permute(
            tuple(leaf.order.index(dimension) for dimension in range(len(leaf.order)))
        )


def image_of(capture: Capture) -> Image:
    """Copy what `capture` refers to."""
    data = bytearray(capture.layout.image_bytes)
    base = ctypes.addressof(ctypes.c_char.from_buffer(data)) if data else 0
    assert sorted(capture.early + capture.late) == list(range(len(capture.layout.leaves)))
    for number, (leaf, source) in enumerate(zip(capture.layout.leaves, capture.sources, strict=True)):
        assert tuple(source.shape) == leaf.shape
        assert source.dtype == DTYPES[leaf.dtype]
        if number in capture.strided:
            assert number in capture.early
            block = source.detach().contiguous()
        else:
            block = source.permute(leaf.order)
        assert block.is_contiguous()
        if leaf.nbytes:
            ctypes.memmove(base + leaf.offset, block.data_ptr(), leaf.nbytes)
    # Through the text form, as from a file.
    return Image(Layout.from_bytes(capture.layout.encoded), data, capture.objects)


def snapshot(**state: Any) -> Image:
    return image_of(StateCapture(state).capture())


def problems(image: Image, *, strict: bool = True, components: Any = None, **state: Any) -> list[str]:
    live = StateCapture(state).components
    return check_all(live, image.layout, image.layout.trees, image.objects, strict=strict, components=components)


def restore(image: Image, *, strict: bool = True, components: Any = None, **state: Any) -> None:
    live = StateCapture(state).components
    found = check_all(live, image.layout, image.layout.trees, image.objects, strict=strict, components=components)
    assert found == []
    apply_all(live, image.layout, image.layout.trees, image.objects, image.leaf, strict=strict, components=components)
    # Lent memory is used again: whatever still looks at it is found by the comparison that follows.
    image.data[:] = b"\xa5" * len(image.data)


def assert_same(one: Image, other: Image) -> None:
    """Equal to the bit: layout, bytes and objects."""
    assert one.layout.encoded == other.layout.encoded
    assert one.objects == other.objects
    assert bytes(one.data) == bytes(other.data)


def round_trip(saved: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Put the state of `saved` into `fresh` and compare what both are captured as (generators too)."""
    image = snapshot(**saved)
    kept = Image(image.layout, bytearray(image.data), image.objects)
    restore(image, **fresh)
    assert_same(kept, snapshot(**fresh))
