"""The course of an audit: straight twice, stopped, resumed from each tier, and resumed without each part."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable
from typing import Any

from easyckpt import catalog
from easyckpt.cli import output
from easyckpt.cli.audit.culprit import Culprit, culprit
from easyckpt.cli.audit.findings import Findings, find, unrepeated_notes, unseeded_generators
from easyckpt.cli.audit.notes import Notes, metrics_of, notes_of, typical_flush
from easyckpt.cli.audit.report import Audit
from easyckpt.cli.audit.runs import CommandFailed, Run, Runner
from easyckpt.contents import Opened
from easyckpt.errors import NotLoaded, UsageError
from easyckpt.saving.metrics import COMPONENT as METRICS

_SEED = "call torch.manual_seed(…), random.seed(…) and numpy.random.seed(…) before the model is built"
_NEVER_LOADED = (
    "it has called no load(), which a job that resumes needs: start = checkpointer.load() before the training loop, "
    "which begins at start.step"
)


class Tier(str, enum.Enum):
    """What is resumed from."""

    BOTH = "both"
    STORAGE = "storage"
    MEMORY = "memory"


class Course:
    """One audit, run by run; what it finds goes into the result."""

    def __init__(self, runner: Runner, result: Audit, keep: bool) -> None:
        self._runner, self._result, self._keep = runner, result, keep
        self._number, self._all = 0, 0
        self._notes: list[Notes] = []
        """Of the straight run."""

    def run(self, kill: bool, tier: Tier, parts: bool, chance: random.Random) -> dict[int, dict[str, Any]]:
        """All of it. Returns the metrics of the straight run. Raises CommandFailed, UsageError."""
        self._straight = self._runner.new("straight")
        self._go(self._straight, stop=self._result.steps)
        storage, _ = self._straight.place()
        self._notes, series = notes_of(storage), metrics_of(storage)
        self._check_straight()
        left_out = _components(self._straight) if parts else []
        self._all = 3 + (2 if tier == Tier.BOTH else 1) + len(left_out)
        if self._differs_from_itself():
            return series
        stopped = self._stop(kill, chance, typical_flush(storage))
        self._check_stopped(stopped)
        # The copies first: the run from memory changes the root.
        if tier != Tier.MEMORY:
            self._resume(self._runner.new("storage", after=stopped))
        for name in left_out:
            self._resume_without(name, stopped)
        if tier != Tier.STORAGE:
            self._resume(self._runner.new("memory", after=stopped, same=True))
        return series

    def _check_straight(self) -> None:
        """Whether what it has left is enough to be compared with."""
        if not self._notes:
            raise UsageError(f"the command has made no Checkpointer; see {self._straight.log}")
        newest = _newest(self._straight)
        if newest <= self._result.at:
            raise UsageError(
                f"the command ends after {newest} saved steps by itself: choose --at and --steps below that"
            )
        self._result.ended = newest

    def _check_stopped(self, stopped: Run) -> None:
        """Whether there is a step left to go on to: a program may save at steps of its own alone."""
        reached, ended = _newest(stopped), self._result.ended
        if reached >= ended:
            raise UsageError(
                f"the run that was to stop at step {self._result.at} has stopped at {reached}, where the straight run "
                f"ended ({ended}): the command saves at steps of its own. Choose --at and --steps so that a save of "
                "its lies between them"
            )

    def _differs_from_itself(self) -> bool:
        result, again = self._result, self._runner.new("straight-again")
        self._go(again, stop=result.steps)
        notes = notes_of(again.place()[0])
        result.unseeded = unseeded_generators(notes, self._notes)
        found = result.twice = self._find(again)
        if found.steps and not found.differing and not found.unshared:
            result.unrepeated = [name for name, metric in found.metrics.items() if not metric.equal]
            result.aside = [name for name in unrepeated_notes(notes, self._notes) if name not in result.unseeded]
            return False
        result.why = culprit(found, self._notes, unseeded=result.unseeded, resumed=False)
        if result.unseeded and ("torch" in result.unseeded or result.why is None or not result.why.by_stranger):
            names = ", ".join(result.unseeded)
            result.why = Culprit(
                f"the straight runs begin with other generators ({names}): nobody seeds them", None, 0, _SEED
            )
        return True

    def _stop(self, kill: bool, chance: random.Random, typical: float) -> Run:
        result, run = self._result, self._runner.new("stopped")
        if kill:
            self._announce(f"{run.name}, to be killed while it flushes step {result.at}")
            result.killed = self._runner.kill_in_flush(run, result.steps, typical, chance)
        else:
            self._go(run, stop=result.at, store=False)
        return run

    def _resume(self, run: Run) -> None:
        result, loads = self._result, _loads(run)
        try:
            self._go(run, stop=result.steps)
        except CommandFailed as error:
            if _loads(run) == loads and NotLoaded.__name__ in str(error):
                raise CommandFailed(f"{run.name}: {_NEVER_LOADED}\n{error}") from None
            raise
        found = self._find(run)
        why = culprit(found, self._notes, unseeded=[*result.unseeded, *result.aside], unrepeated=result.unrepeated)
        result.resumed.append((found, why))
        if found.tier not in (run.name, None):
            result.wrong_tier.append(
                f"{run.name} was not tried: the run that was to resume from there took {found.tier}"
            )

    def _resume_without(self, name: str, stopped: Run) -> None:
        run = self._runner.new(f"without-{name}", after=stopped)
        try:
            self._go(run, stop=self._result.steps, left_out=[name])
        except CommandFailed as error:  # which says what the part is worth, too
            self._result.failed_without[name] = str(error)
            if not self._keep:
                self._runner.remove(run)
        else:
            self._result.without.append(self._find(run))

    def _go(self, run: Run, *, stop: int, store: bool = True, left_out: Iterable[str] = ()) -> None:
        names = list(left_out)
        self._announce(f"{run.name}, to step {stop}")
        with output.working(f"{run.name}: {' '.join(self._result.command)}"):
            self._runner.go(run, stop=stop, store=store, left_out=names)

    def _announce(self, what: str) -> None:
        self._number += 1
        of_all = f" of {self._all}" if self._all else ""  # the first run tells how many parts there are
        output.say(f"audit: run {self._number}{of_all}: {what}")

    def _find(self, run: Run) -> Findings:
        with output.working(f"{run.name}: comparing"):
            found = find(run, self._straight, self._result.unseeded)
        if not self._keep:
            self._runner.remove(run)
        return found


def _newest(run: Run) -> int:
    return max((entry.step for entry in catalog.scan(*run.place()).committed()), default=0)


def _loads(run: Run) -> int:
    """How often a load was begun in the root of `run`."""
    return sum(notes.loads for notes in notes_of(run.place()[0]))


def _components(run: Run) -> list[str]:
    """The names of the state's components in the newest checkpoint of `run`."""
    storage, naming = run.place()
    with Opened(storage, catalog.scan(storage, naming).committed()[-1]) as newest:
        return [name for name in newest.components(0) if name != METRICS]
