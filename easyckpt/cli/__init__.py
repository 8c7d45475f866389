"""The ``easyckpt`` command: one file per command family, joined here.

Exit codes: 0 good; 1 damaged or different; 2 bad input; 3 nondeterministic (audit); 4 the command that was run failed.
Documents go to stdout, messages and progress to stderr.
"""

from __future__ import annotations

import sys

import typer

from easyckpt.cli import (
    audit,
    completion,
    copying,
    diff,
    doctor,
    export,
    housekeeping,
    inspect,
    output,
    rescue,
    stat,
    verify,
    watch,
)
from easyckpt.version import VERSION

app = typer.Typer(
    name="easyckpt",
    help="Look at, check, compare and look after easyckpt checkpoints, and prove that a job resumes exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _family in (
    inspect, watch, verify, diff, stat, export, housekeeping, copying, audit, doctor, rescue, completion,
):  # fmt: skip
    _family.register(app)


def _show_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"easyckpt {VERSION}\n")
        raise typer.Exit


@app.callback()
def _easyckpt(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """Look at, check, compare and look after easyckpt checkpoints, and prove that a job resumes exactly."""


def main() -> None:
    """Run the command line and end the process with its exit code."""
    output.make_streams_safe()
    app(complete_var=completion.VARIABLE)  # else it would be made of how the program was started
