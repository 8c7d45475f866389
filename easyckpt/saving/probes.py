"""Some words of each late leaf, read at the capture and again in the copy: whoever wrote in between is found out."""

from __future__ import annotations

import torch

from easyckpt.format.image import ITEM_BYTES, Leaf
from easyckpt.saving import raw_memory
from easyckpt.saving.raw_memory import WORD
from easyckpt.state.capture import Capture

#: Words looked at in each late leaf: in its first and last element, and in others in between.
PROBES = 4
#: Stays below torch's grain size: above it the background thread would start an OpenMP pool of its own.
PROBED_AT_ONCE = 8 << 10
GOLDEN_RATIO = 0.6180339887


class Probes:
    """Where to look, in the order of some leaves: PROBES times each."""

    def __init__(self, offsets: list[int], places: list[int]) -> None:
        self._offsets = torch.tensor(offsets, dtype=torch.int64, device="cpu").view(-1, PROBES)
        self.places = torch.tensor(places, dtype=torch.int64, device="cpu")
        """In the image."""
        self._aim: tuple[list[int], torch.Tensor] = ([], self._offsets.view(-1))
        """Pointers, and the addresses that follow from them: one value, so that no interrupt comes between."""

    def words(self, pointers: list[int]) -> torch.Tensor:
        """What is there now, in leaves that begin at `pointers`."""
        if pointers != self._aim[0]:
            begins = torch.tensor(pointers, dtype=torch.int64, device="cpu").view(-1, 1)
            self._aim = (pointers, (begins + self._offsets).view(-1))
        return _words_at(self.addresses)

    @property
    def addresses(self) -> torch.Tensor:
        """Where `words` has looked last."""
        return self._aim[1]


def differing(addresses: torch.Tensor, expected: torch.Tensor, base: int = 0) -> list[int]:
    """Leaves (by their place in the order of some probes) of which a word is not what was `expected`.

    The words are at `addresses`, counted from `base`. For a background thread.
    """
    found: set[int] = set()
    for begin in range(0, len(expected), PROBED_AT_ONCE):
        part = slice(begin, begin + PROBED_AT_ONCE)
        same = _words_at(addresses[part] + base) == expected[part]
        if not same.all():
            found.update((begin + place) // PROBES for place in same.logical_not().nonzero().flatten().tolist())
    return sorted(found)


def _words_at(addresses: torch.Tensor) -> torch.Tensor:
    return raw_memory.words_at(raw_memory.word_number(addresses, WORD), torch.int32)


def can_be_probed(capture: Capture, number: int) -> bool:
    """Whether a leaf is large enough, and lies so that words of it can be read, in memory and in the image."""
    leaf = capture.layout.leaves[number]
    return not (capture.pointers[number] % WORD or leaf.offset % WORD) and leaf.nbytes >= 4 * WORD * PROBES


def probed_offsets(leaf: Leaf) -> list[int]:
    """Offsets of some words of the leaf, the same ones at each plan."""
    item = max(ITEM_BYTES[leaf.dtype], WORD)
    last = leaf.nbytes // item - 1
    between = [int(last * (number * GOLDEN_RATIO % 1)) for number in range(1, PROBES - 1)]
    # Of a long item, now the low and now the high words: a factor of two changes the high one only.
    return [item * element + number * WORD % item for number, element in enumerate((0, *between, last))]
