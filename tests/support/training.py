"""Small trainings in the test's own process, whose state tells the step that it is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import easyckpt
from easyckpt import Checkpointer


class Training:
    """A model whose state is a function of the number of steps, so that any restored state can be told."""

    def __init__(self, root: Path, **settings) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(16, 16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.progress = {"epoch": 0, "wandb_id": None}
        state = {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}
        self.checkpointer = Checkpointer(root, state, **({"save_storage_interval": 10} | settings))

    def step(self) -> None:
        self.model(torch.randn(4, 16)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress["epoch"] += 1

    def to(self, last: int, first: int = 0) -> None:
        for number in range(first + 1, last + 1):
            self.step()
            self.checkpointer.save_if_needed(number)

    def weights(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


def committed(root: Path) -> list[int]:
    """By the names of directories alone."""
    return sorted(int(path.name[5:]) for path in root.glob("step-*") if "." not in path.name)


def start(root: Path, **settings) -> tuple[Training, easyckpt.Restored]:
    training = Training(root, **settings)
    return training, training.checkpointer.load()


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
