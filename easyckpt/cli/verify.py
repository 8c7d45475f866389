"""``easyckpt verify``: read every byte and say which file, tensor and chunk is bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from easyckpt import catalog, verification
from easyckpt.catalog import Entry
from easyckpt.cli import damage, output
from easyckpt.cli.output import Answer, AsJson
from easyckpt.cli.target import Target, resolve
from easyckpt.errors import DamagedCheckpoint, FormatError, NewerFormat, UsageError
from easyckpt.format import layout
from easyckpt.verification import Problem


def register(app: typer.Typer) -> None:
    """Add this family's command to `app`."""
    app.command("verify")(output.command(verify))


_WHAT = "A checkpoint root (all in it), ROOT@STEP, or one step directory."


@dataclass(frozen=True, slots=True)
class _Verdict:
    entry: Entry
    problems: list[Problem]
    unknown: bool = False
    """A newer version wrote it: neither good nor damaged."""

    @property
    def damaged(self) -> bool:
        return bool(self.problems) and not self.unknown

    def document(self) -> dict[str, Any]:
        return {
            "step": self.entry.step,
            "name": self.entry.name,
            "good": not self.problems,
            "bytes": self.entry.nbytes if self.entry.manifest else None,
            "problems": [
                {"file": p.file, "tensor": p.tensor, "chunk": p.chunk, "message": p.message} for p in self.problems
            ],
        }


def verify(
    checkpoint: Annotated[str, typer.Argument(metavar="ROOT[@STEP]", help=_WHAT, show_default=False)],
    all_: Annotated[bool, typer.Option("--all", help="Also the stale ones.")] = False,
    as_json: AsJson = False,
) -> Answer:
    """Check every byte of one checkpoint, or of all in a root; say which file, tensor and chunk is damaged.

    Exit codes: 0 all is as it was committed; 1 something is damaged; 2 bad input, or a checkpoint of a newer version.

    Example: easyckpt verify runs/exp1@5000
    """
    target = resolve(checkpoint)
    root_problem = _root_problem(target)
    entries = [target.pick()] if target.is_one else _all_entries(target, stale=all_)
    total = sum(entry.nbytes for entry in entries)
    with output.progress("verify", total) as count:
        verdicts = [_judge(target, entry, count) for entry in entries]
    if not target.is_one:  # a job that runs may have removed some since they were listed
        verdicts = [v for v in verdicts if not v.damaged or target.storage.exists(v.entry.name)]
    documents = [verdict.document() for verdict in verdicts]
    good = root_problem is None and all(document["good"] for document in documents)
    advice = _advice(target, verdicts)
    document = {
        "root": target.root,
        "good": good,
        "problem": root_problem,
        "checkpoints": documents,
        "advice": advice,
    }
    views = [] if root_problem is None else [root_problem]
    damaged = root_problem is not None or any(verdict.damaged for verdict in verdicts)
    code = output.GOOD if good else output.DAMAGED if damaged else output.BAD_INPUT
    return Answer(document, [*views, *_views(documents), *([] if advice is None else ["", advice])], code)


def _root_problem(target: Target) -> str | None:
    """What is damaged in the root's own record. A foreign or newer one is bad input and raises."""
    try:
        target.record()
    except DamagedCheckpoint as error:
        return str(error)
    return None


def _all_entries(target: Target, *, stale: bool) -> list[Entry]:
    kinds = ("committed", "stale") if stale else ("committed",)
    entries = [entry for entry in target.scan().entries if entry.kind in kinds]
    if not entries:
        raise UsageError(f"{target.root}: nothing to verify: no committed checkpoint in it")
    return entries


def _judge(target: Target, entry: Entry, count: Callable[[int], None]) -> _Verdict:
    if entry.manifest is None:
        try:
            catalog.read_manifest(target.storage, entry.name)
        except NewerFormat as error:
            if target.is_one:
                raise
            return _Verdict(entry, [_whole(str(error))], unknown=True)
        except (FormatError, OSError) as error:
            return _Verdict(entry, [_whole(str(error))])
    problems = verification.verify(target.storage, entry, on_bytes=count)
    if entry.problem is not None and not problems:
        problems = [_whole(entry.problem)]
    return _Verdict(entry, problems)


def _advice(target: Target, verdicts: list[_Verdict]) -> str | None:
    """What to do about what is damaged; None where nothing is."""
    bad = [verdict for verdict in verdicts if verdict.damaged]
    if not bad:
        return None
    if target.is_one:
        there = damage.instead_of(target, bad[0].entry)
    else:
        whole = [v.entry for v in verdicts if not v.problems and v.entry.kind == "committed"]
        there = f"whole: {damage.steps(whole)}" if whole else "no checkpoint in it is whole"
    return f"{there}. load() and restore() pass over what is damaged by themselves, unless step= asks for it"


def _whole(message: str) -> Problem:
    return Problem(file=layout.MANIFEST, tensor=None, chunk=None, message=message)


def _views(documents: list[dict[str, Any]]) -> list[Any]:
    rows = [
        (
            document["step"],
            document["name"],
            output.size(document["bytes"]),
            "good" if document["good"] else f"NOT GOOD ({len(document['problems'])} problem(s))",
        )
        for document in documents
    ]
    lines = [
        f"{document['name']}/{_where(problem)}: {problem['message']}"
        for document in documents
        for problem in document["problems"]
    ]
    return [output.table(["step#", "name", "size#", "state"], rows), *([""] if lines else []), *lines]


def _where(problem: dict[str, Any]) -> str:
    parts = [problem["file"]]
    if problem["tensor"] is not None:
        parts.append(f"tensor {problem['tensor']}")
    if problem["chunk"] is not None:
        parts.append(f"chunk {problem['chunk']}")
    return ", ".join(parts)
