"""A Trainer that is wrapped is the one that it was: its options, its own methods, its calls of train()."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import Trainer

from easyckpt import ConfigError
from easyckpt.integrations.transformers import TrainerWrapper
from tests.trainers.models import gpt2
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


def test_the_same_object_and_once(out):
    trainer = make(out, wrap=False)
    wrapped = TrainerWrapper(trainer, slots=3)
    assert wrapped is trainer
    assert isinstance(trainer, Trainer)
    assert type(trainer).__name__ == "Trainer"
    kind, callbacks = type(trainer), list(trainer.callback_handler.callbacks)
    assert TrainerWrapper(trainer) is trainer
    assert (type(trainer), trainer.callback_handler.callbacks) == (kind, callbacks)


@pytest.mark.parametrize(
    "options",
    [{"slotz": 3}, {"slots": 0}, {"on_save": "now"}, {"max_ckpt_num": 3}, {"save_storage_interval": 5}],
)
def test_wrong_options_change_nothing(out, options):
    trainer = make(out, wrap=False)
    kind = type(trainer)
    with pytest.raises((ConfigError, TypeError)):
        TrainerWrapper(trainer, **options)
    assert type(trainer) is kind
    with pytest.raises(ConfigError, match="Trainer"):
        TrainerWrapper(object())


def test_overridden_methods_are_called(out):
    called: list[str] = []

    class Own(Trainer):
        def compute_loss(self, *args, **kwargs):
            called.append("compute_loss")
            return super().compute_loss(*args, **kwargs)

        def get_train_dataloader(self):
            called.append("get_train_dataloader")
            return super().get_train_dataloader()

        def _save_checkpoint(self, *args, **kwargs):
            called.append("_save_checkpoint")
            super()._save_checkpoint(*args, **kwargs)
            beside = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            (beside / "more").mkdir()
            (beside / "more" / "own.bin").write_bytes(b"%d" % self.state.global_step)

        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            (Path(output_dir) / "note.txt").write_text(str(self.state.global_step))

    trainer = make(out, Own)
    trainer.train()
    assert set(called) == {"compute_loss", "get_train_dataloader", "_save_checkpoint"}
    assert called.count("_save_checkpoint") == 4
    notes = {step: (out / f"checkpoint-{step}" / "note.txt").read_text() for step in checkpoints(out)}
    assert notes == {2: "2", 4: "4", 6: "6", 8: "8"}
    assert all(whole(out, step) for step in notes)
    assert all((out / f"checkpoint-{step}" / "more" / "own.bin").read_text() == str(step) for step in notes)


def test_methods_that_load_by_themselves_are_named(out, caplog):
    class Own(Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
            raise AssertionError("it is given what only the Trainer's own loading reads")

    with pytest.raises(Stopped):
        make(out, Own, callbacks=[At(5, stop)]).train()
    with caplog.at_level(logging.WARNING, "easyckpt"):
        make(out, Own).train(resume_from_checkpoint=True)
    assert "Own overrides _load_from_checkpoint" in caplog.text


def test_trained_twice(out, tmp_path):
    trainer = make(out)
    trainer.train()
    trainer.train()
    other = make(tmp_path / "stock", wrap=False, save_strategy="no")
    other.train()
    other.train()
    assert same(weights(trainer), weights(other))


def test_a_batch_size_that_is_found(out):
    failed = []

    class Hungry(Trainer):
        def training_step(self, *args, **kwargs):
            if not failed:
                failed.append(self._train_batch_size)
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    trainer = make(out, Hungry, auto_find_batch_size=True)
    trainer.train()
    assert failed
    assert trainer.state.global_step == STEPS
    assert checkpoints(out) == [2, 4, 6, 8]


def test_a_batch_size_that_is_found_after_a_resume(out):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(7, stop)]).train()
    failed = []

    class Hungry(Trainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == 7 and not failed:
                failed.append(self._train_batch_size)
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    forget_memory()
    trainer = make(out, Hungry, auto_find_batch_size=True)
    begun = []
    trainer.add_callback(At(6, lambda control: begun.append(6)))
    trainer.train(resume_from_checkpoint=True)
    assert failed
    assert trainer.state.global_step == STEPS
    assert begun == [6, 6]


def plain_gpt2():
    return gpt2()


def test_a_model_that_is_made_anew(out, tmp_path):
    with pytest.raises(Stopped):
        make(out, model_init=plain_gpt2, callbacks=[At(5, stop)]).train()
    forget_memory()
    trainer = make(out, model_init=plain_gpt2)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path, model_init=plain_gpt2))
