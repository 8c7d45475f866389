"""Whether the live state is still what it was at an earlier capture, told without holding any of it.

Small leaves are compared by value: generators hand out fresh tensors, of which nothing else can be said. All others
must be the same memory with the same version counter, and in the few words that are looked at the same content.
"""

from __future__ import annotations

import ctypes
import weakref
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


@dataclass(frozen=True, slots=True)
class _Plan:
    """What of a layout can be known beforehand."""

    facts: object
    small: list[int]
    others: list[int]
    places: torch.Tensor
    """Where to look in each of the others: the first, a middle and the last word, as far as the host can."""
    blind: torch.Tensor
    """Which of them the host cannot look into so: on a GPU, too small, or not one block."""


class Fingerprints:
    """Takes fingerprints of one state; what stays the same from one to the next is looked up once."""

    def __init__(self) -> None:
        self._plan: _Plan | None = None

    def of(self, capture: Capture) -> Fingerprint:
        """Of the state as it is right now; `capture` was taken just before."""
        plan = self._plan
        if plan is None or plan.facts is not capture.early:
            plan = self._plan = _make_plan(capture)
        pointers = [capture.pointers[number] for number in plan.others]
        sources = [capture.sources[number] for number in plan.others]
        return Fingerprint(
            layout=capture.layout,
            objects=capture.objects,
            values={number: _digest(capture, number) for number in plan.small},
            others=plan.others,
            memory=list(map(weakref.ref, map(torch.Tensor.untyped_storage, sources))),
            pointers=pointers,
            versions=_versions(sources),
            words=_words(plan, pointers),
        )


def _make_plan(capture: Capture) -> _Plan:
    leaves = capture.layout.leaves
    small: list[int] = []
    total = 0
    for number in capture.early:
        leaf = leaves[number]
        if leaf.device == "cpu" and leaf.nbytes <= SMALL_BYTES and total + leaf.nbytes <= SMALL_TOTAL_BYTES:
            small.append(number)
            total += leaf.nbytes
    chosen = set(small)
    others = [number for number in range(len(leaves)) if number not in chosen]
    last = torch.tensor([max(0, leaves[number].nbytes // WORD - 1) for number in others], dtype=torch.int64)
    places = torch.stack([torch.zeros_like(last), last // 2, last], dim=1) * WORD
    blind = [n in capture.strided or leaves[n].device != "cpu" or leaves[n].nbytes < WORD for n in others]
    return _Plan(capture.early, small, others, places, torch.tensor(blind, dtype=torch.bool))


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
    if not nbytes or number not in capture.strided:
        return xxhash.xxh3_64_intdigest(ctypes.string_at(capture.pointers[number], nbytes))
    copy = bytearray(nbytes)
    raw_memory.move_strided(torch.frombuffer(copy, dtype=torch.uint8).data_ptr(), capture.sources[number], nbytes)
    return xxhash.xxh3_64_intdigest(copy)


def _versions(sources: list[torch.Tensor]) -> list[int]:
    try:
        return list(map(version_of, sources))
    except RuntimeError:  # some are inference tensors
        return [_NO_COUNTER if source.is_inference() else version_of(source) for source in sources]


def _words(plan: _Plan, pointers: list[int]) -> torch.Tensor:
    begins = torch.tensor(pointers, dtype=torch.int64)
    blind = plan.blind | (begins % WORD != 0)
    addresses = torch.where(blind.view(-1, 1), _ZERO.data_ptr(), begins.view(-1, 1) + plan.places)
    return raw_memory.words_at(addresses.view(-1)).view(-1, 3)


#: What is read where nothing can be.
_ZERO = torch.zeros(1, dtype=torch.int32)


def _changed_components(before: bytes, now: bytes) -> list[str]:
    old, new = _trees(before), _trees(now)
    return [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)] or ["other state"]


def _trees(objects: bytes) -> dict[str, Json]:
    found = loads(objects)
    trees = found.get("trees") if isinstance(found, dict) else None
    return trees if isinstance(trees, dict) else {}
