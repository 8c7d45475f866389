"""``easyckpt prune``, ``pin`` and ``unpin``: which checkpoints stay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import typer

from easyckpt import catalog
from easyckpt.catalog import Catalog
from easyckpt.cli import output
from easyckpt.cli.output import Answer, AsJson
from easyckpt.cli.target import Target, resolve
from easyckpt.cli.trainers_best import trainers_best
from easyckpt.config_sources import resolve as resolve_settings
from easyckpt.errors import UsageError
from easyckpt.format.manifest import RootRecord
from easyckpt.saving import pins
from easyckpt.saving.line import new_root
from easyckpt.saving.owning import owned_root
from easyckpt.saving.policy import Policy, Verdict, decide, measure
from easyckpt.saving.retention import remove

STEP_HELP = "ROOT@STEP, or one step directory."


def register(app: typer.Typer) -> None:
    """Add this family's commands to `app`."""
    app.command("prune")(output.command(prune))
    app.command("pin")(output.command(pin))
    app.command("unpin")(output.command(unpin))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to become of a root, as it was looked at."""

    verdicts: list[Verdict]
    found: Catalog

    @property
    def going(self) -> list[catalog.Entry]:
        return [verdict.entry for verdict in self.verdicts if verdict.goes]


def prune(
    root: Annotated[str, typer.Argument(help="A checkpoint root that no job is using.", show_default=False)],
    *,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="How many of the newest stay. Required, but for --stale alone.", show_default=False),
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Steps that are a multiple of this stay too.", show_default=False)
    ] = None,
    keep_best: Annotated[int, typer.Option(min=0, help="How many with the best --metric stay too.")] = 0,
    metric: Annotated[
        str | None, typer.Option(help="Name under which training logged it (`easyckpt show`).", show_default=False)
    ] = None,
    mode: Annotated[Literal["min", "max"], typer.Option(help="Whether the lowest or the highest is best.")] = "min",
    stale: Annotated[bool, typer.Option("--stale", help="Remove what a load of an older step has set aside.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    memory_dir: Annotated[
        str | None, typer.Option(help="The run's memory_dir, if it set one by argument.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> Answer:
    """Remove old checkpoints: all but the newest, every K-th, the best, and what is pinned.

    A checkpoint that one of the rules keeps stays. So does the newest valid one, whatever the numbers say (its manifest
    and the sizes of its files are right; `easyckpt verify` reads them). While a job uses the root this refuses: the job
    rotates by itself (max_ckpt_num, keep_every, keep_best). In the output directory of a wrapped Trainer the checkpoint
    that its newest trainer_state.json names as the best stays too, and counts as one of the newest, as it does for the
    Trainer itself.

    Exit codes: 0 good; 1 the root's record is damaged; 2 bad input, or a job is using the root.

    Example: easyckpt prune runs/exp1 --keep 3 --keep-every 1000 --dry-run
    """
    target = resolve(root)
    if target.is_one:
        raise UsageError(f"{root}: one checkpoint; prune takes the root of a run")
    policy = _policy(keep, keep_every, keep_best, metric, mode, stale=stale)
    settings = resolve_settings({} if memory_dir is None else {"memory_dir": memory_dir})
    plan = _plan(target, policy, stale=stale)
    if dry_run:
        return _answer(target, plan, plan.going, dry_run=True)
    with output.working("pruning"), owned_root(target.storage, _record(target).run, settings, output.say) as check:
        plan = _plan(target, policy, stale=stale)  # again: a job may have been there until now
        trash = plan.found.of_kind("trash")
        removed = remove(target.storage, target.naming, plan.going, trash=trash, check_lease=check)
    return _answer(target, plan, removed, dry_run=False)


def _policy(
    keep: int | None,
    every: int | None,
    best: int,
    metric: str | None,
    mode: Literal["min", "max"],
    *,
    stale: bool,
) -> Policy:
    if keep is None and (every is not None or best or not stale):
        raise UsageError("--keep is missing: how many of the newest checkpoints stay")
    if (best > 0) != (metric is not None):
        raise UsageError("--keep-best and --metric belong together: how many stay, and what is best")
    return Policy(newest=keep, every=every, best=best, metric=metric, mode=mode)


def _record(target: Target) -> RootRecord:
    """The root's record; where there are only copies of checkpoints, the one that a job would begin with."""
    return target.record() or new_root(target.storage, target.naming)


