"""Whether the live state is still what it was at an earlier moment: told by digests of every byte.

None of the user's tensors is held. Of what is small (generators, buffers) the bytes themselves are kept: it may change.
A program that evaluates after its last step draws from a generator, and is none the worse for it.

Nothing else proves it: whoever writes through ``.data``, NumPy or a fused optimizer raises no version counter. What may
be copied late may be digested late as well: in the same window, under the same counters and probes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
import xxhash

from easyckpt.format.codec import path_text
from easyckpt.format.image import Layout, Leaf
from easyckpt.saving import raw_memory
from easyckpt.saving.copying import small_leaves_first, version_of
from easyckpt.saving.gathering import WORTH_IT, Gather, is_tiny
from easyckpt.saving.probes import Probes, can_be_probed, differing, probed_offsets
from easyckpt.state.capture import Capture

#: A state up to this size is digested at once as a whole: that takes no longer than a millisecond or two.
SMALL_STATE_BYTES = 8 << 20
#: No more than this is digested on the training thread: of a larger state nothing is known then.
AT_ONCE_BYTES = 64 << 20
#: A leaf of at most so many bytes is kept as it is, as long as all of them are together at most so many.
KEPT_LEAF_BYTES, KEPT_BYTES = 16 << 10, 1 << 20
#: Between two pieces a background digest looks whether anybody still needs it.
_PIECE_BYTES = 8 << 20

Submit = Callable[[Callable[[], "dict[int, int]"]], "Future[dict[int, int]]"]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The state at one moment: digests and the step's other state, no tensor of the user's."""

    layout: Layout
    objects: bytes
    kept: dict[int, bytes]
    """Leaf -> its bytes."""
    digests: dict[int, int]
    """Leaf -> digest of its bytes."""
    tiny: Sequence[int]
    """Leaves whose bytes are kept as well, one after the other:"""
    words: torch.Tensor
    late: Future[dict[int, int]] | None
    """Digests that are still being made; without those of leaves that somebody wrote to meanwhile."""

    def lend(self, now: Capture) -> Then | list[str]:
        """The state of that moment out of the live one, `now`; or the names of leaves that are not, or cannot be proven
        to be, what they were. Reads every byte of the state.
        """
        kept = self.kept | self._kept_tiny()
        before = self.digests | (self.late.result() if self.late is not None else {})
        then = _laid_out_as(self.layout, now)
        leaves = self.layout.leaves
        need = [n for n, leaf in enumerate(leaves) if leaf.nbytes and n not in kept]
        differ = [n for n in need if not then.pointers[n] or before.get(n) != _digest(then, n)]
        if differ:
            return [path_text(leaves[number].path) for number in differ]
        return Then(replace(then, objects=self.objects), kept)

    def _kept_tiny(self) -> dict[int, bytes]:
        kept, address = {}, self.words.data_ptr()
        for number in self.tiny:
            nbytes = self.layout.leaves[number].nbytes
            kept[number] = ctypes.string_at(address, nbytes)
            address += nbytes
        return kept


@dataclass(frozen=True, slots=True)
class Then:
    """An earlier state: `capture` refers to the live one, but for the leaves whose bytes are in `kept`."""

    capture: Capture
    kept: dict[int, bytes]


def _laid_out_as(layout: Layout, now: Capture) -> Capture:
    """`now` with the leaves of `layout`; the pointer of one that is not there any more, in the same form, is 0."""
    if layout is now.layout:
        return now
    live = {(leaf.path, _form(leaf)): number for number, leaf in enumerate(now.layout.leaves)}
    places = [live.get((leaf.path, _form(leaf))) for leaf in layout.leaves]
    return replace(
        now,
        layout=layout,
        sources=[_NOTHING if place is None else now.sources[place] for place in places],
        pointers=[0 if place is None else now.pointers[place] for place in places],
        strided=frozenset(number for number, place in enumerate(places) if place in now.strided),
    )


def _form(leaf: Leaf) -> tuple[object, ...]:
    return leaf.dtype, leaf.shape, leaf.order, leaf.device


@dataclass(frozen=True, slots=True)
class _Plan:
    """What of a layout can be known beforehand."""

    facts: object
    may_be_late: Sequence[int]
    refusal: str
    tiny: list[int]
    gather: Gather | None
    kept: list[int]
    at_once: list[int]
    late: list[int]
    probes: Probes


class Fingerprints:
    """Takes fingerprints of one state; what stays the same from one to the next is looked up once."""

    def __init__(self, submit: Submit) -> None:
        """`submit` has a job run in the background."""
        self._submit = submit
        self._plan: _Plan | None = None

    def of(self, capture: Capture, late: Sequence[int], needed: Callable[[], bool]) -> Fingerprint | str:
        """Of the state as it is right now (`capture` was taken just before), or why nothing can be said about it.

        `late` are leaves that nothing but an optimizer's step writes. They are digested in the background, as long as
        they are `needed` (asked from there): not any more once an optimizer is about to step.
        """
        plan = self._plan
        if plan is None or plan.facts is not capture.early or plan.may_be_late is not late:
            plan = self._plan = _make_plan(capture, late)
        if plan.refusal:
            return plan.refusal
        return Fingerprint(
            layout=capture.layout,
            objects=capture.objects,
            kept={n: ctypes.string_at(capture.pointers[n], capture.layout.leaves[n].nbytes) for n in plan.kept},
            digests={number: _digest(capture, number) for number in plan.at_once},
            tiny=plan.tiny,
            words=_NOTHING if plan.gather is None else plan.gather.words(capture),
            late=self._submit(_LateDigests(capture, plan, needed).run) if plan.late else None,
        )


