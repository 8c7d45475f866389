"""Weights that no optimizer steps: they are copied while training goes on, and whoever writes them is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.staged import Rig, rig_of  # noqa: F401 - rig_of is a fixture
from torch import nn

from easyckpt.format.codec import path_text
from easyckpt.state.capture import StateCapture

WIDTH = 256  # large enough to be copied late


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


def test_frozen_weights_may_be_late_and_buffers_may_not() -> None:
    job = Job()
    job.model.register_buffer("mean", torch.zeros(WIDTH))
    capture = StateCapture(job.state).capture()
    late = {capture.layout.leaves[number].path[1]: capture.steppers[number] for number in capture.late}
    trained = frozenset({id(job.optimizer)})
    assert late == {"0.weight": frozenset(), "0.bias": frozenset(), "1.weight": trained, "1.bias": trained}


def test_they_are_copied_while_training_goes_on(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    settle(job, rig)
    assert "model.0.weight" in late_names(rig)
    with rig.holding() as gate:
        rig.save(4)
        gate.reached()  # of what is trained nothing is large enough to be waited for
    job.step()
    rig.end()
    assert rig.sealed[-1] == 4
    assert not rig.discarded


@pytest.mark.parametrize("kind", ["counted", "past the counter"])
def test_a_write_while_they_are_copied_is_found(rig_of: Callable[..., Rig], kind: str) -> None:
    job = Job()
    rig = rig_of(job.state)
    settle(job, rig)
    with rig.holding() as gate:
        rig.save(4)
        gate.reached()
        (job.frozen.detach() if kind == "counted" else job.frozen.data).mul_(1.5)
        gate.release()
        job.step()
    assert list(rig.discarded) == [4]
    assert "model.0.weight" not in late_names(rig)
    rig.save(5)
    job.frozen.data.mul_(1.5)
    job.step()
    rig.end()
    assert rig.sealed[-1] == 5


def test_a_teacher_that_moves_in_each_step_is_copied_early_and_not_spoken_of(rig_of: Callable[..., Rig]) -> None:
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


def test_without_an_optimizer_that_was_seen_they_are_early(rig_of: Callable[..., Rig]) -> None:
    """Steps of another training's end no window of this one's."""
    job, other = Job(), Job()
    rig = rig_of({"model": job.model})
    for number in range(1, 6):
        rig.save(number)
        assert rig.sealed[-1] == number
        other.step()
    assert late_names(rig) == set()
    assert not rig.warned
