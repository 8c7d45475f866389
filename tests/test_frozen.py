"""Weights that no optimizer steps: they may be written at any time, and are copied before training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.staged import Rig, rig_of  # noqa: F401 - rig_of is a fixture
from torch import nn

from easyckpt.format.codec import path_text
from easyckpt.state.capture import StateCapture

WIDTH = 256  # large enough to be copied late, were it trained


class Job:
    """Only the head is trained."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model[1].parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": self.model, "opt": self.optimizer}

    @property
    def frozen(self) -> nn.Parameter:
        return self.model[0].weight  # type: ignore[return-value]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, WIDTH)).pow(2).mean().backward()
        self.optimizer.step()


def late_names(rig: Rig) -> set[str]:
    capture = rig.capture.capture()
    return {path_text(capture.layout.leaves[number].path) for number in rig.stager.late(capture)}


def settle(job: Job, rig: Rig) -> None:
    for number in (1, 2, 3):
        job.step()
        rig.save(number)
    job.step()


def test_what_no_optimizer_steps_is_early() -> None:
    job = Job()
    job.model.register_buffer("mean", torch.zeros(WIDTH))
    capture = StateCapture(job.state).capture()
    late = {capture.layout.leaves[number].path[1]: capture.steppers[number] for number in capture.late}
    trained = frozenset({id(job.optimizer)})
    assert late == {"1.weight": trained, "1.bias": trained}


def test_a_few_words_that_are_written_past_the_counter_are_those_of_their_step(rig_of: Callable[..., Rig]) -> None:
    """A codebook whose dead entries are set anew now and then: neither counters nor probes see it."""
    job = Job()
    rig = rig_of(job.state)
    settle(job, rig)
    with rig.holding() as gate:
        rig.save(4)
        job.frozen.data[WIDTH // 2, 3] = 7.0
        gate.release()
        job.step()
    rig.end()
    assert rig.sealed[-1] == 4
    assert not rig.discarded


def test_a_teacher_that_moves_in_each_step_is_not_spoken_of(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    for number in range(1, 7):
        rig.save(number)
        job.frozen.data.mul_(0.99)
        job.step()
    rig.end()
    assert rig.sealed == [1, 2, 3, 4, 5, 6]
    assert "model.0.weight" not in late_names(rig)
    assert not rig.warned
