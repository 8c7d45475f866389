"""Real text that is there wherever Python is: the sources of its standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from model import LENGTH
from torch import Tensor

BATCH = 8
TEXT_BYTES = 2_000_000


def load_text() -> Tensor:
    """The text as a row of bytes, always in the same order."""
    directory = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(directory.glob("*.py")):
        text += path.read_bytes()
    if len(text) <= LENGTH:
        raise SystemExit(f"no sources of the standard library in {directory}: use a Python that has them")
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


def draw_batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (BATCH, LENGTH) each: windows whose places `generator` draws.

    Each draw moves the generator on. Its state therefore says which windows come next.
    """
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(LENGTH + 1)].long()
    return windows[:, :-1], windows[:, 1:]
