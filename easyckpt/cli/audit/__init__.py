"""``easyckpt audit``: proves on a user's own command that stopping and resuming change nothing."""

from __future__ import annotations

import enum
import json
import math
import os
import random
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from easyckpt import catalog
from easyckpt.cli import output
from easyckpt.cli.audit import plots, report
from easyckpt.cli.audit.culprit import Culprit, culprit
from easyckpt.cli.audit.findings import Findings, find, unseeded_generators
from easyckpt.cli.audit.notes import metrics_of, notes_of, typical_flush
from easyckpt.cli.audit.report import Audit
from easyckpt.cli.audit.runs import CommandFailed, Run, Runner
from easyckpt.cli.output import Answer, AsJson
from easyckpt.errors import UsageError
from easyckpt.format import layout
from easyckpt.format.layout import NativeNaming
from easyckpt.format.manifest import Index
from easyckpt.saving.metrics import COMPONENT as METRICS
from easyckpt.storage.local import LocalStorage

#: Stored steps of a straight run, at least, where nothing else is asked for.
STORED = 12
CODES = {"exact": output.GOOD, "different": output.DAMAGED, "nondeterministic": output.NONDETERMINISTIC}


class Tier(str, enum.Enum):
    """What is resumed from."""

    BOTH = "both"
    STORAGE = "storage"
    MEMORY = "memory"


def register(app: typer.Typer) -> None:
    """Add this family's command to `app`."""
    app.command("audit", context_settings={"ignore_unknown_options": True})(output.command(audit))


