"""What audited runs have left beside their checkpoints: notes of each step, and metrics."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from easyckpt.event_kinds import FlushCommitted
from easyckpt.format import layout
from easyckpt.storage.base import Storage

#: Of a line of metrics: what says when it was written, which is never the same twice.
_OWN = ("step", "time")


@dataclass(frozen=True, slots=True)
class Notes:
    """Of one rank, from its last load on."""

    loaded: int | None = None
    """The step that was restored; None: the program has called no load."""
    tier: str | None = None
    loads: int = 0
    """How many loads were begun, in earlier processes too."""
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Finished step -> what there was after it: see `easyckpt.auditing.Auditor.after`."""


def notes_of(storage: Storage) -> list[Notes]:
    """By rank; empty where the command has made no Checkpointer."""
    ranks: list[Notes] = []
    while storage.exists(layout.audit_file(len(ranks))):
        notes = Notes()
        for line in _lines(storage, layout.audit_file(len(ranks))):
            if "loading" in line:
                notes = replace(notes, loads=notes.loads + 1)
            elif "loaded" in line:
                notes = Notes(line["loaded"], line["tier"], notes.loads)
            else:
                step = int(line["step"])
                before = notes.steps.get(step, {}).get("batches", {})  # a step may be saved twice
                notes.steps[step] = {**line, "batches": {**before, **line["batches"]}}
        ranks.append(notes)
    return ranks


def metrics_of(storage: Storage) -> dict[int, dict[str, Any]]:
    """Step -> what was logged with it."""
    return {
        int(line["step"]): {name: value for name, value in line.items() if name not in _OWN}
        for line in _lines(storage, layout.METRICS)
    }


def batches_of(loader: str) -> str:
    """What the batches of a loader are called, where they stand beside generators."""
    return f"the batches of {loader}"


def typical_flush(storage: Storage) -> float:
    """Median seconds of rank 0's flushes."""
    kind = FlushCommitted.__name__
    seconds = [line["seconds"] for line in _lines(storage, layout.events_file(0)) if line.get("event") == kind]
    return statistics.median(seconds) if seconds else 0.0


def _lines(storage: Storage, path: str) -> list[dict[str, Any]]:
    if not storage.exists(path):
        return []
    lines = []
    for text in storage.read(path).splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:  # cut by a kill
            continue
    return lines
