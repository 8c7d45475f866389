"""How one run differs from the straight one: every stored step, and every logged number."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from easyckpt import catalog, comparison
from easyckpt.cli.audit.notes import Notes, metrics_of, notes_of
from easyckpt.cli.audit.runs import Run
from easyckpt.comparison import Difference
from easyckpt.engine import DATA
from easyckpt.format.layout import NativeNaming
from easyckpt.saving.metrics import COMPONENT as METRICS
from easyckpt.state.rng import RNG
from easyckpt.storage.local import LocalStorage

_MISSING: Any = ["not logged"]
#: What people call easyckpt's own parts of the state.
SPOKEN = {RNG: "rng (the global generators)", DATA: "data (what ckpt.batches has handed out)"}


@dataclass(slots=True)
class Part:
    """One component over all compared steps."""

    component: str
    tensors: int = 0
    largest: float | None = 0.0
    """Largest absolute difference; None where something differs that is no number."""
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
    largest: float | None = 0.0

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
    """Steps that only one of the runs has stored, though both came past them."""
    parts: dict[str, Part]
    metrics: dict[str, Metric]
    notes: list[Notes]
    series: dict[int, dict[str, Any]]
    """The run's own metrics."""

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
    storages = [LocalStorage(one.root) for one in (run, straight)]
    notes = notes_of(storages[0])
    loaded = notes[0].loaded if notes else None
    mine, other = ({entry.step: entry for entry in catalog.scan(s, NativeNaming()).committed()} for s in storages)
    steps = [step for step in sorted(mine.keys() & other.keys()) if step > (loaded or 0)]
    unshared = [step for step in sorted(mine.keys() ^ other.keys()) if steps and steps[0] < step < steps[-1]]
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
        parts=parts,
        metrics=_compare_metrics(ours, theirs, loaded or 0),
        notes=notes,
        series=ours,
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


def unrepeated_strangers(one: Sequence[Notes], other: Sequence[Notes]) -> list[str]:
    """Generators outside of the state that differ between two straight runs: the training does not depend on them."""
    names: set[str] = set()
    for mine, theirs in zip(one, other, strict=False):
        for step in mine.steps.keys() & theirs.steps.keys():
            here, there = mine.steps[step]["strangers"], theirs.steps[step]["strangers"]
            names |= {name for name in here.keys() & there.keys() if here[name] != there[name]}
    return sorted(names)


def _counts(difference: Difference, unseeded: Collection[str]) -> bool:
    """Whether it is more than the state of a generator that nobody has seeded, now or when an epoch began."""
    own = difference.path.removeprefix(f"{RNG}.") if difference.component == RNG else ""
    if difference.component == DATA:
        own = difference.path.partition(".start.")[2]
    return own.partition(".")[0] not in unseeded


def _add(part: Part, step: int, differences: Sequence[Difference]) -> None:
    largest = _largest(difference.largest for difference in differences)
    part.growth[step] = 0.0 if largest is None else largest
    if differences:
        part.largest = _largest([part.largest, largest])
        if part.first_step is None:
            part.first_step, part.first_tensor = step, differences[0].path


def _largest(values: Iterable[float | None]) -> float | None:
    """None where one of them is no number's matter; NaN is larger than all."""
    known = list(values)
    if any(value is None for value in known):
        return None
    numbers = [value for value in known if value is not None]
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=0.0)


def _compare_metrics(
    ours: Mapping[int, Mapping[str, Any]], theirs: Mapping[int, Mapping[str, Any]], after: int
) -> dict[str, Metric]:
    """Compare what was logged after a step, as it is written; what only one of the runs has logged differs."""
    metrics: dict[str, Metric] = {}
    last = min(max(ours, default=0), max(theirs, default=0))
    for step in sorted(step for step in ours.keys() | theirs.keys() if after < step <= last):
        one, two = ours.get(step, {}), theirs.get(step, {})
        for name in one.keys() | two.keys():
            metric = metrics.setdefault(name, Metric(name))
            mine, other = one.get(name, _MISSING), two.get(name, _MISSING)
            if json.dumps(mine) == json.dumps(other):  # 1 is not 1.0, nor -0.0 0.0; a NaN is a NaN
                continue
            metric.first_step = step if metric.first_step is None else metric.first_step
            numbers = all(isinstance(value, (int, float)) for value in (mine, other))
            metric.largest = _largest([metric.largest, abs(mine - other) if numbers else None])
    return metrics
