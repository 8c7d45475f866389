"""``easyckpt rescue``: commit the whole snapshots that dead processes of a run left in shared memory."""

from __future__ import annotations

from typing import Annotated

import typer

from easyckpt.cli import output
from easyckpt.cli.output import Answer, AsJson
from easyckpt.cli.target import resolve
from easyckpt.config_sources import resolve as resolve_settings
from easyckpt.errors import UsageError
from easyckpt.saving import rescue as saving_rescue


def register(app: typer.Typer) -> None:
    """Add this family's command to `app`."""
    app.command("rescue")(output.command(rescue))


def rescue(
    root: Annotated[str, typer.Argument(help="The checkpoint root of the run that died.", show_default=False)],
    memory_dir: Annotated[
        str | None,
        typer.Option(help="The run's memory_dir, if it set one by argument.", show_default=False),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="The run's YAML file with settings, if EASYCKPT_CONFIG does not name it.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> Answer:
    """Commit whole snapshots that dead processes left in this machine's shared memory.

    Settings (memory_dir, lease_timeout) are found as the run found them: options, EASYCKPT_<FIELD>, YAML, default.

    Exit codes: 0 committed, or there was nothing to commit; 1 damaged; 2 bad input, or a job is using the root.

    Example: easyckpt rescue runs/exp1
    """
    target = resolve(root)
    settings = resolve_settings({} if memory_dir is None else {"memory_dir": memory_dir}, config)
    if target.is_one:
        raise UsageError(f"{root}: one checkpoint; rescue takes the root of a run")
    target.record()  # foreign, newer or damaged: said before anything is done
    if target.naming.shared:
        raise UsageError(
            f"{root}: its checkpoints hold files of another framework, which rescue cannot make; start the training "
            "again with resume_from_checkpoint=True: it goes on from what is in memory"
        )
    target.scan()
    with output.working("committing what is left in memory"):
        rescued = saving_rescue.rescue(target.root, settings, target.naming, on_wait=output.say)
    rows = [{"step": item.step, "path": item.path, "bytes": item.bytes} for item in rescued]
    document = {"root": target.root, "rescued": rows}
    if not rows:
        return Answer(document, [f"{target.root}: no whole snapshot of this run in memory that is not committed"])
    table = output.table(["step#", "size#", "committed as"], [(r.step, output.size(r.bytes), r.path) for r in rescued])
    return Answer(document, [table])
