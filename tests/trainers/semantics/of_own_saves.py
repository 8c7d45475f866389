"""Trainings that the Trainer saves by itself."""

from __future__ import annotations

import logging

import pytest

from easyckpt import DamagedCheckpoint
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
