"""Thousands of tiny tensors in two calls: gathered word by word out of memory, scattered into the image.

A move for each of 20,000 tensors costs a training thread 20 to 30 ms, this 5.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

import torch

from easyckpt.memory.slot import Slot
from easyckpt.saving import raw_memory
from easyckpt.saving.raw_memory import WORD
from easyckpt.state.capture import Capture

#: Each word needs 16 bytes of memory to say whence and whither: mostly 1 KB a tensor at most.
TINY_BYTES = 256
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_NOWHERE = torch.empty(0, dtype=torch.int64, device="cpu")
#: Fewer are moved one by one: below that the calls cost more than the moves.
WORTH_IT = 512


class _Aim(NamedTuple):
    """Where the words lie, set as one value: an interrupt leaves the old one or the new one, never a mixture."""

    pointers: tuple[int, ...]
    kind: torch.dtype
    whence: torch.Tensor
    whither: torch.Tensor


class Gather:
    """Copies the leaves `numbers` of one plan, for which `is_tiny` holds. Holds no tensor of the user's."""

    def __init__(self, capture: Capture, numbers: list[int]) -> None:
        leaves = [capture.layout.leaves[number] for number in numbers]
        self._pick = itemgetter(*numbers)
        self._sizes = torch.tensor([leaf.nbytes for leaf in leaves], dtype=torch.int64, device="cpu")
        self._offsets = torch.tensor([leaf.offset for leaf in leaves], dtype=torch.int64, device="cpu")
        self._aim = _Aim((), torch.int64, _NOWHERE, _NOWHERE)

    def copy(self, capture: Capture, slot: Slot) -> None:
        """Copy before returning."""
        words = self.words(capture)
        image = raw_memory.bytes_at(slot.address, slot.image_capacity).view(self._aim.kind)
        image.index_copy_(0, self._aim.whither, words)

    def words(self, capture: Capture) -> torch.Tensor:
        """What is in the leaves now, one after the other in the order of `numbers`."""
        pointers = self._pick(capture.pointers)
        if pointers != self._aim.pointers:
            self._aim = self._at(pointers)
        return raw_memory.words_at(self._aim.whence, self._aim.kind)

    def _at(self, pointers: tuple[int, ...]) -> _Aim:
        """In the largest words that fit: fresh tensors may lie anywhere, also where the plan knew of none."""
        starts = torch.tensor(pointers, dtype=torch.int64, device="cpu")
        alignment = starts | self._sizes | self._offsets
        kind = next(kind for kind in _WORDS if not (alignment % kind.itemsize).any())
        nbytes = kind.itemsize
        whence = self._each_word(raw_memory.word_number(starts, nbytes), nbytes)
        return _Aim(pointers, kind, whence, self._each_word(self._offsets // nbytes, nbytes))

    def _each_word(self, begins: torch.Tensor, nbytes: int) -> torch.Tensor:
        """The number of each word of each leaf, given those of the first ones."""
        counts = self._sizes // nbytes
        first = counts.cumsum(0) - counts
        return torch.repeat_interleave(begins - first, counts).add_(torch.arange(int(counts.sum()), device="cpu"))


def is_tiny(capture: Capture, number: int) -> bool:
    """Whether a leaf consists of a few whole words, in memory as well as in the image."""
    leaf = capture.layout.leaves[number]
    aligned = not (leaf.nbytes % WORD or leaf.offset % WORD or capture.pointers[number] % WORD)
    return 0 < leaf.nbytes <= TINY_BYTES and aligned and number not in capture.strided
