"""What a stager knows about the snapshots that it has begun, and about the leaves that may be copied late."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from easyckpt.format.codec import path_text
from easyckpt.format.image import Layout
from easyckpt.memory.slot import Slot, SlotMeta
from easyckpt.saving.copying import Copier, CopyJob, LiveLeaves
from easyckpt.saving.waking import Latch
from easyckpt.state.capture import Capture

#: One object, so that copy plans for it can be told by identity.
NOTHING_LATE: list[int] = []


@dataclass(slots=True)
class Window:
    """A snapshot that is neither sealed nor discarded. Holds no tensor but through its job."""

    meta: SlotMeta
    slot: Slot
    layout: Layout
    objects: bytes
    job: CopyJob
    begun: float
    doubt: str = ""
    """Why nobody can tell when a leaf that is copied late is written."""
    over: Latch = field(default_factory=Latch)

    @contextlib.contextmanager
    def ended_if_interrupted(self) -> Iterator[None]:
        """Ctrl-C may come at any line of what ends the window: nobody must wait for the rest of it then."""
        try:
            yield
        except BaseException:
            self.over.set()
            raise


class LateLeaves:
    """Which leaves may be copied during the next forward and backward.

    A leaf has to prove itself: it was copied early, and at the next optimizer step it was still what the copy is.
    One that was written to outside of an optimizer step is copied early for good. Each optimizer has to prove itself as
    well: its steps were seen. Of one that steps unseen (as a CUDA graph) nobody knows when it writes. What nobody
    writes (see `Component.constant`) is copied late where any was seen: a step is what ends the window.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._proven: set[str] = set()
        self._torn: set[str] = set()
        self._seen: set[int] = set()
        self._unseen: set[int] = set()
        self._known: tuple[object, list[int], list[int]] = (None, NOTHING_LATE, NOTHING_LATE)
        self._trial: tuple[LiveLeaves, Slot, set[int]] | None = None

    def of(self, capture: Capture) -> list[int]:
        """The leaves of `capture` to be copied late; the same list while nothing changes."""
        return self._split(capture)[0]

    def begin_trial(self, capture: Capture, slot: Slot) -> None:
        """Leaves of `capture` that were copied early into `slot` and may be copied late one day: watch them."""
        self._trial = None
        numbers = self._split(capture)[1]
        if numbers:
            tensors = [weakref.ref(capture.sources[number]) for number in numbers]
            nobodys = {number for number in numbers if not capture.steppers[number]}
            self._trial = (LiveLeaves(capture.layout, numbers, tensors), slot, nobodys)

    def drop_trial(self) -> None:
        """No optimizer step was seen, or the slot is about to be given up."""
        self._trial = None

    def end_trial(self) -> list[str]:
        """An optimizer is about to step. Returns the names of leaves of optimizers that were written to before.

        A program that writes to what no optimizer steps does nothing odd.
        """
        if self._trial is None:
            return []
        (live, slot, nobodys), self._trial = self._trial, None
        written = set(self._copier.differing(live, slot))
        gone = {number for number, tensor in zip(live.numbers, live.tensors, strict=True) if tensor() is None}
        self._proven.update(names(live.layout, (n for n in live.numbers if n not in written and n not in gone)))
        self.never_again(names(live.layout, written))
        return names(live.layout, sorted(written - nobodys))

    def trust(self, optimizers: set[int]) -> None:
        """Steps of these optimizers (by id) were seen between two saves."""
        if not optimizers <= self._seen:
            self._seen |= optimizers
            self._known = (None, NOTHING_LATE, NOTHING_LATE)

    def never_trust(self, optimizer: int) -> None:
        """Its steps are going to happen unseen."""
        self._unseen.add(optimizer)
        self._known = (None, NOTHING_LATE, NOTHING_LATE)

    def never_again(self, found: Iterable[str]) -> None:
        """Copy these leaves early from now on."""
        self._torn.update(found)
        self._known = (None, NOTHING_LATE, NOTHING_LATE)

    def _split(self, capture: Capture) -> tuple[list[int], list[int]]:
        if self._known[0] is not capture.late:
            late: list[int] = []
            unknown: list[int] = []
            trusted = self._seen - self._unseen
            for number, name in zip(capture.late, names(capture.layout, capture.late), strict=True):
                if name not in self._torn and name not in self._proven:
                    unknown.append(number)
                elif name not in self._torn and trusted and capture.steppers[number] <= trusted:
                    late.append(number)
            self._known = (capture.late, late or NOTHING_LATE, unknown)
        return self._known[1], self._known[2]


def names(layout: Layout, numbers: Iterable[int]) -> list[str]:
    """The paths of leaves, as text."""
    return [path_text(layout.leaves[number].path) for number in numbers]


def listed(found: list[str]) -> str:
    """The first of some names."""
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
