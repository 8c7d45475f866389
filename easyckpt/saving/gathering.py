"""Thousands of tiny tensors in two calls: gathered word by word out of memory, scattered into the image.

A move for each of 20,000 tensors costs a training thread 20 to 30 ms, this 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch

from easyckpt.memory.slot import Slot
from easyckpt.saving import raw_memory
from easyckpt.saving.raw_memory import WORD
from easyckpt.state.capture import Capture

#: Each word needs 16 bytes of memory to say whence and where to: at most 1 KB a tensor.
TINY_BYTES = 256
#: Fewer are moved one by one: below that the calls cost more than the moves.
WORTH_IT = 512


class Gather:
    """Copies the leaves `numbers` of one plan, for which `is_tiny` holds. Holds no tensor of the user's."""

    def __init__(self, capture: Capture, numbers: list[int]) -> None:
        leaves = [capture.layout.leaves[number] for number in numbers]
        self._pick = itemgetter(*numbers)
        self._words = torch.tensor([leaf.nbytes // WORD for leaf in leaves], dtype=torch.int64)
        self._places = self._each_word([leaf.offset for leaf in leaves]) // WORD
        self._pointers: tuple[int, ...] = ()
        self._addresses = torch.empty(0, dtype=torch.int64)

    def copy(self, capture: Capture, slot: Slot) -> None:
        """Copy before returning."""
        image = raw_memory.bytes_at(slot.address, slot.image_capacity).view(torch.int32)
        image.index_copy_(0, self._places, self.words(capture))

    def words(self, capture: Capture) -> torch.Tensor:
        """What is in the leaves now, one after the other in the order of `numbers`."""
        pointers = self._pick(capture.pointers)
        if pointers != self._pointers:
            self._pointers, self._addresses = pointers, self._each_word(pointers)
        return raw_memory.words_at(self._addresses)

    def _each_word(self, starts: Sequence[int]) -> torch.Tensor:
        """Where each word of each leaf is, given where the leaves begin."""
        first = self._words.cumsum(0) - self._words
        begins = torch.tensor(starts, dtype=torch.int64) - first * WORD
        return torch.repeat_interleave(begins, self._words).add_(torch.arange(int(self._words.sum())), alpha=WORD)


def is_tiny(capture: Capture, number: int) -> bool:
    """Whether a leaf consists of a few whole words, in memory as well as in the image."""
    leaf = capture.layout.leaves[number]
    aligned = not (leaf.nbytes % WORD or leaf.offset % WORD or capture.pointers[number] % WORD)
    return 0 < leaf.nbytes <= TINY_BYTES and aligned and number not in capture.strided
