"""Whether the live state is still what it was at an earlier capture, told without holding any of it.

Small leaves are compared by value: generators hand out fresh tensors, of which nothing else can be said. All others
must be the same memory with the same version counter, and in the few words that are looked at the same content.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from easyckpt.format.canonical import Json, loads
from easyckpt.format.codec import path_text
from easyckpt.format.image import Layout
from easyckpt.saving import raw_memory
from easyckpt.saving.copying import version_of
from easyckpt.saving.raw_memory import WORD
from easyckpt.state.capture import Capture

#: Early leaves up to this size are compared by value, as long as all of them together stay below the limit.
SMALL_BYTES = 64 << 10
SMALL_TOTAL_BYTES = 8 << 20
_NO_COUNTER = -1  # of an inference tensor: nobody can know whether it was written to


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The state at one capture. Holds numbers and digests, no tensor and no memory."""

    layout: Layout
    objects: bytes
    values: dict[int, int]
    """Leaf -> digest of its bytes, for the small ones."""
    others: list[int]
    """The leaves that are told by their memory, with what is known of each:"""
    memory: list[weakref.ref[torch.UntypedStorage]]
    pointers: list[int]
    versions: list[int]
    words: torch.Tensor


def fingerprint(capture: Capture) -> Fingerprint:
    """Of the state as it is right now; `capture` was taken just before."""
    leaves, sources, pointers = capture.layout.leaves, capture.sources, capture.pointers
    small: list[int] = []
    total = 0
    for number in capture.early:
        nbytes = leaves[number].nbytes
        if nbytes <= SMALL_BYTES and total + nbytes <= SMALL_TOTAL_BYTES and sources[number].device.type == "cpu":
            small.append(number)
            total += nbytes
    chosen = set(small)
    others = [number for number in range(len(leaves)) if number not in chosen]
    return Fingerprint(
        layout=capture.layout,
        objects=capture.objects,
        values={number: _digest(capture, number) for number in small},
        others=others,
        memory=[weakref.ref(sources[number].untyped_storage()) for number in others],
        pointers=[pointers[number] for number in others],
        versions=[_version(sources[number]) for number in others],
        words=_words(capture, others),
    )


def what_changed(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Names of what is not, or cannot be proven to be, the same; empty if all is."""
    if before.layout is not now.layout:
        return ["the form of the state"]
    leaves = now.layout.leaves
    moved = [number for number, value in now.values.items() if before.values.get(number) != value]
    if before.others == now.others:
        steady = _steady(before, now)
        moved += [number for number, same in zip(now.others, steady, strict=True) if not same]
    else:
        moved += now.others
    found = [path_text(leaves[number].path) for number in sorted(moved)]
    return found + (_changed_components(before.objects, now.objects) if before.objects != now.objects else [])


def _steady(before: Fingerprint, now: Fingerprint) -> list[bool]:
    places = zip(before.pointers, now.pointers, before.versions, now.versions, strict=True)
    same = [one == other and old == new != _NO_COUNTER for one, other, old, new in places]
    for row, (one, other) in enumerate(zip(before.memory, now.memory, strict=True)):
        storage = one()  # freed memory may have been given out again at the same address
        same[row] = same[row] and storage is not None and storage is other()
    if not torch.equal(before.words, now.words):
        equal = (before.words == now.words).all(dim=1).tolist() if before.words.shape == now.words.shape else []
        same = [one and other for one, other in zip(same, equal, strict=True)] if equal else [False] * len(same)
    return same


def _digest(capture: Capture, number: int) -> int:
    nbytes = capture.layout.leaves[number].nbytes
    if not nbytes:
        return 0
    copy = bytearray(nbytes)
    address = torch.frombuffer(copy, dtype=torch.uint8).data_ptr()
    if number in capture.strided:
        raw_memory.move_strided(address, capture.sources[number], nbytes)
    else:
        raw_memory.move(address, capture.pointers[number], nbytes)
    return xxhash.xxh3_64_intdigest(copy)


def _version(tensor: torch.Tensor) -> int:
    return _NO_COUNTER if tensor.is_inference() else version_of(tensor)


def _words(capture: Capture, numbers: Sequence[int]) -> torch.Tensor:
    """The first, a middle and the last word of each leaf that is one block of host memory; of others always zero."""
    rows = []
    for number in numbers:
        begin, nbytes = capture.pointers[number], capture.layout.leaves[number].nbytes
        on_host = capture.sources[number].device.type == "cpu" and number not in capture.strided
        if on_host and nbytes >= WORD and begin % WORD == 0:
            last = nbytes // WORD - 1
            rows.append([begin, begin + last // 2 * WORD, begin + last * WORD])
        else:
            rows.append([_ZERO.data_ptr()] * 3)
    return raw_memory.words_at(torch.tensor(rows, dtype=torch.int64).view(-1)).view(-1, 3)


_ZERO = torch.zeros(1, dtype=torch.int32)


def _changed_components(before: bytes, now: bytes) -> list[str]:
    old, new = _trees(before), _trees(now)
    return [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)] or ["other state"]


def _trees(objects: bytes) -> dict[str, Json]:
    found = loads(objects)
    trees = found.get("trees") if isinstance(found, dict) else None
    return trees if isinstance(trees, dict) else {}
