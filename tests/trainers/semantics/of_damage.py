"""Damaged files are passed over, and errors raised: of the files, the writer, and the training."""

from __future__ import annotations

import logging
import os
import shutil

import pytest

from easyckpt import DamagedCheckpoint, EasyckptError, SaveFailed, failpoints
from tests.trainers.semantics.trainings import (
    STOCK_FILES,
    At,
    Stopped,
    checkpoints,
    damage,
    forget_memory,
    make,
    same,
    stop,
    straight,
    weights,
)


@pytest.mark.parametrize("name", sorted(STOCK_FILES | {"manifest.json"}))
@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "missing"])
def test_damage_in_any_file_falls_back_or_is_an_error(out, tmp_path, name, how, caplog):
    if not (tmp_path.parent / "damaged").exists():
        with pytest.raises(Stopped):
            make(tmp_path.parent / "damaged", callbacks=[At(7, stop)]).train()
    shutil.copytree(tmp_path.parent / "damaged", out)
    forget_memory()
    damage(out / "checkpoint-6" / name, how)
    trainer = make(out)
    begun = []
    for step in (4, 6):
        trainer.add_callback(At(step, lambda control, step=step: begun.append(step)))
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path))
    if name == "manifest.json" and how == "missing":
        assert begun == [6]  # what is left is whole, and such as the Trainer itself writes
        assert "written by the Trainer itself" in caplog.text
    else:
        assert begun == [4, 6]
        assert "checkpoint-6" in caplog.text


def test_all_damaged_is_an_error_and_no_new_beginning(out):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    forget_memory()
    for path in out.glob("checkpoint-*/optimizer.pt"):
        damage(path, "flipped")
    with pytest.raises(DamagedCheckpoint):
        make(out).train(resume_from_checkpoint=True)


def test_an_error_of_the_writer_is_raised_at_a_next_step(out):
    failpoints.arm("writer.shard.chunk=error:ENOSPC")
    reached = []
    trainer = make(out, max_steps=500)
    trainer.add_callback(At(499, lambda control: reached.append(499)))
    with pytest.raises(SaveFailed, match="No space left"):
        trainer.train()
    assert not reached
    assert 2 not in checkpoints(out)


def test_an_interrupt_leaves_what_was_committed(out):
    def interrupt(control):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(out, callbacks=[At(5, interrupt)]).train()
    assert checkpoints(out) == [2, 4]
    assert [name for name in os.listdir(out) if name.startswith("_easyckpt-tmp")] == []


def test_an_error_of_the_trainers_own_is_not_replaced(out):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(3, stop)]).train()
    assert issubclass(SaveFailed, EasyckptError)
