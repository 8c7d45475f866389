"""Why a resumed run differs: the first thing of the straight run's notes that it does not have, and what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from easyckpt.cli.audit.findings import SPOKEN, Findings
from easyckpt.cli.audit.looks import LOOKS, View, by_place, is_generator, unlike
from easyckpt.cli.audit.notes import Notes

_UNREPEATED = (
    "two runs of the same command are not the same: seed what is random, use deterministic algorithms, and keep ids, "
    "times and paths out of the state"
)


@dataclass(frozen=True, slots=True)
class Culprit:
    """What a resumed run does not have from the straight one, for people."""

    what: str
    step: int | None
    rank: int
    advice: str
    by_stranger: bool = False
    """It is something that is not part of the state, and that was found by itself."""

    def __str__(self) -> str:
        where = f" on rank {self.rank}" if self.rank else ""
        when = f" from step {self.step} on" if self.step is not None else ""
        return f"{self.what}{where}{when}: {self.advice}"


def culprit(
    found: Findings,
    straight: list[Notes],
    *,
    unseeded: Collection[str] = (),
    unrepeated: Collection[str] = (),
    resumed: bool = True,
) -> Culprit | None:
    """The first difference decides; of those at one step, the one that causes the others. None: nothing differs.

    `unseeded`: what is noted and the straight runs do not share. `unrepeated`: metrics that never repeat.
    """
    if found.loaded is None and resumed:
        return Culprit("nothing was restored", None, 0, found.advice.load)
    if found.tier is None and resumed:
        return Culprit("there was nothing to restore", None, 0, "the run before has stored no checkpoint; see its log")
    view = _view(found, straight, unseeded, resumed)
    first = _first_noted(found.notes, straight, view)
    if first is None and found.identical(unrepeated):
        return None
    if not found.steps:
        return Culprit("no step was stored by both runs", None, 0, found.advice.count)
    noted = first.step if first is not None else math.inf
    state = _first_in_state(found, unrepeated)
    if _parted(found) <= min(noted, state):
        return _other_steps(found)
    # Strangers are looked for late in a run: between straight ones, one that differs at all is what nobody has seeded.
    unsought = not resumed and first is not None and first.order == 0
    if first is None or (state < noted and not unsought):
        return _unseen(found, unrepeated, resumed)
    return Culprit(first.what, first.step if not unsought else None, first.rank, first.advice, first.order == 0)


def _view(found: Findings, straight: Sequence[Notes], unseeded: Collection[str], resumed: bool) -> View:
    lost: set[str] = set()
    for one, other in zip(found.notes, straight, strict=False):
        lost |= _lost(one, other, unseeded if resumed else [*unseeded, *_of_libraries(straight)])
    return View(without=unseeded, lost=lost, resumed=resumed, advice=found.advice)


def _lost(mine: Notes, straight: Notes, without: Collection[str]) -> set[str]:
    """Strangers that differ where the runs were last seen together, and that either of them has moved after the load.

    A generator that is seeded anew, or made anew, at each use comes to be where it was; one that is never drawn from
    again does not matter. A scheduler's next step does, however far away.
    """
    steps = sorted(mine.steps.keys() & straight.steps.keys())
    series = [[by_place(_some(notes.steps[step], without)) for step in steps] for notes in (mine, straight)]
    found: set[str] = set()
    for place in {place for states in series[1] for place in states}:
        both = [number for number in range(len(steps)) if place in series[0][number] and place in series[1][number]]
        if both and unlike(series[0][both[-1]][place], series[1][both[-1]][place]):
            moved = any(states[number][place] != states[both[0]][place] for states in series for number in both)
            if moved or not is_generator(place):
                found.add(place)
    return found


def _some(note: dict[str, Any], without: Collection[str]) -> dict[str, str]:
    return {name: digest for name, digest in note["strangers"].items() if name not in without}


def _of_libraries(straight: Sequence[Notes]) -> set[str]:
    """Generators of Python's that are not the program's own: some libraries seed one for themselves, by the clock.

    A resumed run may differ by one of these; two straight runs always do.
    """
    names = {name for notes in straight for noted in notes.steps.values() for name in noted["strangers"]}
    return {name for name in names if re.match(r"random\.Random, ('|the global (?!\w+ of __main__$))", name)}


class _Noted(NamedTuple):
    """A difference between notes; they sort by time, then by cause and effect."""

    step: int
    order: int
    rank: int
    what: str
    advice: str


def _first_noted(notes: Sequence[Notes], straight: Sequence[Notes], view: View) -> _Noted | None:
    found: list[_Noted] = []
    for rank, (mine, theirs) in enumerate(zip(notes, straight, strict=False)):
        for step in sorted(mine.steps.keys() & theirs.steps.keys()):
            looks = ((order, look(mine.steps[step], theirs.steps[step], view)) for order, look in enumerate(LOOKS))
            said = [_Noted(step, order, rank, *told) for order, told in looks if told is not None]
            if said:  # what comes later on this rank follows from it
                found.append(said[0])
                break
    return min(found, default=None)


def _first_in_state(found: Findings, without: Collection[str]) -> float:
    """The first step at which a metric or a component differs; infinite where none does."""
    metrics = [m.first_step for name, m in found.metrics.items() if m.first_step is not None and name not in without]
    parts = [part.first_step for part in found.parts.values() if part.first_step is not None]
    return min([*metrics, *parts], default=math.inf)


def _parted(found: Findings) -> float:
    """The first step that only one of the runs has come to, or has stored; infinite where there is none."""
    mine, theirs = found.ended
    return min([*found.unshared, *([min(mine, theirs) + 1] if mine != theirs else [])], default=math.inf)


def _other_steps(found: Findings) -> Culprit:
    """One of the runs has gone on for longer, or has stored in between."""
    mine, theirs = found.ended
    if mine != theirs and found.unshared[0] > min(mine, theirs):
        what = f"it ends after step {mine}, and the straight run after step {theirs}"
        return Culprit(what, None, 0, found.advice.count)
    steps = ", ".join(map(str, found.unshared[:5]))
    return Culprit(f"the runs have not both stored step {steps}", None, 0, found.advice.count)


def _unseen(found: Findings, without: Collection[str], resumed: bool) -> Culprit:
    """Nothing that was noted differs first: something that is in no component and that nobody sees."""
    taken = any(note["batches"] for notes in found.notes for note in notes.steps.values())
    metrics = {name: m.first_step for name, m in found.metrics.items() if not m.equal and name not in without}
    at_once, missing = (found.loaded or 0) + 1, found.advice.missing
    for name, step in metrics.items():
        if step == at_once and resumed:
            what = f"{name!r} differs in the first step after the resume, while generators and learning rates are equal"
            return Culprit(what, at_once, 0, missing if taken else f"{found.advice.other_data}, or {missing}")
    parts = [part for part in found.parts.values() if part.first_step is not None]
    if not parts:
        name, first = next(iter(metrics.items()))
        return Culprit(f"{name!r} differs, while the state is equal", first, 0, "it is computed from what is no state")
    part = min(parts, key=lambda part: (part.first_step or 0, part.largest is None))
    what = f"{SPOKEN.get(part.component, part.component)!r} differs, first at {part.first_tensor}"
    if not resumed:
        return Culprit(what, part.first_step, 0, _UNREPEATED)
    return Culprit(what, part.first_step, 0, f"{missing}, and {found.advice.log}, which tells the first step")
