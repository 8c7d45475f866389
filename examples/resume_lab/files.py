"""The files of the lab: their names, and how they are written so that a kill leaves the old file or the new one.

Each is written whole under another name, made durable, and then renamed. easyckpt's storage does that.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from easyckpt.format import layout
from easyckpt.storage.local import LocalStorage

RESUME = "resume.pth"
STRAIGHT, RESUMED, NO_OPTIM, NO_SKIP = "straight", "resumed", "noopt", "noskip"  # the runs that go to the end
LOGGED = (STRAIGHT, RESUMED)
HALF = "straight_fp16.pth"
HALF_JSON, OPTIM_JSON, REPORT = "fp16.json", "optim.json", "report.md"
ALL = (
    *(RESUME, HALF, HALF_JSON, OPTIM_JSON, REPORT),
    *(f"{run}.pth" for run in (STRAIGHT, RESUMED, NO_OPTIM, NO_SKIP)),
    *(f"{run}_log.csv" for run in LOGGED),
)


def prepare(out: Path) -> None:
    """Make the folder, and remove what a killed run has left half-written in it."""
    storage = LocalStorage(out)
    storage.makedirs("")
    for name in storage.listdir(""):
        if layout.is_temp_file(name) and name.startswith(tuple(f".{ours}." for ours in ALL)):
            storage.remove(name)


def write_text(out: Path, name: str, text: str) -> None:
    """Write `text` as UTF-8."""
    LocalStorage(out).replace(name, text.encode())


def write_json(out: Path, name: str, fields: Mapping[str, float]) -> None:
    """Write numbers with their names."""
    write_text(out, name, json.dumps(fields, indent=2) + "\n")


def write_losses(out: Path, run: str, first_step: int, losses: Sequence[float]) -> None:
    """Write the training loss of each step, counted from 1."""
    lines = [f"{step},{loss:.6f}\n" for step, loss in enumerate(losses, first_step)]
    write_text(out, f"{run}_log.csv", "".join(["step,train_loss\n", *lines]))


def write_tensors(out: Path, name: str, value: Any) -> None:
    """``torch.save``, but atomically."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    LocalStorage(out).replace(name, buffer.getvalue())


def read_tensors(out: Path, name: str) -> Any:
    """``torch.load`` of tensors and plain Python values only: no code from the file is run. A damaged one ends it."""
    try:
        return torch.load(out / name, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # torch.load raises many kinds on a file that is none
        raise SystemExit(f"{out / name} is damaged, or no file of the lab. Make it again: --stop-at 30") from error
