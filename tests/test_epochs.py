"""Loops over epochs as README ("Data") shows them: stopped at any step and started again, equal to the bit.

A stop is a clean end of the Checkpointer; the run that goes on has new objects, and generators that stand elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from easyckpt import Checkpointer, SkipBatchSampler

EPOCHS, LENGTH, BATCH = 3, 20, 4
BATCHES = LENGTH // BATCH
#: Batches after which an epoch is ended early; not a divisor of an epoch.
EARLY = 3

LOADERS = {
    "skip sampler": lambda data: DataLoader(data, batch_sampler=SkipBatchSampler(len(data), BATCH, seed=0)),
    "shuffle": lambda data: DataLoader(data, batch_size=BATCH, shuffle=True),
    "shuffle, workers": lambda data: DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=1),
}


class Stopped(Exception):
    """The job has come to the step at which it is stopped."""


class Job:
    """Training whose results depend on the learning rate of each epoch, the data's order and every generator."""

    def __init__(self, kind: str, *, restarted: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        data = TensorDataset(torch.randn(LENGTH, 4), torch.randn(LENGTH, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.loader, self.held_out = LOADERS[kind](data), DataLoader(data, batch_size=8, shuffle=True)
        self.progress = {"epoch": 0}
        self.log: list[tuple[object, ...]] = []
        torch.manual_seed(77 if restarted else 1)
        random.seed(77 if restarted else 1)

    def run(self, root: Path, loop, stop: int | None) -> int:
        """Train from where `root` stands up to `stop`; returns the step that it went on from."""
        state = {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "progress": self.progress,
        }  # fmt: skip
        with Checkpointer(root, state, save_storage_interval=1000) as ckpt:
            start = ckpt.load().step
            with contextlib.suppress(Stopped):
                loop(self, ckpt, itertools.count(start + 1), stop)
        return start

    def train(self, batch) -> None:
        self.optimizer.zero_grad()
        loss = (self.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.log.append((loss.item(), self.scheduler.get_last_lr(), random.random()))

    def work_of_the_epoch(self, epoch: int) -> None:
        """Moves the schedule, and draws: from torch's generator by the loader, from Python's by itself."""
        self.scheduler.step()
        with torch.no_grad():
            losses = [(self.model(x) - y).square().mean().item() for x, y in self.held_out]
        self.log.append((epoch, losses, random.random()))

    def result(self) -> tuple[object, ...]:
        weights = [value.tolist() for value in self.model.state_dict().values()]
        return weights, self.scheduler.state_dict(), random.random(), torch.rand(1).item()


def each_epoch_in_full(job, ckpt, steps, stop) -> None:
    for epoch in range(job.progress["epoch"], EPOCHS):
        job.progress["epoch"] = epoch
        for batch in ckpt.batches(job.loader, epoch):
            job.train(batch)
            ckpt.save_if_needed(step := next(steps))
            if step == stop:
                raise Stopped
        job.work_of_the_epoch(epoch)


def ending_epochs_early(job, ckpt, steps, stop) -> None:
    for epoch in range(job.progress["epoch"], EPOCHS):
        job.progress["epoch"] = epoch
        for batch in ckpt.batches(job.loader, epoch):
            job.train(batch)
            step = next(steps)
            if over := step % EARLY == 0:
                job.work_of_the_epoch(epoch)
                job.progress["epoch"] = epoch + 1
            ckpt.save_if_needed(step)
            if step == stop:
                raise Stopped
            if over:
                break


# torch looks whether this process has stepped the optimizer: a run that goes on at the first epoch's end has not yet
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    ("loop", "steps"),
    [(each_epoch_in_full, EPOCHS * BATCHES), (ending_epochs_early, EPOCHS * EARLY)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_loop_over_epochs_goes_on_exactly_from_every_step(tmp_path, kind, loop, steps):
    straight = Job(kind, restarted=False)
    assert straight.run(tmp_path / "straight", loop, None) == 0
    expected = straight.result()
    for stop in range(1, steps + 1):
        root = tmp_path / f"stopped-{stop}"
        before = Job(kind, restarted=False)
        before.run(root, loop, stop)
        after = Job(kind, restarted=True)
        assert after.run(root, loop, None) == stop
        assert before.log + after.log == straight.log, f"stopped at step {stop}"
        assert after.result() == expected, f"stopped at step {stop}"
