"""How one run differs from the straight one: every stored step, and every logged number."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from easyckpt import catalog, comparison
from easyckpt.cli.audit.advice import OWN, Advice, advice_for
from easyckpt.cli.audit.notes import Notes, batches_of, metrics_of, notes_of
from easyckpt.cli.audit.runs import Run
from easyckpt.comparison import Difference
from easyckpt.engine import DATA
from easyckpt.format.difference import further
from easyckpt.saving.metrics import COMPONENT as METRICS
from easyckpt.state.rng import RNG

_MISSING: Any = ["not logged"]
#: What people call easyckpt's own parts of the state.
SPOKEN = {RNG: "rng (the global generators)", DATA: "data (what ckpt.batches has handed out)"}


@dataclass(slots=True)
class Part:
    """One component over all compared steps."""

    component: str
    tensors: int = 0
    largest: float | None = None
    """Largest absolute difference of numbers; None where none differ."""
    first_tensor: str | None = None
    first_step: int | None = None
    growth: dict[int, float] = field(default_factory=dict)
    """Step -> largest absolute difference."""

    @property
    def equal(self) -> bool:
        """To the bit, at all steps."""
        return self.first_step is None


@dataclass(slots=True)
class Metric:
    """One logged name over all steps that both runs have."""

    name: str
    first_step: int | None = None
    largest: float | None = None

    @property
    def equal(self) -> bool:
        """At all steps, exactly."""
        return self.first_step is None


@dataclass(slots=True)
class Findings:
    """What comparing a run with the straight one has shown."""

    name: str
    loaded: int | None
    tier: str | None
    steps: list[int]
    """Those whose checkpoints were compared."""
    unshared: list[int]
    """Steps after the loaded one that only one of the runs has stored."""
    ended: tuple[int, int]
    """The newest stored step of the run, and of the straight one."""
    parts: dict[str, Part]
    metrics: dict[str, Metric]
    notes: list[Notes]
    series: dict[int, dict[str, Any]]
    """The run's own metrics."""
    advice: Advice = OWN
    """What the program's author can do about things."""

    @property
    def differing(self) -> list[str]:
        """The components that differ."""
        return [name for name, part in self.parts.items() if not part.equal]

    def identical(self, without: Collection[str] = ()) -> bool:
        """To the bit, but for metrics `without`; never where nothing was compared."""
        unlike = [name for name, metric in self.metrics.items() if not metric.equal and name not in without]
        return bool(self.steps) and not self.unshared and not self.differing and not unlike


def find(run: Run, straight: Run, unseeded: Collection[str]) -> Findings:
    """Compare what `run` has stored and logged with `straight`, from the step that it has loaded on.

    `unseeded`: global generators that nobody has seeded; their states are left out.
    """
    places = [one.place() for one in (run, straight)]
    storages = [storage for storage, _ in places]
    notes = notes_of(storages[0])
    loaded = notes[0].loaded if notes else None
    mine, other = ({entry.step: entry for entry in catalog.scan(*place).committed()} for place in places)
    steps = [step for step in sorted(mine.keys() & other.keys()) if step > (loaded or 0)]
    unshared = [step for step in sorted(mine.keys() ^ other.keys()) if step > (loaded or 0)]
    parts: dict[str, Part] = {}
    for step in steps:
        found = comparison.compare((storages[0], mine[step]), (storages[1], other[step]))
        for name, compared in found.components.items():
            if name != METRICS:
                part = parts.setdefault(name, Part(name))
                part.tensors = max(part.tensors, compared.tensors)
                _add(part, step, [d for d in found.differences if d.component == name and _counts(d, unseeded)])
    ours, theirs = metrics_of(storages[0]), metrics_of(storages[1])
    return Findings(
        name=run.name,
        loaded=loaded,
        tier=notes[0].tier if notes else None,
        steps=steps,
        unshared=unshared,
        ended=(max(mine, default=0), max(other, default=0)),
        parts=parts,
        metrics=_compare_metrics(ours, theirs, loaded or 0),
        notes=notes,
        series=ours,
        advice=advice_for(places[0][1]),
    )


def unseeded_generators(one: Sequence[Notes], other: Sequence[Notes]) -> list[str]:
    """The host's global generators whose states differ between two straight runs from the first step on."""
    names: list[str] = []
    for mine, theirs in zip(one, other, strict=False):
        step = min(mine.steps.keys() & theirs.steps.keys(), default=None)
        if step is not None:
            pairs = (mine.steps[step]["generators"], theirs.steps[step]["generators"])
            names += [name for name in ("python", "numpy", "torch") if pairs[0].get(name) != pairs[1].get(name)]
    return sorted(set(names))


def unrepeated_notes(one: Sequence[Notes], other: Sequence[Notes]) -> list[str]:
    """Generators and batches that straight runs do not share: where their states are equal, nothing rests on them."""
    names: set[str] = set()
    for mine, theirs in zip(one, other, strict=False):
        for step in mine.steps.keys() & theirs.steps.keys():
            here, there = mine.steps[step], theirs.steps[step]
            names |= {name for kind in ("strangers", "generators") for name in _unlike(here[kind], there[kind])}
            names |= {batches_of(name) for name in _unlike(here["batches"], there["batches"])}
    return sorted(names)


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [name for name in one if name in other and one[name] != other[name]]


def _counts(difference: Difference, unseeded: Collection[str]) -> bool:
    """Whether it is more than the state of a generator that nobody has seeded, now or when an epoch began."""
    own = difference.path.removeprefix(f"{RNG}.") if difference.component == RNG else ""
    if difference.component == DATA:
        own = difference.path.partition(".start.")[2]
    return own.partition(".")[0] not in unseeded


def _add(part: Part, step: int, differences: Sequence[Difference]) -> None:
    largest = functools.reduce(further, (difference.largest for difference in differences), None)
    part.growth[step] = 0.0 if largest is None else largest
    if differences:
        part.largest = further(part.largest, largest)
        if part.first_step is None:
            part.first_step, part.first_tensor = step, differences[0].path


def _apart(one: float, other: float) -> float:
    try:
        return abs(float(one) - float(other))
    except OverflowError:  # a whole number that no float holds
        return math.inf


def _compare_metrics(
    ours: Mapping[int, Mapping[str, Any]], theirs: Mapping[int, Mapping[str, Any]], after: int
) -> dict[str, Metric]:
    """Compare what was logged after a step, as it is written; what only one of the runs has logged differs."""
    metrics: dict[str, Metric] = {}
    for step in sorted(step for step in ours.keys() | theirs.keys() if step > after):
        one, two = ours.get(step, {}), theirs.get(step, {})
        for name in {**one, **two}:
            metric = metrics.setdefault(name, Metric(name))
            mine, other = one.get(name, _MISSING), two.get(name, _MISSING)
            if json.dumps(mine) == json.dumps(other):  # 1 is not 1.0, nor -0.0 0.0; a NaN is a NaN
                continue
            metric.first_step = step if metric.first_step is None else metric.first_step
            numbers = all(isinstance(value, (int, float)) for value in (mine, other))
            metric.largest = further(metric.largest, _apart(mine, other) if numbers else None)
    return metrics