def _plan(target: Target, policy: Policy, *, stale: bool) -> _Plan:
    found, record = target.scan(), _record(target)
    if target.naming.shared and (best := trainers_best(target.storage, target.naming, record, found)) is not None:
        policy = replace(policy, chosen=(best,))
    verdicts = decide(record, found, policy, pinned=catalog.pinned_steps(target.storage), stale=stale)
    if policy.metric is not None and not any(measure(v.entry, policy.metric) is not None for v in verdicts):
        names = {str(name) for v in verdicts if v.entry.manifest for name in v.entry.manifest.metrics}
        there = ", ".join(sorted(names)) or "none at all"
        raise UsageError(f"{target.root}: no checkpoint has a number under --metric {policy.metric}; there is {there}")
    return _Plan(verdicts, found)


_WORDS = {
    "newest": "newest",
    "every": "every K-th",
    "best": "best",
    "chosen": "the Trainer's best",
    "pinned": "pinned",
    "held": "being read",
    "not valid": "not valid, see `easyckpt verify`",
    "other line": "of another line of training",
    "set aside": "set aside by a load (--stale removes it)",
    "replaced": "set aside by a fallback, replaced since",
    "stale": "set aside by a load",
    "excess": "kept by no rule",
}


def _answer(target: Target, plan: _Plan, removed: Sequence[catalog.Entry], *, dry_run: bool) -> Answer:
    gone: Collection[str] = {entry.name for entry in removed}
    rows = [_row(verdict, verdict.entry.name in gone) for verdict in plan.verdicts]
    freed = sum(entry.nbytes for entry in removed)
    document = {"root": target.root, "dry_run": dry_run, "freed_bytes": freed, "checkpoints": rows}
    words = "would go" if dry_run else "removed"
    cells = [
        (
            row["step"],
            output.size(row["bytes"]),
            words if row["removed"] else "stays",
            ", ".join(_WORDS[reason] for reason in row["reasons"]),
        )
        for row in rows
    ]
    total = f"{target.root}: {len(removed)} of {len(rows)} {words}, {output.size(freed)}"
    return Answer(document, [output.table(["step#", "size#", "what", "why"], cells), "", total] if rows else [total])


def _row(verdict: Verdict, removed: bool) -> dict[str, Any]:
    entry = verdict.entry
    # What was to go and is still there was pinned at this very moment.
    reasons = ["pinned"] if verdict.goes and not removed else list(verdict.reasons)
    return {
        "step": entry.step,
        "name": entry.name,
        "kind": entry.kind,
        "bytes": entry.nbytes if entry.manifest else None,
        "removed": removed,
        "reasons": reasons,
    }


def pin(
    checkpoint: Annotated[str, typer.Argument(metavar="ROOT@STEP", help=STEP_HELP, show_default=False)],
    as_json: AsJson = False,
) -> Answer:
    """Keep one checkpoint from ever being removed by rotation or prune, also beside a running job.

    Exit codes: 0 it is pinned; 1 the checkpoint is not valid; 2 bad input, such as a step that is not committed.

    Example: easyckpt pin runs/exp1@5000
    """
    target, step = _one(checkpoint)
    new = pins.pin(target.storage, target.naming, step)
    line = f"{target.root}: step {step} is pinned" + ("" if new else " already")
    return Answer({"root": target.root, "step": step, "pinned": True, "changed": new}, [line])


def unpin(
    checkpoint: Annotated[str, typer.Argument(metavar="ROOT@STEP", help=STEP_HELP, show_default=False)],
    as_json: AsJson = False,
) -> Answer:
    """Leave a pinned checkpoint to rotation again.

    Exit codes: 0 it is not pinned (any more); 2 bad input.

    Example: easyckpt unpin runs/exp1@5000
    """
    target, step = _one(checkpoint)
    changed = pins.unpin(target.storage, step)
    line = f"{target.root}: step {step} is not pinned" + (" any more" if changed else "")
    return Answer({"root": target.root, "step": step, "pinned": False, "changed": changed}, [line])


def _one(checkpoint: str) -> tuple[Target, int]:
    """The root, and the step in it that was named."""
    target = resolve(checkpoint)
    target.record()
    target.scan()  # what is no root of ours is refused
    step = target.step if target.name is None else target.naming.parse_committed(target.name)
    if step is None:
        raise UsageError(f"{checkpoint}: which step? Give ROOT@STEP")
    return target, step
