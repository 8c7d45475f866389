"""``easyckpt watch``: a live view of a running job, out of the files in its root and, on its host, its owner's lock."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from easyckpt.cli import output
from easyckpt.cli.output import Answer, AsJson
from easyckpt.cli.target import resolve
from easyckpt.cli.watch.looking import Watcher
from easyckpt.config import CheckpointConfig
from easyckpt.errors import UsageError

_ROWS = 16
#: An owner that was silent for longer than others wait for it may be gone.
_SILENT_SECONDS = CheckpointConfig().lease_timeout


def register(app: typer.Typer) -> None:
    """Add this family's command to `app`."""
    app.command("watch")(output.command(watch))


def watch(
    root: Annotated[str, typer.Argument(help="The root of a run.", show_default=False)],
    once: Annotated[bool, typer.Option("--once", help="Print one view and end.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    as_json: AsJson = False,
) -> Answer:
    """Watch a job: steps, snapshots, flushes, time held up, slots, the last commit, metrics, warnings.

    It reads the root's files (a job with events=False tells little), on any machine that sees them. Whether the owner
    lives is asked of its lock, which the job's own host alone can tell. It writes nothing and holds no lease. Where
    stdout is no terminal, or with --json, it prints one view, as with --once.

    Exit codes: 0 shown, also when ended by Ctrl-C; 1 the root's record is damaged; 2 bad input.

    Example: easyckpt watch runs/exp1
    """
    target = resolve(root)
    if target.is_one:
        raise UsageError(f"{root}: one checkpoint; watch takes the root of a run")
    target.record()
    target.scan()
    watcher = Watcher(target.storage, target.naming)
    document = watcher.look()
    if once or as_json or not sys.stdout.isatty():
        return Answer(document, _views(document))
    try:
        with Live(_together(_views(document)), console=Console(), auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(_together(_views(watcher.look())), refresh=True)
    except KeyboardInterrupt:
        return Answer(document, [])


def _together(views: Sequence[Table | str]) -> RenderableType:
    return Group(*(view if isinstance(view, Table) else output.text(view) for view in views))


def _views(document: dict[str, Any]) -> list[Table | str]:
    ranks = document["ranks"]
    views: list[Table | str] = [f"{document['root']}: {_owner(document['lease'])}"]
    if not document["counted_from_the_start"]:
        views.append("(counts are of the newest events only: there are more than are read at first)")
    views += ["", _rank_table(ranks)] if ranks else ["no events in it yet (or the job has set events=False)"]
    if len(ranks) > _ROWS:
        views.append(f"… and {len(ranks) - _ROWS} more ranks that are further on")
    views += ["", *_storage_lines(document), *_metrics_lines(document["metrics"])]
    return [*views, *_warning_lines(document["warnings"])]


def _owner(lease: dict[str, Any] | None) -> str:
    if lease is None:
        return "no job owns it now"
    if lease["pid"] is None:
        return "its lease cannot be read"
    owner, renewed = f"process {lease['pid']} on {lease['host']}", _ago(lease["renewed_age"])
    if lease["alive"] is False:
        return f"no job owns it now: {owner} is dead (it renewed its lease {renewed}); the next job starts at once"
    text = f"owned by {owner}, which renewed its lease {renewed}"
    if lease["alive"] is None and lease["renewed_age"] > _SILENT_SECONDS:
        text += f" by the clock there: it may be gone, which cannot be seen from {socket.gethostname()}"
    return text


def _may_be_owned(lease: dict[str, Any] | None) -> bool:
    return lease is not None and lease["alive"] is not False


def _rank_table(ranks: Sequence[dict[str, Any]]) -> Table:
    shown = sorted(ranks, key=lambda rank: -1 if rank["step"] is None else rank["step"])[:_ROWS]
    rows = []
    for rank in sorted(shown, key=lambda rank: int(rank["rank"])):
        snapshots, memory = rank["snapshots"], rank["memory"]
        slots = "-" if memory is None else f"{memory['sealed']}/{memory['slots']}"
        rows.append(
            (
                rank["rank"],
                _or_dash(rank["step"]),
                "-" if rank["steps_per_second"] is None else f"{rank['steps_per_second']:.2f}",
                f"{snapshots['sealed']}/{snapshots['skipped']}/{snapshots['discarded']}",
                _or_dash(snapshots["last_step"]),
                output.size(snapshots["bytes"]),
                f"{_milliseconds(rank['held_up']['recent_mean'])} (max {_milliseconds(rank['held_up']['recent_max'])})",
                slots if memory is None or memory["survives"] else f"{slots} private",
            )
        )
    columns = [
        "rank#",
        "step#",
        "steps/s#",
        "sealed/skipped/discarded#",
        "in memory#",
        "snapshot size#",
        "ms held up#",
        "slots#",
    ]
    return output.table(columns, rows)


def _storage_lines(document: dict[str, Any]) -> list[str]:
    lines = []
    if document["ranks"]:
        first = document["ranks"][0]
        flushes, started = first["flushes"], first["started"]
        counts = ", ".join(f"{flushes[name]} {name}" for name in ("committed", "failed", "skipped"))
        lines.append(f"flushes: {counts}; {_flushing(flushes['running'], document)}")
        if started is not None:
            origin = (
                "from nothing" if started["tier"] == "none" else f"at step {started['step']} from {started['tier']}"
            )
            lines.append(f"started: {output.moment(started['time'])}, {origin}")
        total = first["held_up"]["in_all_seconds"]
        if total is not None or _may_be_owned(document["lease"]):
            said = "not said yet" if total is None else f"{total:.2f} s"
            lines.append(f"held up in all: {said} (rank {first['rank']})")
    commit = document["last_commit"]
    if commit is not None:
        rate = "" if commit["bytes_per_second"] is None else f", {output.size(int(commit['bytes_per_second']))}/s"
        took = f"{output.size(commit['bytes'])} in {commit['seconds']:.2f} s"
        lines.append(f"last commit: step {commit['step']}, {_ago(commit['age'])}, {took}{rate}")
    checkpoints = document["checkpoints"]
    newest = checkpoints["newest"]
    lines.append(f"checkpoints: {checkpoints['count']}" + ("" if newest is None else f", newest: {_newest(newest)}"))
    return lines


def _flushing(running: dict[str, Any] | None, document: dict[str, Any]) -> str:
    """The flush that was begun last and has not ended, as far as the events tell."""
    if running is None:
        return "none running"
    newest = document["checkpoints"]["newest"]
    if _may_be_owned(document["lease"]):
        return f"step {running['step']} running for {running['seconds']:.1f} s"
    # A job that is killed may not have come to writing down its last commit.
    done = newest is not None and "problem" not in newest and newest["step"] >= running["step"]
    return f"step {running['step']} was {'committed' if done else 'under way'} when the job ended"


def _newest(newest: dict[str, Any]) -> str:
    what = newest["problem"] if "problem" in newest else output.size(newest["bytes"])
    return f"step {newest['step']}, {what}"


def _metrics_lines(metrics: dict[str, Any] | None) -> list[str]:
    if metrics is None:
        return []
    values = ", ".join(f"{name} {value}" for name, value in metrics.items() if name not in ("step", "time"))
    return [f"metrics of step {metrics.get('step')}: {values}"]


def _warning_lines(warnings: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for each in warnings:
        kind = "" if each["kind"] == "Warned" else f"{each['kind']}: "
        step = "" if each["step"] is None else f", step {each['step']}"
        lines.append(f"{_ago(each['age'])}, rank {each['rank']}{step}: {kind}{each['text']}")
    return ["", "warnings:", *lines] if lines else []


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)
