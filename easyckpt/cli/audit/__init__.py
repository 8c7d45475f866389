"""``easyckpt audit``: proves on a user's own command that stopping and resuming change nothing."""

from __future__ import annotations

import json
import math
import os
import random
from typing import Annotated, Any

import typer

from easyckpt.cli import output
from easyckpt.cli.audit import plots, report
from easyckpt.cli.audit.course import Course, Tier
from easyckpt.cli.audit.report import Audit
from easyckpt.cli.audit.runs import CommandFailed, Runner, left_by_a_failed_command
from easyckpt.cli.output import Answer, AsJson
from easyckpt.errors import EasyckptError, UsageError
from easyckpt.storage.local import LocalStorage

#: Stored steps of a straight run, at least, where nothing else is asked for.
STORED = 12
CODES = {"exact": output.GOOD, "different": output.DAMAGED, "nondeterministic": output.NONDETERMINISTIC}


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
    every: Annotated[
        int | None, typer.Option(help="Store and compare every so many steps; by itself a dozen times.", min=1)
    ] = None,
    out: Annotated[str, typer.Option(help="A new directory for the report.")] = "easyckpt-audit",
    tier: Annotated[Tier, typer.Option(help="Resume from this tier only.")] = Tier.BOTH,
    parts: Annotated[bool, typer.Option(help="Also try what leaving out each part does.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoints of all runs.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of the moment of --kill.")] = None,
    as_json: AsJson = False,
) -> Answer:
    """Run a training command straight and stopped-and-resumed, and compare to the bit.

    The command is run as it is, four to five times and once more for each part of the state, in roots of its own:
    what the script passes as root and intervals is not used. It must call load() and save_if_needed(step) or save(),
    and go on beyond --at. Choose numbers that cover an epoch's end and a change of the learning rate, and once --at an
    epoch's end.

    Exit codes: 0 identical; 1 the resumed run differs, and the report names the culprit; 2 bad input; 3 two straight
    runs differ already; 4 the command failed.

    Example: easyckpt audit --steps 60 --at 30 -- python train.py
    """
    every = _stored_every(steps, at, every, kill)
    out = os.path.abspath(out)
    if os.path.isdir(out) and os.listdir(out) and not left_by_a_failed_command(out):
        raise UsageError(f"{out}: is not empty; name a new directory by --out")
    result = Audit(command=list(command), steps=steps, at=at, every=every)
    runner = Runner(command, out, at=at, every=every)
    try:
        series = Course(runner, result, keep).run(kill, tier, parts, random.Random(seed))  # noqa: S311
    except CommandFailed as error:
        return Answer({"verdict": "failed", "message": str(error)}, str(error).splitlines(), output.COMMAND_FAILED)
    finally:
        runner.close(keep=keep)
    if result.wrong_tier and tier != Tier.BOTH:
        raise UsageError(result.wrong_tier[0])
    try:
        _write(out, result, series)
        runner.forget_failure()
        where = f"the report is {os.path.join(out, 'report.md')}"
    except (EasyckptError, OSError) as error:  # the verdict is worth more
        where = f"the report could not be written: {error}"
    views = [*report.views(result), where]
    return Answer(report.document(result), views, CODES[result.verdict])


def _stored_every(steps: int, at: int, every: int | None, kill: bool) -> int:
    """The interval of storage. Raises UsageError where the numbers do not go together."""
    if at >= steps:
        raise UsageError(f"--at {at}: must be below --steps {steps}")
    every = every or _interval(steps, at, at // 2 if kill else at)
    if kill and (at % every or at < 2 * every):
        raise UsageError(
            f"--every {every}: must divide --at {at} and be at most half of it, so that the flush there can be killed "
            "with a checkpoint before it"
        )
    return every


def _interval(steps: int, at: int, most: int) -> int:
    """The largest divisor of both, up to `most`, that stores often enough, so that every run stores where it stops."""
    common = math.gcd(steps, at)
    return max(n for n in range(1, common + 1) if common % n == 0 and (n == 1 or (n <= most and steps // n >= STORED)))


def _write(out: str, result: Audit, series: dict[int, dict[str, Any]]) -> None:
    storage = LocalStorage(out)
    others = [*([result.twice] if result.twice else []), *(found for found, _ in result.resumed), *result.without]
    # The verdict first: hours of runs are in it, and a picture may fail.
    storage.replace("report.json", (json.dumps(output.plain(report.document(result)), indent=2) + "\n").encode())
    storage.replace("report.md", report.page(result, None).encode())
    try:
        picture = plots.picture(series, others, plots.main_metric(series))
    except Exception as error:  # noqa: BLE001 - whatever a name or a number does to it
        output.say(f"audit: no picture: {type(error).__name__}: {error}")
        return
    if picture is None:
        output.say(plots.ADVICE)
        return
    storage.replace("report.png", picture)
    storage.replace("report.md", report.page(result, "report.png").encode())
