"""Trainings that the Trainer saves by itself."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
from transformers import Trainer, TrainerCallback

from easyckpt import DamagedCheckpoint, failpoints
from tests.trainers.semantics.trainings import (
    At,
    Stopped,
    checkpoints,
    damage,
    make,
    same,
    stop,
    straight,
    weights,
    whole,
)


def test_what_the_trainer_saves_is_committed_and_rotated(out, sharded, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "easyckpt"), pytest.raises(Stopped):
        make(out, save_total_limit=2, callbacks=[At(7, stop)]).train()
    assert caplog.text.count("saved by the Trainer itself") == 1
    assert checkpoints(out) == [4, 6]
    assert all(whole(out, step) for step in (4, 6))
    damage(out / "checkpoint-6" / "model.safetensors", "flipped")
    trainer = make(out)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-6 cannot be resumed from" in caplog.text
    assert same(weights(trainer), straight(tmp_path))


def test_a_save_of_the_trainers_that_was_cut_short_counts_for_nothing(out, sharded, tmp_path):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(7, stop)]).train()
    (out / "checkpoint-6" / "manifest.json").unlink()
    (out / "checkpoint-6" / "optimizer.pt").unlink()
    trainer = make(out)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path))
    for path in out.glob("checkpoint-*/optimizer.pt"):
        damage(path, "flipped")
    with pytest.raises(DamagedCheckpoint):
        make(out).train(resume_from_checkpoint=True)


def test_from_a_training_that_the_trainer_saved_to_one_of_ours(out, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("easyckpt.integrations.transformers.synchronous.why", lambda trainer, trial: "a test")
        make(out, callbacks=[At(5, stop)]).train()
    trainer = make(out)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path))
    assert checkpoints(out) == [2, 4, 6, 8]


class Twice(TrainerCallback):
    """Ends training within an epoch; the first save of that step is the step's, the second its epoch's."""

    def __init__(self, act=lambda: None):
        self.act = act

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 4

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_save = True
        self.act()


class Dies(Trainer):
    """Killed in its second save of a step, while it writes."""

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        self.saves = getattr(self, "saves", 0) + 1
        if self.saves == 2:
            damage(Path(output_dir) / "optimizer.pt", "truncated")  # half of it was written
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("resumed", ["by itself", "in the background"])
@pytest.mark.parametrize("point", [None, "storage.rename.after", "storage.remove.before"])
def test_a_checkpoint_that_is_saved_once_more_is_whole_until_another_is(out, tmp_path, monkeypatch, point, resumed):
    kind = Dies if point is None else Trainer
    callback = Twice() if point is None else Twice(lambda: failpoints.arm(f"{point}=kill"))
    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr("easyckpt.integrations.transformers.synchronous.why", lambda trainer, trial: "a test")
            make(out, kind, callbacks=[callback], save_steps=4, save_total_limit=1).train()
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    if resumed == "by itself":
        monkeypatch.setattr("easyckpt.integrations.transformers.synchronous.why", lambda trainer, trial: "a test")
    trainer = make(out, save_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert same(weights(trainer), straight(tmp_path))
    assert all(whole(out, step) for step in (4, 8))
    assert list(out.glob("_easyckpt-*")) == []


def test_of_two_saves_of_a_step_the_later_one_is_committed(out, sharded):
    trainer = make(out, callbacks=[Twice(lambda: trainer.log({"later": 1.0}))], save_steps=4)
    trainer.train()
    assert whole(out, 4)
    assert '"later"' in (out / "checkpoint-4" / "trainer_state.json").read_text()
    assert list(out.glob("_easyckpt-*")) == []


def test_a_second_save_that_fails_leaves_what_the_first_has_made(out, sharded):
    class Fails(Trainer):
        saves = 0

        def _save_checkpoint(self, *args, **kwargs):
            self.saves += 1
            if self.saves == 2:
                (out / "checkpoint-4").mkdir()
                raise OSError("no space")
            super()._save_checkpoint(*args, **kwargs)

    with pytest.raises(OSError, match="no space"):
        make(out, Fails, callbacks=[Twice()], save_steps=4, save_total_limit=1).train()
    trainer = make(out, save_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert whole(out, 4)
    assert len(trainer.state.log_history) == 9
