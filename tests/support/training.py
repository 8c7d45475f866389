"""A small training in the test's own process, whose state tells the step that it is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import easyckpt
from easyckpt import Checkpointer


def train(root: Path, to: int, *, step: int | None = None, **settings: Any) -> easyckpt.Restored:
    """Go on from what can be loaded to step `to`, every second step committed; the weights are the step's number."""
    model = nn.Linear(2, 2)
    settings = {"save_storage_interval": 2, "max_ckpt_num": None, "back_pressure": "wait"} | settings
    with Checkpointer(root, {"model": model}, **settings) as checkpointer:
        restored = checkpointer.load(step=step)
        if restored.step:
            assert torch.equal(model.weight, torch.full((2, 2), float(restored.step)))
        for number in range(restored.step + 1, to + 1):
            with torch.no_grad():
                model.weight.fill_(float(number))
            checkpointer.save_if_needed(number)
            checkpointer.wait()
    return restored
