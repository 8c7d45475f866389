"""What a user is told at the level that Python shows by default."""

from __future__ import annotations

import logging
import os

import pytest

from easyckpt import DamagedCheckpoint
from tests.trainers.semantics.trainings import At, Stopped, forget_memory, make, same, stop, straight, weights


@pytest.mark.parametrize("tier", ["memory", "checkpoint-4"])
def test_a_resume_says_from_where(out, caplog, tier):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    if tier != "memory":
        forget_memory()
    with caplog.at_level(logging.WARNING, "easyckpt"):
        make(out).train(resume_from_checkpoint=True)
    said = [line for line in caplog.messages if line.startswith("resumed from step")]
    assert len(said) == 1
    assert said[0].startswith(f"resumed from step {5 if tier == 'memory' else 4} of ")
    assert said[0].endswith(tier)


def test_a_linked_checkpoint_is_named_and_can_be_gone_on_from(out, tmp_path, caplog):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    forget_memory()
    target = tmp_path / "moved" / "checkpoint-4"
    target.parent.mkdir()
    os.rename(out / "checkpoint-4", target)
    (out / "checkpoint-4").symlink_to(target)
    with caplog.at_level(logging.WARNING, "easyckpt"), pytest.raises(Stopped):
        make(out, callbacks=[At(2, stop)]).train(resume_from_checkpoint=True)
    assert "checkpoint-4 is a symbolic link" in caplog.text
    assert str(target) in caplog.text
    trainer = make(tmp_path / "next")
    trainer.train(resume_from_checkpoint=str(target))
    assert same(weights(trainer), straight(tmp_path))
    assert target.is_dir()


def test_where_models_alone_were_saved_it_is_said_what_to_set(out):
    with pytest.raises(Stopped):
        make(out, save_only_model=True, callbacks=[At(5, stop)]).train()
    forget_memory()
    with pytest.raises(DamagedCheckpoint, match="Set save_only_model=False"):
        make(out).train(resume_from_checkpoint=True)
