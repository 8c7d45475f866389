"""``easyckpt doctor``: which guarantees hold on this machine and in this root, what was left behind, what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Annotated, Any

import typer

from easyckpt.cli import output
from easyckpt.cli.doctor import leftovers, machine, memory, storage
from easyckpt.cli.doctor.finding import GUARANTEES, Finding, verdicts
from easyckpt.cli.doctor.place import look_at
from easyckpt.cli.output import Answer, AsJson
from easyckpt.config_sources import resolve as resolve_settings
from easyckpt.errors import UsageError
from easyckpt.memory.place import memory_directory

_MARKS = {"ok": "ok", "warning": "WARNING", "bad": "BAD"}


def register(app: typer.Typer) -> None:
    """Add this family's command to `app`."""
    app.command("doctor")(output.command(doctor))


def doctor(  # noqa: PLR0917 - typer makes options of all but the first
    root: Annotated[
        str | None,
        typer.Argument(help="The root of a run, or where one is to be made (default: here).", show_default=False),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Remove from memory what nobody needs any more.")] = False,
    all_: Annotated[
        bool, typer.Option("--all", help="With --clean: also what a restart would go on from, and what is unclear.")
    ] = False,
    speed: Annotated[int, typer.Option(help="MB written and read for the speed; 0: none.", min=0)] = 256,
    memory_dir: Annotated[
        str | None, typer.Option(help="The run's memory_dir, if it sets one by argument.", show_default=False)
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also show each check that is ok.")] = False,
    as_json: AsJson = False,
) -> Answer:
    """Say which guarantees hold here, what was left in shared memory, and what to change.

    The file system is tried out in a private directory inside of ROOT, which is removed again; a running job is not
    disturbed (but for its share of the disk while the speed is measured). --clean removes the memory of dead jobs whose
    root has committed all that it holds, or is gone and the memory was not written to for a day (a younger root may
    have been moved only: --all); never what a live process owns, nor anything of other users.

    Exit codes: 0 all guarantees hold, warnings aside; 1 something is broken or unsafe; 2 bad input.

    Example: easyckpt doctor runs/exp1 --clean
    """
    if all_ and not clean:
        raise UsageError("--all goes with --clean")
    settings = resolve_settings({} if memory_dir is None else {"memory_dir": memory_dir}, None)
    directory, in_memory = memory_directory(settings.memory_dir)
    place = look_at(root)
    left = leftovers.look(directory, place, clean=clean, everything=all_)
    with output.working("looking at this machine"):
        checks = list(
            chain(
                memory.findings(directory, in_memory, place, settings.slots),
                storage.findings(place, speed * 1_000_000),
                machine.findings(),
            )
        )
    findings = [*(item.finding() for item in left), *leftovers.others(directory), *checks]
    guarantees = verdicts(findings)
    document = {
        "root": place.asked,
        "memory_dir": directory,
        "guarantees": {
            name: {"guarantee": GUARANTEES[name], "state": state} for name, (state, _) in guarantees.items()
        },
        "findings": [asdict(finding) for finding in findings],
        "left": [item.document() for item in left],
    }
    bad = any(finding.state == "bad" for finding in findings)
    return Answer(document, _views(findings, verbose=verbose), output.DAMAGED if bad else output.GOOD)


def _views(findings: Sequence[Finding], *, verbose: bool) -> list[Any]:
    """First what needs a look, with the advice; then the guarantees; last what is fine, for those who ask."""
    shown = [finding for finding in findings if finding.state != "ok" or finding.area == leftovers.AREA]
    fine = [finding for finding in findings if finding not in shown]
    advice = [
        f"{_MARKS[finding.state]}, {finding.area}, {finding.what}: {finding.advice}"
        for finding in shown
        if finding.state != "ok" and finding.advice
    ]
    guarantees = [(GUARANTEES[name], text) for name, (_, text) in verdicts(findings).items()]
    views = _tables(shown)
    if advice:
        views += [*advice, ""]
    views += [output.table(["guarantee", "here"], guarantees), ""]
    return [*views, *_tables(fine)] if verbose else [*views, f"{len(fine)} checks are ok; --verbose shows them"]


def _tables(findings: Sequence[Finding]) -> list[Any]:
    """One for each area."""
    views: list[Any] = []
    for area in dict.fromkeys(finding.area for finding in findings):
        rows = [
            (finding.what, finding.finding, _MARKS[finding.state], finding.meaning)
            for finding in findings
            if finding.area == area
        ]
        views += [output.table([area, "finding", "state", "what it means"], rows), ""]
    return views
