"""What a class or a callback keeps by itself: nothing of it is lost without a word, and it costs nothing unchanged."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from easyckpt.integrations.transformers.beside import Beside
from tests.trainers.semantics.trainings import At, Stopped, make, stop


def resumed(out, kind=Trainer, *, step: int = 5, callbacks=list):
    """A training that is stopped at `step`, and goes on to its end from what memory has of it."""
    with pytest.raises(Stopped):
        make(out, kind, callbacks=[*callbacks(), At(step, stop)]).train()
    trainer = make(out, kind, callbacks=callbacks())
    trainer.train(resume_from_checkpoint=True)
    return trainer


class Inferring(Trainer):
    """Two tensors made in inference mode: one before training, one anew at each step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        with torch.inference_mode():
            self.base = torch.ones(3)
        self.sums = torch.zeros(3)

    def training_step(self, *args, **kwargs):
        with torch.inference_mode():
            self.sums = self.sums + self.base
        return super().training_step(*args, **kwargs)


def test_tensors_made_in_inference_mode_are_as_good(out):
    assert resumed(out, Inferring).sums.tolist() == [8.0] * 3


class Following(Trainer):
    """Of its teacher the layer in the middle follows, by one row of its weight. Its reference stays as it is."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = nn.Sequential(*(nn.Linear(200, 200) for _ in range(9)))
        self.reference = copy.deepcopy(self.teacher)
        for parameter in (*self.teacher.parameters(), *self.reference.parameters()):
            nn.init.zeros_(parameter.requires_grad_(False))

    def training_step(self, *args, **kwargs):
        self.teacher[5].weight[150] += 1
        return super().training_step(*args, **kwargs)


def test_a_teacher_that_follows_in_part_goes_on(out):
    trainer = resumed(out, Following)
    assert trainer.teacher[5].weight[150].tolist() == [8.0] * 200


class Mean(TrainerCallback):
    """Weights of its own, written past all counters."""

    def __init__(self, by: float) -> None:
        self.by, self.mean = by, nn.Linear(2, 2)
        nn.init.zeros_(self.mean.weight)

    def on_step_end(self, args, state, control, **kwargs):
        self.mean.weight.data.add_(self.by)


def test_two_means_of_one_class_have_each_its_own(out):
    made: list[Mean] = []

    def callbacks():
        made[:] = [Mean(1), Mean(10)]
        return made[:]

    resumed(out, callbacks=callbacks)
    assert [each.mean.weight[0, 0].item() for each in made] == [8, 80]


class Elsewhere(Trainer):
    """Its reference is where no content can be read."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reference = nn.Linear(100, 100, device="meta")
        self.table = torch.zeros(100, device="meta")
        self.steps = 0

    def training_step(self, *args, **kwargs):
        self.steps += 1
        return super().training_step(*args, **kwargs)


def test_no_content_of_a_device_is_read(out):
    assert resumed(out, Elsewhere).steps == 8


class Holding(TrainerCallback):
    """Has what the trainer has."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def test_a_module_that_a_callback_has_too_is_kept_before_any_change(out):
    trainer = make(out, Following, wrap=False)
    trainer.add_callback(Holding(trainer.reference))
    assert Beside(trainer).state_dict().keys() == {"reference"}


class Large(Trainer):
    """The bounds are for all attributes together."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.first, self.second = [0.5] * 6_000, [0.5] * 6_000
        self.array, self.grown, self.steps = np.zeros(1 << 18), [], 0

    def training_step(self, *args, **kwargs):
        self.steps += 1
        self.grown += [[0.5] * 1_000]
        self.first[-1] = self.second[-1] = float(self.steps)
        return super().training_step(*args, **kwargs)


def test_what_is_too_large_is_named_and_nothing_else_lost(out, caplog):
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer = resumed(out, Large)
    assert caplog.text.count("of Large, second, array will not be kept where training changes it") == 2
    assert caplog.text.count("of Large, grown will not be kept where training changes it") == 1  # resumed it is small
    assert (trainer.first[-1], trainer.second[-1], trainer.steps) == (8.0, 8.0, 8)
