"""A whole state of one rank, opened for reading: the layout, the objects, and every tensor as a view of one buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from easyckpt.errors import DamagedCheckpoint, WorldSizeChanged
from easyckpt.format.canonical import Json, loads
from easyckpt.format.codec import path_text
from easyckpt.format.image import DTYPES, ITEM_BYTES, Layout
from easyckpt.memory.slot import SlotView


@dataclass(slots=True)
class Snapshot:
    """What a rank would apply. Everything that `leaf` gives out was verified before.

    Memory is freed when the snapshot and the last tensor out of it are gone. Where it is a slot (a memory candidate,
    or an image handed to the reader), the tensors' content is only good until the slot is used again: copy out of them.
    """

    step: int
    timeline: str
    layout: Layout
    objects: Json
    image: memoryview | None
    """The bytes of all tensors, at `places`."""
    places: Sequence[int | None]
    """Where each leaf begins in `image`; None for one that was not asked for."""
    on_close: Callable[[], None] | None = None
    _bases: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    def leaf(self, number: int) -> torch.Tensor:
        """Tensor `number` of the layout in its saved shape and dimension order, on the CPU, without a copy.

        Never written to: it may be read-only memory.
        """
        leaf = self.layout.leaves[number]
        place = self.places[number]
        if place is None:
            raise LookupError(f"{path_text(leaf.path)} was not read")
        if leaf.nbytes == 0:
            stored = torch.empty(leaf.stored_shape, dtype=DTYPES[leaf.dtype], device="cpu")
            return stored.permute([leaf.order.index(dimension) for dimension in range(len(leaf.order))])
        strides = [0] * len(leaf.shape)
        step = 1
        for dimension in reversed(leaf.order):
            strides[dimension] = step
            step *= leaf.shape[dimension]
        return self._base(leaf.dtype).as_strided(leaf.shape, strides, place // ITEM_BYTES[leaf.dtype])

    def close(self) -> None:
        """Let go of the memory. Tensors given out before stay valid as long as their memory does."""
        self._bases.clear()
        self.image = None
        if self.on_close is not None:
            self.on_close()
            self.on_close = None

    def _base(self, dtype: str) -> torch.Tensor:
        """The whole image as a flat tensor of `dtype`: views of it are one call each."""
        if dtype not in self._bases:
            if self.image is None:
                raise LookupError(f"the snapshot of step {self.step} is closed")
            whole = torch.frombuffer(_pretend_writable(self.image), dtype=torch.uint8)
            whole = whole[: whole.numel() // ITEM_BYTES[dtype] * ITEM_BYTES[dtype]]
            self._bases[dtype] = whole.view(DTYPES[dtype])
        return self._bases[dtype]


def _pretend_writable(view: memoryview) -> memoryview | ctypes.Array[ctypes.c_ubyte]:
    """The same memory as a buffer that torch takes without a warning.

    It keeps the memory, not `view`: whoever handed that out may release it, and torch holds a buffer only by name.
    """
    kept = view[:]
    if not kept.readonly:
        return kept
    address = np.frombuffer(kept, dtype=np.uint8).ctypes.data
    array = (ctypes.c_ubyte * kept.nbytes).from_address(address)
    array._keep = kept  # type: ignore[attr-defined]
    return array


def open_memory(view: SlotView, *, rank: int, world_size: int, where: str = "shared memory") -> Snapshot:
    """Open this rank's sealed slot as a candidate, without a copy. Raises DamagedCheckpoint or WorldSizeChanged.

    Header, static and object bytes were verified when the slot was adopted; the image is verified here if it carries
    a digest (the `memory_checksum` option).
    """
    meta = view.meta
    check_world_size(f"the snapshot of step {meta.step} in {where}", meta.world_size, world_size)
    layout = Layout.from_bytes(view.static)
    if (meta.rank, layout.rank, layout.world_size, layout.image_bytes) != (
        rank, rank, meta.world_size, meta.image_bytes,
    ) or view.image.nbytes < layout.image_bytes:  # fmt: skip
        raise DamagedCheckpoint(f"{where}: step {meta.step}: the slot's header and its layout contradict each other")
    if meta.image_digest is not None and xxhash.xxh3_128_hexdigest(view.image[: meta.image_bytes]) != meta.image_digest:
        raise DamagedCheckpoint(f"{where}: step {meta.step}: the image does not match its checksum: rotten memory")
    return Snapshot(
        step=meta.step,
        timeline=meta.timeline,
        layout=layout,
        objects=loads(view.objects),
        image=view.image[:],
        places=[leaf.offset for leaf in layout.leaves],
    )


def check_world_size(what: str, saved: int, now: int) -> None:
    """Raise WorldSizeChanged unless `what` was saved by as many ranks as there are now."""
    if saved != now:
        ranks = "1 rank" if saved == 1 else f"{saved} ranks"
        raise WorldSizeChanged(
            f"{what} was saved by {ranks}, this job has {now}: start it with {ranks} to go on from there. "
            "(easyckpt.restore reads what all ranks have in common, such as the model, in any process.) Nothing was "
            "applied."
        )