def audit(  # noqa: PLR0917 - typer makes options of all but the first
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD...", help="Any training command.", show_default=False)
    ],
    steps: Annotated[int, typer.Option(help="Finished steps of a whole run.", min=2)] = 60,
    at: Annotated[int, typer.Option(help="Finished steps after which it is stopped.", min=1)] = 30,
    kill: Annotated[bool, typer.Option("--kill", help="Stop it by SIGKILL in the middle of a flush.")] = False,
    every: Annotated[int | None, typer.Option(help="Store and compare every so many steps.", min=1)] = None,
    out: Annotated[str, typer.Option(help="A new directory for the report.")] = "easyckpt-audit",
    tier: Annotated[Tier, typer.Option(help="Resume from this tier only.")] = Tier.BOTH,
    parts: Annotated[bool, typer.Option(help="Also try what leaving out each part does.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoints of all runs.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of the moment of --kill.")] = None,
    as_json: AsJson = False,
) -> Answer:
    """Run a training command straight and stopped-and-resumed, and compare to the bit.

    Exit code 0: identical. 1: the resumed run differs, and the report names the culprit. 2: bad input. 3: two straight
    runs differ already. 4: the command failed. Example: easyckpt audit --steps 60 --at 30 -- python train.py
    """
    if at >= steps:
        raise UsageError(f"--at {at}: must be below --steps {steps}")
    every = every or _interval(steps, at, at // 2 if kill else at)
    if kill and (at % every or at < 2 * every):
        raise UsageError(
            f"--every {every}: must divide --at {at} and be at most half of it, so that the flush there can be killed "
            "with a checkpoint before it"
        )
    out = os.path.abspath(out)
    if os.path.isdir(out) and set(os.listdir(out)) - {"logs"}:  # (those of a command that failed)
        raise UsageError(f"{out}: is not empty; name a new directory by --out")
    result = Audit(command=list(command), steps=steps, at=at, every=every)
    with output.ended_tidily():
        runner = Runner(command, out, at=at, every=every)
        try:
            series = _Auditing(runner, result, keep).run(kill, tier, parts, random.Random(seed))  # noqa: S311
        except CommandFailed as error:
            return Answer({"verdict": "failed", "message": str(error)}, str(error).splitlines(), output.COMMAND_FAILED)
        finally:
            runner.close(keep=keep)
    if result.wrong_tier and tier != Tier.BOTH:
        raise UsageError(result.wrong_tier[0])
    _write(out, result, series)
    views = [*report.views(result), f"the report is {os.path.join(out, 'report.md')}"]
    return Answer(report.document(result), views, CODES[result.verdict])


def _interval(steps: int, at: int, most: int) -> int:
    """The largest divisor of both, up to `most`, that stores often enough, so that every run stores where it stops."""
    common = math.gcd(steps, at)
    return max(n for n in range(1, common + 1) if common % n == 0 and (n == 1 or (n <= most and steps // n >= STORED)))


class _Auditing:
    """One audit, run by run."""

    def __init__(self, runner: Runner, result: Audit, keep: bool) -> None:
        self._runner, self._result, self._keep = runner, result, keep

    def run(self, kill: bool, tier: Tier, parts: bool, chance: random.Random) -> dict[int, dict[str, Any]]:
        """Fill the result. Returns the metrics of the straight run."""
        result, runner = self._result, self._runner
        self._straight = runner.new("straight")
        self._go(self._straight, stop=result.steps)
        storage = LocalStorage(self._straight.root)
        self._notes, series = notes_of(storage), metrics_of(storage)
        if not self._notes:
            raise UsageError(f"the command has made no Checkpointer; see {self._straight.log}")
        newest = max((entry.step for entry in catalog.scan(storage, NativeNaming()).committed()), default=0)
        if newest <= result.at:
            raise UsageError(
                f"the command ends after {newest} saved steps by itself: choose --at and --steps below that"
            )
        result.ended = newest
        if self._differs_from_itself():
            return series
        stopped = self._stop(kill, chance, typical_flush(storage))
        left_out = _components(self._straight) if parts else []
        # The copies first: the run from memory changes the root.
        runs: list[tuple[Run, tuple[str, ...]]] = []
        if tier != Tier.MEMORY:
            runs.append((runner.new("storage", after=stopped), ()))
        runs += [(runner.new(f"without-{name}", after=stopped), (name,)) for name in left_out]
        if tier != Tier.STORAGE:
            runs.append((runner.new("memory", after=stopped, same=True), ()))
        for run, names in runs:
            self._go(run, stop=result.steps, left_out=names)
            found = self._find(run)
            if names:
                result.without.append(found)
            else:
                self._judge(found)
        return series

    def _differs_from_itself(self) -> bool:
        result, again = self._result, self._runner.new("straight-again")
        self._go(again, stop=result.steps)
        result.unseeded = unseeded_generators(notes_of(LocalStorage(again.root)), self._notes)
        found = result.twice = self._find(again)
        if found.steps and not found.differing and not found.unshared:
            result.unrepeated = [name for name, metric in found.metrics.items() if not metric.equal]
            return False
        if "torch" in result.unseeded:
            names = ", ".join(result.unseeded)
            advice = "call torch.manual_seed(…), random.seed(…) and numpy.random.seed(…) before the model is built"
            result.why = Culprit(
                f"the straight runs begin with other generators ({names}): nobody seeds them", None, 0, advice
            )
        else:
            result.why = culprit(found, self._notes, unseeded=result.unseeded, resumed=False)
        return True

    def _stop(self, kill: bool, chance: random.Random, typical: float) -> Run:
        result, run = self._result, self._runner.new("stopped")
        if kill:
            output.say(f"audit: {run.name}, to be killed while it flushes step {result.at}")
            result.killed = self._runner.kill_in_flush(run, result.steps, typical, chance)
        else:
            self._go(run, stop=result.at, store=False)
        return run

    def _judge(self, found: Findings) -> None:
        result, wanted = self._result, found.name
        why = culprit(found, self._notes, unseeded=result.unseeded, unrepeated=result.unrepeated)
        result.resumed.append((found, why))
        if found.tier not in (wanted, None):
            result.wrong_tier.append(f"{wanted} was not tried: the run that was to resume from there took {found.tier}")

    def _go(self, run: Run, *, stop: int, store: bool = True, left_out: Iterable[str] = ()) -> None:
        names = list(left_out)
        output.say(f"audit: {run.name}, to step {stop}")
        with output.working(f"{run.name}: {' '.join(self._result.command)}"):
            self._runner.go(run, stop=stop, store=store, left_out=names)

    def _find(self, run: Run) -> Findings:
        with output.working(f"{run.name}: comparing"):
            found = find(run, self._straight, self._result.unseeded)
        if not self._keep:
            self._runner.remove(run)
        return found


def _components(run: Run) -> list[str]:
    """The names of the state's components in the newest checkpoint of `run`."""
    storage = LocalStorage(run.root)
    entry = catalog.scan(storage, NativeNaming()).committed()[-1]
    index = Index.from_bytes(storage.read(f"{entry.name}/{layout.index_file(0)}"))
    trees = index.layout.trees
    return [str(name) for name in (trees if isinstance(trees, dict) else ()) if name != METRICS]


def _write(out: str, result: Audit, series: dict[int, dict[str, Any]]) -> None:
    storage = LocalStorage(out)
    others = [*([result.twice] if result.twice else []), *(found for found, _ in result.resumed), *result.without]
    picture = plots.picture(series, others, plots.main_metric(series))
    if picture is None:
        output.say(plots.ADVICE)
    else:
        storage.replace("report.png", picture)
    storage.replace("report.json", (json.dumps(output.plain(report.document(result)), indent=2) + "\n").encode())
    storage.replace("report.md", report.page(result, "report.png" if picture else None).encode())
