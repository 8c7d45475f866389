"""A slot for where shared memory is too small."""

from __future__ import annotations

from easyckpt.errors import UsageError
from easyckpt.memory import header
from easyckpt.memory.header import HEADER_BYTES
from easyckpt.memory.mapping import PAGE, Mapping, round_up
from easyckpt.memory.slot import Slot


class PrivateSlot(Slot):
    """The same over private memory, for where shared memory is too small. Its snapshots die with the process."""

    private = True

    @classmethod
    def create(cls, path: str, image_capacity: int, tail_capacity: int) -> PrivateSlot:
        """Make a new empty slot; `path` only names it. Raises OutOfSpace."""
        image_capacity = max(PAGE, round_up(image_capacity))
        head = Mapping(None, 0, HEADER_BYTES + image_capacity)
        slot = cls(path, head, Mapping(None, 0, max(PAGE, round_up(tail_capacity))), None)
        slot._page[:] = header.pack_empty(image_capacity)
        return slot

    @classmethod
    def open(cls, path: str) -> PrivateSlot:
        """There is never one to take over."""
        raise UsageError(f"{path}: private memory cannot be opened")

    def _grow_tail(self, nbytes: int) -> None:
        self._grow_tail_privately(nbytes)

    def _unlink(self) -> None:
        pass
