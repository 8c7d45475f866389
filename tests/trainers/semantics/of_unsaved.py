"""What training changes and no file of the Trainer's has: buffers come back, and what callbacks keep is named."""

from __future__ import annotations

import logging
from collections import deque

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2LMHeadModel, TrainerCallback
from transformers.trainer_callback import ExportableState

from tests.trainers.models import gpt2
from tests.trainers.semantics.trainings import (
    At,
    Stopped,
    checkpoints,
    forget_memory,
    make,
    same,
    stop,
    straight,
    weights,
    whole,
)


class Counts(GPT2LMHeadModel):
    """Its loss depends on buffers that no file of weights has: one written in place, one replaced and growing."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("calls", torch.zeros(3), persistent=False)
        self.register_buffer("grown", torch.ones(1), persistent=False)
        self.register_buffer("fixed", torch.full((1000,), 3.0), persistent=False)

    def forward(self, input_ids=None, labels=None, **kwargs):
        given = super().forward(input_ids, labels=labels, **kwargs)
        if self.training:
            self.calls[1] += 1
            self.grown = torch.cat([self.grown, torch.ones(1)])
            self.fixed.mul_(1)  # written, and what it was
        given.loss = given.loss * (1 + self.calls[1] / 5 + self.grown.sum() / 7)
        return given


def counting() -> GPT2LMHeadModel:
    return Counts(gpt2().config)


@pytest.mark.parametrize("tier", ["memory", "storage"])
def test_buffers_that_are_not_persistent_go_on(out, tmp_path, tier):
    with pytest.raises(Stopped):
        make(out, model_init=counting, callbacks=[At(5, stop)]).train()
    if tier == "storage":
        forget_memory()
    trainer = make(out, model_init=counting)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path, model_init=counting))
    assert (trainer.model.calls[1], trainer.model.grown.numel()) == (8, 9)
    assert checkpoints(out) == [2, 4, 6, 8]
    for step in checkpoints(out):
        assert whole(out, step)
        files = load_file(out / f"checkpoint-{step}" / "model.safetensors")
        assert not files.keys() & {"calls", "grown", "fixed"}
    assert trainer._easyckpt.buffers.changed().keys() == {"calls", "grown"}


class Average(TrainerCallback):
    """Weights averaged beside the training, and the like."""

    def __init__(self) -> None:
        self.decay, self.names, self.steps = 0.9, ["a"], 0
        self.recent, self.weights = deque(maxlen=2), {"mean": nn.Linear(2, 2)}

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        self.recent.append(self.steps)
        with torch.no_grad():
            self.weights["mean"].weight.mul_(0.5)


class Patience(TrainerCallback, ExportableState):
    def __init__(self) -> None:
        self.patience = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.patience += 1

    def state(self):
        return {"args": {}, "attributes": {"patience": self.patience}}


class Begun(TrainerCallback):
    """Is ready once training begins."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.limit = 7


def test_a_callback_that_keeps_what_no_checkpoint_has_is_named_once(out, caplog):
    with caplog.at_level(logging.WARNING, "easyckpt"):
        make(out, callbacks=[Average(), Patience(), Begun(), At(99, stop)]).train()
    assert caplog.text.count("the callback Average changes recent, steps, weights while training goes on") == 1
    assert caplog.text.count("the callback") == 1