class _LateDigests:
    """Digests of leaves that are guarded as if they were copied: see `copying.CpuCopyJob`."""

    def __init__(self, capture: Capture, plan: _Plan, needed: Callable[[], bool]) -> None:
        self._needed, self._numbers = needed, plan.late
        self._sources = [capture.sources[number] for number in plan.late]
        self._memory = list(map(torch.Tensor.untyped_storage, self._sources))
        self._pointers = [capture.pointers[number] for number in plan.late]
        self._sizes = [capture.layout.leaves[number].nbytes for number in plan.late]
        self._versions = list(map(version_of, self._sources))
        self._words = plan.probes.words(self._pointers)
        self._addresses = plan.probes.addresses

    def run(self) -> dict[int, int]:
        """On the background thread."""
        digests = [_digest_at(*place, self._needed) for place in zip(self._pointers, self._sizes, strict=True)]
        written = set(differing(self._addresses, self._words))
        now = map(version_of, self._sources)
        written.update(row for row, (old, new) in enumerate(zip(self._versions, now, strict=True)) if old != new)
        return {self._numbers[row]: digest for row, digest in enumerate(digests) if row not in written}


def _make_plan(capture: Capture, may_be_late: Sequence[int]) -> _Plan:
    leaves = capture.layout.leaves
    late: list[int] = []
    if capture.layout.image_bytes > SMALL_STATE_BYTES:
        guarded = [n for n in may_be_late if can_be_probed(capture, n) and not capture.sources[n].is_inference()]
        late = small_leaves_first(capture.layout, guarded)[1]
    chosen = set(late)
    now = [n for n, leaf in enumerate(leaves) if leaf.nbytes and n not in chosen]
    refusal = _refusal(capture, now)
    tiny = [] if refusal else [n for n in now if is_tiny(capture, n)]
    gathered = set(tiny) if len(tiny) >= WORTH_IT else set()
    kept = [] if refusal else _worth_keeping(capture, [n for n in now if n not in gathered])
    others = gathered.union(kept)
    return _Plan(
        facts=capture.early,
        may_be_late=may_be_late,
        refusal=refusal,
        tiny=tiny if gathered else [],
        gather=Gather(capture, tiny) if gathered else None,
        kept=kept,
        at_once=[n for n in now if n not in others],
        late=late,
        probes=Probes([offset for n in late for offset in probed_offsets(leaves[n])], []),
    )


def _worth_keeping(capture: Capture, numbers: list[int]) -> list[int]:
    """The smallest of some leaves."""
    leaves = capture.layout.leaves
    kept, nbytes = [], 0
    for number in sorted(numbers, key=lambda number: leaves[number].nbytes):
        nbytes += leaves[number].nbytes
        if leaves[number].nbytes > KEPT_LEAF_BYTES or nbytes > KEPT_BYTES:
            break
        if number not in capture.strided:
            kept.append(number)
    return kept


def _refusal(capture: Capture, now: list[int]) -> str:
    leaves = capture.layout.leaves
    elsewhere = next((leaf for leaf in leaves if leaf.nbytes and leaf.device != "cpu"), None)
    if elsewhere is not None:
        return f"{path_text(elsewhere.path)} lies on {elsewhere.device}, where nobody could tell whether it has changed"
    nbytes = sum(leaves[number].nbytes for number in now)
    if nbytes > AT_ONCE_BYTES:
        largest = max(now, key=lambda number: leaves[number].nbytes)
        return (
            f"{nbytes / 1e6:.0f} MB of the state (the largest: {path_text(leaves[largest].path)}) may be written to "
            "outside of optimizer steps, too much to look at at each skip: nobody could tell whether it has changed"
        )
    return ""


def _digest(capture: Capture, number: int) -> int:
    nbytes = capture.layout.leaves[number].nbytes
    if number not in capture.strided:
        return _digest_at(capture.pointers[number], nbytes)
    copy = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    raw_memory.move_strided(copy.data_ptr(), capture.sources[number], nbytes)
    return _digest_at(copy.data_ptr(), nbytes)


def _digest_at(address: int, nbytes: int, needed: Callable[[], bool] = lambda: True) -> int:
    """Of raw memory, without the GIL where it is large. Meaningless where it is not `needed` any more."""
    if nbytes < raw_memory.SMALL_BYTES:
        return xxhash.xxh3_64_intdigest(ctypes.string_at(address, nbytes))
    hasher = xxhash.xxh3_64()
    for begin in range(0, nbytes, _PIECE_BYTES):
        if not needed():
            break
        size = min(_PIECE_BYTES, nbytes - begin)
        hasher.update((ctypes.c_char * size).from_address(address + begin))
    return hasher.intdigest()


_NOTHING = torch.zeros(0, dtype=torch.int32, device="cpu")
