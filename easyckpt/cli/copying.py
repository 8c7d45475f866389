"""``easyckpt cp``: one checkpoint into another root."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from easyckpt.cli import output
from easyckpt.cli.output import Answer, AsJson
from easyckpt.cli.target import TARGET_HELP, Target, resolve
from easyckpt.config_sources import resolve as resolve_settings
from easyckpt.errors import UsageError
from easyckpt.saving.transfer import copy_checkpoint
from easyckpt.storage.records_apart import place_of
from easyckpt.storage.walk import root_path


def register(app: typer.Typer) -> None:
    """Add this family's command to `app`."""
    app.command("cp")(output.command(cp))


def cp(
    checkpoint: Annotated[str, typer.Argument(metavar="ROOT[@STEP]", help=TARGET_HELP, show_default=False)],
    dest: Annotated[
        str,
        typer.Argument(help="A new or empty directory, or a root that holds copies of this run.", show_default=False),
    ],
    as_json: AsJson = False,
) -> Answer:
    """Copy one checkpoint (the newest valid one, unless a step is given) into another root, to go on from there.

    Every byte is compared with what was committed while it is copied, and read back from storage before the copy is
    made real. The new root is a run of its own that names this one as its parent.

    Exit codes: 0 copied; 1 the checkpoint is damaged; 2 bad input, such as a step that DEST holds already.

    Example: easyckpt cp runs/exp1@5000 archive/exp1
    """
    target = resolve(checkpoint)
    target.record()  # a foreign or newer root is refused, whatever lies in it
    entry = target.pick()
    settings = resolve_settings({})
    storage = place_of(target.naming, _destination(target, dest), direct_io=settings.direct_io)
    with output.progress("copy and verify", 2 * entry.nbytes) as count:
        copied = copy_checkpoint(
            target.storage, entry, storage, target.naming, settings, on_bytes=count, on_wait=output.say
        )
    document = {
        "root": storage.root,
        "step": copied.step,
        "path": copied.path,
        "bytes": copied.bytes,
        "run": copied.run,
        "parent": copied.parent,
    }
    line = f"step {copied.step}, {output.size(copied.bytes)}, copied and verified: {copied.path}"
    return Answer(document, [line, f"run {copied.run}, which goes on from {copied.parent}"])


def _destination(target: Target, dest: str) -> str:
    """The root that the user means by `dest`."""
    path = os.path.realpath(root_path(dest))
    if target.naming.parse_committed(os.path.basename(path)) is not None:
        raise UsageError(f"{dest}: the name of one checkpoint; give the root that it is to be in")
    source = os.path.realpath(target.root)
    if os.path.commonpath([path, source]) == source:
        raise UsageError(f"{dest} lies in {target.root}, which the copy comes from; give a directory beside it")
    return path
