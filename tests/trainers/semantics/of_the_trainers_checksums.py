"""Checkpoints that the Trainer saved by itself and that were committed, under a training that is ours."""

from __future__ import annotations

import logging

import pytest

from easyckpt import DamagedCheckpoint
from tests.trainers.semantics.trainings import At, Stopped, damage, make, same, stop, straight, weights


@pytest.fixture
def saved(out, monkeypatch):
    """Checkpoints 2, 4 and 6 of a training that the Trainer saved by itself."""
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("easyckpt.integrations.transformers.synchronous.why", lambda trainer, trial: "a test")
        make(out, callbacks=[At(7, stop)]).train()
    return out


def began(trainer, resume):
    """The first step that `trainer` makes."""
    begun = []
    for step in range(8):
        trainer.add_callback(At(step, lambda control, step=step: begun.append(step)))
    trainer.train(resume_from_checkpoint=resume)
    return begun[0]


def test_a_byte_that_is_not_as_committed_has_the_older_one_taken(saved, tmp_path, caplog):
    damage(saved / "checkpoint-6" / "model.safetensors", "flipped")
    trainer = make(saved)
    with caplog.at_level(logging.WARNING, "easyckpt"):
        assert began(trainer, True) == 4
    assert "model.safetensors: its bytes are not those that were committed" in caplog.text
    assert "no checksums" not in caplog.text
    assert same(weights(trainer), straight(tmp_path))


def test_one_that_is_named_is_verified_too(saved):
    damage(saved / "checkpoint-4" / "model.safetensors", "flipped")
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors"):
        make(saved).train(resume_from_checkpoint=str(saved / "checkpoint-4"))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_one_that_is_named_is_gone_on_from(saved, tmp_path, elsewhere):
    trainer = make(tmp_path / "other" if elsewhere else saved)
    assert began(trainer, str(saved / "checkpoint-4")) == 4
    assert same(weights(trainer), straight(tmp_path))
