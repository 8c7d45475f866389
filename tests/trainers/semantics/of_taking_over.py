"""Trainings that the Trainer saves by itself, in a directory in which others have trained before."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import Trainer

from easyckpt import ConfigError, DamagedCheckpoint, failpoints
from easyckpt.integrations.transformers import synchronous
from tests.trainers.semantics.trainings import (
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
    whole,
)


@pytest.fixture
def saved_by(out, monkeypatch):
    """Checkpoints 2 and 4: saved in the background, by the Trainer itself, or by a plain one."""
    why = synchronous.why

    def save(who: str, until: int = 5, **arguments):
        monkeypatch.setattr(synchronous, "why", (lambda trainer, trial: "a test") if who == "itself" else why)
        with pytest.raises(Stopped):
            trainer = make(out, wrap=who != "plain", callbacks=[At(until, stop)])
            trainer.train(**arguments)
        forget_memory()
        monkeypatch.setattr(synchronous, "why", lambda trainer, trial: "a test")

    return save


def began(trainer, resume):
    """The first step that `trainer` makes."""
    begun = []
    for step in range(8):
        trainer.add_callback(At(step, lambda control, step=step: begun.append(step)))
    trainer.train(resume_from_checkpoint=resume)
    return begun[0]


@pytest.mark.parametrize("who", ["background", "itself", "plain"])
@pytest.mark.parametrize("named", [False, True])
def test_the_newest_is_gone_on_from_whoever_saved_it(saved_by, out, tmp_path, who, named):
    saved_by(who)
    trainer = make(out)
    assert began(trainer, str(out / "checkpoint-4") if named else True) == 4
    assert same(weights(trainer), straight(tmp_path))
    assert checkpoints(out) == [2, 4, 6, 8]
    assert [step for step in checkpoints(out) if whole(out, step)] == ([6, 8] if who == "plain" else [2, 4, 6, 8])


@pytest.mark.parametrize("who", ["background", "itself"])
def test_a_flipped_byte_is_found_whoever_saved_it(saved_by, out, tmp_path, who, caplog):
    saved_by(who)
    damage(out / "checkpoint-4" / "model.safetensors", "flipped")
    trainer = make(out)
    with caplog.at_level(logging.WARNING, "easyckpt"):
        assert began(trainer, True) == 2
    assert "checkpoint-4 cannot be resumed from and is passed over" in caplog.text
    assert same(weights(trainer), straight(tmp_path))


def test_the_newest_counts_though_only_older_ones_have_checksums(saved_by, out, tmp_path):
    saved_by("itself")
    saved_by("plain", until=7, resume_from_checkpoint=True)
    trainer = make(out)
    assert began(trainer, True) == 6
    assert same(weights(trainer), straight(tmp_path))


def test_one_that_is_named_is_verified(saved_by, out):
    saved_by("itself", until=7)
    damage(out / "checkpoint-4" / "model.safetensors", "flipped")
    with pytest.raises(DamagedCheckpoint, match=r"checkpoint-4.*model\.safetensors"):
        make(out).train(resume_from_checkpoint=str(out / "checkpoint-4"))
    damage(out / "checkpoint-6" / "model.safetensors", "flipped")
    assert began(make(out), str(out / "checkpoint-6")) == 2  # the newest: it means True
    with pytest.raises(ConfigError, match="no such directory"):
        make(out).train(resume_from_checkpoint=str(out / "checkpoint-5"))


def test_a_new_training_spoils_no_other_s_checkpoint(saved_by, out):
    saved_by("background")
    before = {path.name: path.read_bytes() for path in (out / "checkpoint-2").iterdir()}
    make(out).train()
    aside = next(out.glob("_easyckpt-stale-checkpoint-2.*"))
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before


class Failing(Trainer):
    """Has no room for its second checkpoint, or, where `from_the_first`, for any."""

    from_the_first = True

    def _save_checkpoint(self, *args, **kwargs):
        if self.from_the_first or self.state.global_step > 2:
            raise Stopped
        super()._save_checkpoint(*args, **kwargs)


class FailingLater(Failing):
    from_the_first = False


def test_until_a_new_training_has_saved_the_old_one_is_there(saved_by, out, tmp_path):
    saved_by("itself", until=7)
    with pytest.raises(Stopped):
        make(out, Failing).train()
    assert checkpoints(out) == [4, 6]  # of its number 2 it was in need
    with pytest.raises(Stopped):
        make(out, Failing, save_steps=3).train()
    assert checkpoints(out) == [2, 4, 6]  # nothing has taken its place
    trainer = make(out)
    assert began(trainer, True) == 6
    assert same(weights(trainer), straight(tmp_path))


def test_once_a_new_training_has_saved_it_is_the_newest(saved_by, out):
    saved_by("itself", until=7)
    with pytest.raises(Stopped):
        make(out, FailingLater).train()
    assert checkpoints(out) == [2]
    assert len(list(out.glob("_easyckpt-stale-*"))) == 3
    assert began(make(out), True) == 2


class Adding(Trainer):
    """Adds a file before the Trainer saves, and one after."""

    def _save_checkpoint(self, *args, **kwargs):
        directory = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        directory.mkdir(parents=True)
        (directory / "before.bin").write_bytes(b"before")
        super()._save_checkpoint(*args, **kwargs)
        (directory / "after.bin").write_bytes(b"after")


def test_what_the_program_adds_is_committed_with_it(out, sharded):
    make(out, Adding).train()
    assert checkpoints(out) == [2, 4, 6, 8]
    for path in out.glob("checkpoint-*"):
        listed = (path / "manifest.json").read_text()
        assert '"before.bin"' in listed
        assert '"after.bin"' in listed
    assert all(whole(out, step) for step in checkpoints(out))
    assert list(out.glob("_easyckpt-stale-*")) == []


def test_old_ones_that_cannot_be_removed_cost_space_and_no_training(out, sharded, caplog):
    failpoints.arm("retention.rename.before=error:EROFS")
    make(out, save_total_limit=1).train()
    assert checkpoints(out) == [8]  # the next save has made up for it
    assert "cannot be removed" in caplog.text
