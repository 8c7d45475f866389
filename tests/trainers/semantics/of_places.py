"""Which state a name means, and that nothing which a restart needs is let go of on the way."""

from __future__ import annotations

import logging
import os

import pytest
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from easyckpt import DamagedCheckpoint
from tests.trainers.semantics.trainings import STEPS, At, Stopped, checkpoints, make, same, stop, straight, weights

NEVER = 100


class Beginnings(TrainerCallback):
    """Notes from which step, and with which weights, each loop begins."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.weights = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.steps.append(int(state.global_step))
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}


def hungry(at: int) -> type[Trainer]:
    """A Trainer that is out of memory once, in the step behind `at`."""
    failed = []

    class Hungry(Trainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == at and not failed:
                failed.append(at)
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    return Hungry


def test_out_of_memory_behind_a_snapshot_that_is_nowhere_else(out, tmp_path):
    with pytest.raises(Stopped):
        make(out, save_steps=NEVER, callbacks=[At(5, stop)]).train()
    beginnings = Beginnings()
    trainer = make(out, hungry(at=5), save_steps=NEVER, auto_find_batch_size=True, callbacks=[beginnings])
    trainer.train(resume_from_checkpoint=True)
    assert beginnings.steps == [5, 5]
    assert trainer.state.global_step == STEPS


def test_out_of_memory_when_that_snapshot_has_made_room_for_others(out):
    with pytest.raises(Stopped):
        make(out, save_steps=NEVER, callbacks=[At(2, stop)]).train()
    beginnings = Beginnings()
    options = {"slots": 2}
    trainer = make(
        out, hungry(at=7), save_steps=NEVER, auto_find_batch_size=True, callbacks=[beginnings], options=options
    )
    trainer.train(resume_from_checkpoint=True)
    first, second = beginnings.steps
    assert first == 2
    assert second in {6, 7}
    assert trainer.state.global_step == STEPS


def another_line(out) -> None:
    """Of one training there is checkpoint-4, of the next one checkpoint-3, and step 4 in memory."""
    make(out, max_steps=4, save_steps=4).train()
    with pytest.raises(Stopped):
        make(out, seed=7, save_steps=3, callbacks=[At(4, stop)]).train()
    assert checkpoints(out) == [3, 4]


def test_a_path_means_its_own_bytes_and_no_snapshot_of_another_line_with_that_number(out, caplog):
    another_line(out)
    named = load_file(out / "checkpoint-4" / "model.safetensors")
    beginnings = Beginnings()
    with caplog.at_level(logging.WARNING, "easyckpt"), pytest.raises(Stopped):
        make(out, save_steps=NEVER, callbacks=[beginnings, At(5, stop)]).train(
            resume_from_checkpoint=str(out / "checkpoint-4")
        )
    assert beginnings.steps == [4]
    assert all((beginnings.weights[name] == tensor).all() for name, tensor in named.items())
    assert checkpoints(out) == [4]
    assert "checkpoint-3 is not in the past of step 4" in caplog.text


def test_a_path_whose_manifest_cannot_be_read_means_no_snapshot_either(out):
    another_line(out)
    (out / "checkpoint-4" / "manifest.json").write_text("{")
    with pytest.raises(DamagedCheckpoint, match="checkpoint-4 cannot be resumed from"):
        make(out).train(resume_from_checkpoint=str(out / "checkpoint-4"))


@pytest.mark.parametrize("theirs", [False, True])
def test_a_path_in_another_directory_leaves_what_is_here(out, tmp_path, caplog, theirs):
    other = tmp_path / "other"
    with pytest.raises(Stopped):
        make(other, wrap=not theirs, callbacks=[At(5, stop)]).train()
    make(out, max_steps=4, seed=3).train()
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer = make(out, save_steps=3)
        trainer.train(resume_from_checkpoint=str(other / "checkpoint-4"))
    assert "set aside" not in caplog.text
    assert checkpoints(out) == [2, 4, 6, 8]
    assert not [name for name in os.listdir(out) if "stale" in name]
    if not theirs:
        assert same(weights(trainer), straight(tmp_path))
