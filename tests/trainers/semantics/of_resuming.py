"""Where a training goes on, and which of the trainings in a directory it goes on with."""

from __future__ import annotations

import logging
import os
import shutil

import pytest

from easyckpt import ConfigError
from easyckpt.format.trainer_names import TrainerNaming
from tests.trainers.semantics.trainings import (
    STEPS,
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


def test_nothing_there_is_a_beginning_and_said(out, caplog):
    trainer = make(out)
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer.train(resume_from_checkpoint=True)
    assert "nothing to resume from" in caplog.text
    assert trainer.state.global_step == STEPS


@pytest.mark.parametrize("how", ["flag", "newest path"])
def test_the_newest(out, tmp_path, how):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    forget_memory()
    trainer = make(out)
    trainer.train(resume_from_checkpoint=True if how == "flag" else str(out / "checkpoint-4"))
    assert same(weights(trainer), straight(tmp_path))
    assert checkpoints(out) == [2, 4, 6, 8]


def test_the_newest_path_means_memory_too(out, tmp_path):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    begun = []
    trainer = make(out)
    trainer.add_callback(At(5, lambda control: begun.append(5)))
    trainer.add_callback(At(4, lambda control: begun.append(4)))
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-4"))
    assert begun == [5]
    assert same(weights(trainer), straight(tmp_path))


def test_an_older_path_is_taken_as_meant(out, tmp_path):
    make(out).train()
    trainer = make(out)
    begun = []
    trainer.add_callback(At(2, lambda control: begun.append(2)))
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert begun == [2]
    assert same(weights(trainer), straight(tmp_path))
    stale = [name for name in os.listdir(out) if TrainerNaming().parse_stale(name)]
    assert {TrainerNaming().parse_stale(name)[0] for name in stale} == {4, 6, 8}  # named, so they stay


def test_a_path_in_another_root(out, tmp_path):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    trainer = make(tmp_path / "another")
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-4"))
    assert same(weights(trainer), straight(tmp_path))
    assert checkpoints(tmp_path / "another") == [6, 8]
    assert checkpoints(out) == [2, 4]


def test_a_path_that_is_nothing(out, tmp_path):
    with pytest.raises(ConfigError, match="no such directory"):
        make(out).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_new_line_without_ancestors(out):
    make(out, max_steps=4).train()
    before = (out / "checkpoint-4" / "model.safetensors").read_bytes()
    with pytest.raises(Stopped):
        make(out, seed=7, save_steps=3, callbacks=[At(4, stop)]).train()
    assert checkpoints(out) == [2, 3, 4]
    assert (out / "checkpoint-4" / "model.safetensors").read_bytes() == before
    forget_memory()
    trainer = make(out, seed=7, save_steps=3)
    begun = []
    trainer.add_callback(At(3, lambda control: begun.append(3)))
    trainer.train(resume_from_checkpoint=True)
    assert begun == [3]


@pytest.mark.parametrize(("every", "how", "begins"), [(8, "True", 4), (8, "path", 4), (3, "True", 3), (3, "path", 4)])
def test_a_new_line_hides_older_ones_once_it_has_something(out, every, how, begins):
    make(out, max_steps=4).train()
    with pytest.raises(Stopped):
        make(out, seed=7, save_steps=every, callbacks=[At(4 if every == 3 else 1, stop)]).train()
    forget_memory()
    begun: list[int] = []
    trainer = make(out)
    for step in range(STEPS):
        trainer.add_callback(At(step, lambda control: begun.append(trainer.state.global_step)))
    trainer.train(resume_from_checkpoint=True if how == "True" else str(out / "checkpoint-4"))
    assert begun[0] == begins
    assert trainer.state.global_step == STEPS


def test_a_training_that_was_begun_by_mistake_hides_nothing(out, tmp_path):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    with pytest.raises(Stopped):
        make(out, callbacks=[At(1, stop)]).train()
    forget_memory()
    trainer = make(out)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path))
    assert checkpoints(out) == [2, 4, 6, 8]


def test_a_training_that_is_over_trains_no_more(out, tmp_path):
    make(out).train()
    for limit in ({}, {"max_steps": -1, "num_train_epochs": 1}):
        trainer = make(out, **limit)
        begun = []
        trainer.add_callback(At(STEPS, lambda control, begun=begun: begun.append(STEPS)))
        trainer.train(resume_from_checkpoint=True)
        assert (begun, trainer.state.global_step) == ([], STEPS)
        assert same(weights(trainer), straight(tmp_path))
        assert checkpoints(out) == [2, 4, 6, 8]


def test_a_checkpoint_that_a_kill_prevented_is_made_by_the_resume(out):
    def spoil(control):
        shutil.rmtree(out / "checkpoint-4")
        raise Stopped

    with pytest.raises(Stopped):
        make(out, options={"on_save": "wait"}, callbacks=[At(4, spoil)]).train()
    trainer = make(out, max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    assert whole(out, 4)
