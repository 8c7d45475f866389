"""What a program seldom does, and may do all the same."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import Trainer, TrainerCallback

from tests.trainers.data import Sequences
from tests.trainers.semantics.trainings import At, Stopped, checkpoints, forget_memory, make, same, stop, weights


class Peeking(TrainerCallback):
    """Looks at a batch of the training data in the middle of training."""

    trainer: Trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            next(iter(self.trainer.get_train_dataloader()))


class Keeping(Trainer):
    """Has one loader for all."""

    kept = None

    def get_train_dataloader(self):
        self.kept = self.kept or super().get_train_dataloader()
        return self.kept


def peeking(out, kind, callbacks=(), **arguments) -> Trainer:
    peek = Peeking()
    peek.trainer = make(out, kind, callbacks=[peek, *callbacks], **arguments)
    return peek.trainer


@pytest.mark.parametrize("kind", [Trainer, Keeping])
@pytest.mark.parametrize("tier", ["memory", "storage"])
def test_a_look_at_the_training_data(out, tmp_path, kind, tier):
    straight = peeking(tmp_path / "straight", kind)
    straight.train()
    plain = peeking(tmp_path / "plain", kind, wrap=False)
    plain.train()
    assert same(weights(straight), weights(plain))
    with pytest.raises(Stopped):
        peeking(out, kind, [At(5, stop)]).train()
    if tier == "storage":
        forget_memory()
    resumed = peeking(out, kind)
    resumed.train(resume_from_checkpoint=True)
    assert same(weights(resumed), weights(straight))


def test_the_evaluation_at_the_start_is_made_once(out):
    def evaluating(callbacks=()) -> Trainer:
        return make(out, callbacks=callbacks, eval_on_start=True, eval_dataset=Sequences(4))

    with pytest.raises(Stopped):
        evaluating([At(5, stop)]).train()
    resumed = evaluating()
    resumed.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in resumed.state.log_history if "eval_loss" in entry] == [0]


class SavesFirst(TrainerCallback):
    """Saves before the evaluation at the start, which ends the training the first time."""

    def __init__(self, *, ends: bool) -> None:
        self.ends, self.trainer = ends, None

    def on_train_begin(self, args, state, control, **kwargs):
        if self.ends:
            self.trainer._save_checkpoint(self.trainer.model, None)
            raise Stopped


def test_the_evaluation_at_the_start_is_made_if_the_snapshot_is_of_before(out):
    def evaluating(saves: SavesFirst) -> Trainer:
        saves.trainer = make(out, callbacks=[saves], eval_on_start=True, eval_dataset=Sequences(4))
        return saves.trainer

    with pytest.raises(Stopped):
        evaluating(SavesFirst(ends=True)).train()
    assert checkpoints(out) == [0]
    resumed = evaluating(SavesFirst(ends=False))
    resumed.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in resumed.state.log_history if "eval_loss" in entry] == [0]


def test_a_training_of_its_own_is_told_what_it_is_handed(out, caplog):
    class Own(Trainer):
        def train(self, resume_from_checkpoint=None, **kwargs):
            return super().train(resume_from_checkpoint, **kwargs)

    with caplog.at_level(logging.WARNING, "easyckpt"):
        with pytest.raises(Stopped):
            make(out, Own, callbacks=[At(5, stop)]).train()
        assert "overrides" not in caplog.text
        make(out, Own).train(resume_from_checkpoint=True)
    assert "Own overrides train, which is handed a directory that holds the Trainer's state alone" in caplog.text


@pytest.mark.parametrize("there", [True, False])
def test_a_scale_of_the_gradients_that_is_not_there_is_said(out, caplog, there):
    def scaled(wrap: bool, callbacks=()) -> Trainer:
        trainer = make(out, wrap=wrap, callbacks=callbacks)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        return trainer

    with pytest.raises(Stopped):
        scaled(False, [At(5, stop)]).train()
    scaler = out / "checkpoint-4" / "scaler.pt"
    assert scaler.exists()
    if not there:
        scaler.unlink()
    with caplog.at_level(logging.WARNING, "easyckpt"):
        scaled(True).train(resume_from_checkpoint=True)
    assert ("scaler.pt is not there" in caplog.text) is not there
