"""A snapshot that memory has no room for: its bytes are read out of the live tensors while training waits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from easyckpt.errors import SaveFailed
from easyckpt.memory.slot import SlotMeta
from easyckpt.state.capture import Capture
from easyckpt.storage.base import Buffer


@dataclass(slots=True)
class LiveSnapshot:
    """Looks to the writer like a sealed slot. Good only until it is withdrawn, before anybody changes the state."""

    meta: SlotMeta
    capture: Capture
    kept: Mapping[int, bytes] = field(default_factory=dict)
    """Leaves whose bytes are not read out of the live state."""
    _withdrawn: bool = False

    def withdraw(self) -> None:
        """Training goes on, perhaps since an interrupt has ended its waiting: what is read from now on is of no use."""
        self._withdrawn = True

    @property
    def static(self) -> bytes:
        """The layout."""
        return self.capture.layout.encoded

    @property
    def objects(self) -> bytes:
        """The step's other state."""
        return self.capture.objects

    def still_sealed(self) -> bool:
        """Whether training still waits."""
        return not self._withdrawn

    def body(self, nbytes: int) -> Iterator[Buffer]:
        """The first `nbytes` of the image, a tensor at a time."""
        leaves = self.capture.layout.leaves
        end = 0
        for number in sorted(range(len(leaves)), key=lambda number: leaves[number].offset):
            leaf = leaves[number]
            if leaf.nbytes == 0 or leaf.offset >= nbytes:
                continue
            if leaf.offset > end:
                yield bytes(leaf.offset - end)
            yield self._bytes_of(number)
            end = leaf.offset + leaf.nbytes

    def at(self, offset: int, nbytes: int) -> Buffer:
        """The bytes of the leaf that lies at `offset`."""
        for number, leaf in enumerate(self.capture.layout.leaves):
            if (leaf.offset, leaf.nbytes) == (offset, nbytes) and nbytes:
                return self._bytes_of(number)
        return b""

    def _bytes_of(self, number: int) -> Buffer:
        if self._withdrawn:
            raise SaveFailed(f"the live state of step {self.meta.step} is not lent any more: its save was interrupted")
        if number in self.kept:
            return self.kept[number]
        leaf, source = self.capture.layout.leaves[number], self.capture.sources[number].detach()
        if number in self.capture.strided:
            dense = source.to("cpu", copy=True).contiguous().resolve_conj().resolve_neg()
        else:
            dense = source.as_strided((source.numel(),), (1,)).to("cpu")
        memory = (ctypes.c_char * leaf.nbytes).from_address(dense.data_ptr())
        memory._tensor = dense  # type: ignore[attr-defined]  # lives as long as a buffer over its memory
        return memoryview(memory).cast("B")
