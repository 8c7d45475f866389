"""What two runs' notes of one step have in common, look by look: what differs, in words, and what to do about it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from easyckpt.auditing import COMPONENT
from easyckpt.cli.audit.advice import OWN, Advice
from easyckpt.cli.audit.notes import batches_of

Note = dict[str, Any]
#: (what differs, what to do)
Told = tuple[str, str]


@dataclass(frozen=True, slots=True)
class View:
    """How notes are looked at."""

    without: Collection[str] = ()
    """What decides nothing: the straight runs do not share it."""
    lost: Collection[str] = ()
    """Strangers (kind and place) that have gone on otherwise, and do so to the end."""
    advice: Advice = OWN
    resumed: bool = True
    """Of a resumed run against a straight one; else of two straight ones."""


def strangers(mine: Note, theirs: Note, view: View) -> Told | None:
    """What is not part of the state, and is not where it was."""
    here, there = by_place(mine["strangers"]), by_place(theirs["strangers"])
    found = next((place for place in there if place in view.lost and unlike(here.get(place), there[place])), None)
    if found is None:
        return None
    kind, _, place = found.partition(", ")
    what = f"a {kind} that is not part of the state ({place}) is not where it was"
    if not view.resumed:
        return what, "nobody seeds it: give it a seed where it is made"
    if place.startswith("a variable of the iterator"):
        return what, view.advice.batches
    return what, view.advice.generator if is_generator(kind) else view.advice.scheduler


def is_generator(stranger: str) -> bool:
    """Whether it is one of random numbers; else it is a scheduler."""
    return re.match(r"\w+\.(Generator|Random|RandomState)\b", stranger) is not None


def by_place(found: dict[str, str]) -> dict[str, Counter[str]]:
    """Kind and place -> digests of all that are there."""
    places: dict[str, Counter[str]] = {}
    for name, digest in found.items():
        places.setdefault(re.sub(r" \(\d+\)$", "", name), Counter())[digest] += 1
    return places


def unlike(mine: Counter[str] | None, theirs: Counter[str] | None) -> bool:
    """Whether something is lost. Of several at one place some may be left from before, in one of the runs alone."""
    return mine is not None and theirs is not None and not (mine <= theirs or theirs <= mine)


def rates(mine: Note, theirs: Note, view: View) -> Told | None:
    """Learning rates, by optimizer."""
    name = _first_unlike(mine["rates"], theirs["rates"])
    if name is None:
        return None
    pairs = zip(theirs["rates"][name], mine["rates"][name], strict=False)
    was, now = next(((a, b) for a, b in pairs if a != b), ("?", "?"))
    what = f"the learning rate of {name!r} is {now} where it was {was}"
    if mine.get("schedulers"):
        return what, view.advice.stepped.replace("{names}", ", ".join(map(repr, mine["schedulers"])))
    return what, view.advice.unscheduled


def batches(mine: Note, theirs: Note, view: View) -> Told | None:
    """What ckpt.batches has handed out."""
    aside = [name for name in mine["batches"] if batches_of(name) in view.without]
    name = _first_unlike(mine["batches"], theirs["batches"], aside)
    if name is None:
        return None
    return f"the batches of the loader {name!r} are others", view.advice.order


def generators(mine: Note, theirs: Note, view: View) -> Told | None:
    """The global generators, and those that are part of the state."""
    name = _first_unlike(mine["generators"], theirs["generators"], view.without)
    if name is None:
        return None
    own = name.startswith(COMPONENT)
    spoken = f"the generator {name.removeprefix(COMPONENT)!r}" if own else f"the global generator of {name}"
    if not view.resumed:
        return f"{spoken} differs", "seed it, and draw from it as often in every run"
    return f"{spoken} is not where it was though it was restored", view.advice.drawn


#: In the order of cause and effect: a generator decides batches, batches may decide how often another is drawn from.
LOOKS: list[Callable[[Note, Note, View], Told | None]] = [strangers, rates, batches, generators]


def _first_unlike(mine: dict[str, Any], theirs: dict[str, Any], without: Collection[str] = ()) -> str | None:
    """The first name that both have with unlike values."""
    return next((n for n in theirs if n in mine and n not in without and mine[n] != theirs[n]), None)
