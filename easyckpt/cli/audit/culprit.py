"""Why a resumed run differs: the first thing of the straight run's notes that it does not have, and what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from easyckpt.cli.audit.findings import SPOKEN, Findings
from easyckpt.cli.audit.notes import Notes, batches_of

Note = dict[str, Any]
_COUNT = (
    "count finished steps in the state, begin the loop at what load() returns, end it at the same number in all runs, "
    "and save by that count"
)


@dataclass(frozen=True, slots=True)
class Culprit:
    """What a resumed run does not have from the straight one, for people."""

    what: str
    step: int | None
    rank: int
    advice: str

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
        return Culprit("nothing was restored", None, 0, "call load() before the training loop, and start at its step")
    if found.tier is None and resumed:
        return Culprit("load() has found nothing", None, 0, "the run before has stored no checkpoint; see its log")
    aside = unseeded if resumed else [*unseeded, *_of_libraries(straight)]
    first = _first_noted(found.notes, straight, aside)
    if first is None and found.identical(unrepeated):
        return None
    if not found.steps:
        return Culprit("no step was stored by both runs", None, 0, _COUNT)
    noted = first.step if first is not None else math.inf
    state = _first_in_state(found, unrepeated)
    if _parted(found) <= min(noted, state):
        return _other_steps(found)
    if first is None or state < noted:
        return _unseen(found, unrepeated)
    return Culprit(first.what, first.step, first.rank, first.advice)


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


def _first_noted(notes: Sequence[Notes], straight: Sequence[Notes], without: Collection[str]) -> _Noted | None:
    found: list[_Noted] = []
    for rank, (mine, theirs) in enumerate(zip(notes, straight, strict=False)):
        for step in sorted(mine.steps.keys() & theirs.steps.keys()):
            looks = ((order, look(mine.steps[step], theirs.steps[step], without)) for order, look in enumerate(_LOOKS))
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
        return Culprit(f"it ends after step {mine}, and the straight run after step {theirs}", None, 0, _COUNT)
    steps = ", ".join(map(str, found.unshared[:5]))
    return Culprit(f"the runs have not both stored step {steps}", None, 0, _COUNT)


def _stranger(mine: Note, theirs: Note, without: Collection[str]) -> tuple[str, str] | None:
    here, there = _by_place(mine["strangers"], without), _by_place(theirs["strangers"], without)
    # Of several at one place some may be left from before: those are in one of the runs alone, and nobody's loss.
    places = (
        place for place in there if place in here and not (here[place] <= there[place] or there[place] <= here[place])
    )
    found = next(places, None)
    if found is None:
        return None
    kind, _, place = found.partition(", ")
    return (
        f"a {kind} that is not part of the state ({place}) is not where it was",
        'hand it over: Checkpointer(root, {…, "generator": generator})',
    )


def _by_place(strangers: dict[str, str], without: Collection[str]) -> dict[str, set[str]]:
    """Kind and place -> digests of all that are there."""
    found: dict[str, set[str]] = {}
    for name, digest in strangers.items():
        if name not in without:
            found.setdefault(re.sub(r" \(\d+\)$", "", name), set()).add(digest)
    return found


def _rates(mine: Note, theirs: Note, _: Collection[str]) -> tuple[str, str] | None:
    name = _first_unlike(mine["rates"], theirs["rates"])
    if name is None:
        return None
    pair = next(
        ((a, b) for a, b in zip(theirs["rates"][name], mine["rates"][name], strict=False) if a != b), ("?", "?")
    )
    return (
        f"the learning rate of {name!r} is {pair[1]} where it was {pair[0]}",
        'hand the scheduler over, or what counts the schedule: Checkpointer(root, {…, "scheduler": scheduler}); one '
        "that is made for the steps that are left counts from zero",
    )


def _generators(mine: Note, theirs: Note, without: Collection[str]) -> tuple[str, str] | None:
    name = _first_unlike(mine["generators"], theirs["generators"], without)
    if name is None:
        return None
    spoken = f"the global generator of {name}" if name in ("python", "numpy", "torch") else f"the generator {name!r}"
    return (
        f"{spoken} is not where it was though it was restored",
        "it was seeded anew, or drawn from another number of times, after load(): seed before load(), and take batches "
        "through ckpt.batches(loader, epoch), which puts the generators back at the first batch",
    )


def _batches(mine: Note, theirs: Note, without: Collection[str]) -> tuple[str, str] | None:
    aside = [name for name in mine["batches"] if batches_of(name) in without]
    name = _first_unlike(mine["batches"], theirs["batches"], aside)
    if name is None:
        return None
    return (
        f"the batches of the loader {name!r} are others",
        "the order of its data is drawn or counted by something that is not part of the state: hand its sampler over "
        "(easyckpt.SkipBatchSampler, or any object with state_dict and load_state_dict)",
    )


#: In the order of cause and effect: a generator decides batches, batches may decide how often another is drawn from.
_LOOKS: list[Callable[[Note, Note, Collection[str]], tuple[str, str] | None]] = [
    _stranger, _rates, _batches, _generators,
]  # fmt: skip


def _first_unlike(mine: dict[str, Any], theirs: dict[str, Any], without: Collection[str] = ()) -> str | None:
    """The first name that both have with unlike values."""
    return next((n for n in theirs if n in mine and n not in without and mine[n] != theirs[n]), None)


def _unseen(found: Findings, without: Collection[str]) -> Culprit:
    """Nothing that was noted differs first: something that is in no component and that nobody sees."""
    at_once = (found.loaded or 0) + 1
    for name, metric in found.metrics.items():
        if metric.first_step == at_once and name not in without:
            return Culprit(
                f"{name!r} differs in the first step after the resume, while generators and learning rates are equal",
                at_once,
                0,
                "the step has seen other data, or something that it depends on is not part of the state: take batches "
                "through ckpt.batches(loader, epoch), or hand over what says where the data are (a counter, an "
                "iterator's position) as a dict or an object with state_dict and load_state_dict",
            )
    differing = found.differing
    if not differing:
        name, first = next((n, m.first_step) for n, m in found.metrics.items() if not m.equal and n not in without)
        return Culprit(f"{name!r} differs, while the state is equal", first, 0, "it is computed from what is no state")
    part = found.parts[differing[0]]
    return Culprit(
        f"{SPOKEN.get(part.component, part.component)!r} differs, first at {part.first_tensor}",
        part.first_step,
        0,
        "something that training depends on is in no component: data read by a counter or an iterator of the program's "
        "own, an attribute, a hook. Hand it over as a dict or an object with state_dict and load_state_dict, and log "
        "the loss (ckpt.log(loss=loss)), which tells the first step that differs",
    )
