"""A subclass may override what it likes of saving, resuming and the loop: it works, or a warning names the method."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from transformers import Trainer
from transformers.trainer_callback import TrainerState

from easyckpt.integrations.transformers import TrainerWrapper
from easyckpt.integrations.transformers.overridden import LOADING, SAVING
from tests.trainers.data import Sequences
from tests.trainers.semantics.trainings import (
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

#: Called as by the Trainer itself.
CALLED = {
    "train", "_inner_training_loop", "_init_training_state", "_prepare_for_training", "_run_epoch",
    "_finalize_training", "training_step", "_maybe_log_save_evaluate", "set_initial_training_values",
    "evaluation_loop", "get_train_dataloader", "_save_checkpoint", "_determine_best_metric", "_load_best_model",
    "_load_callback_state", "save_model", "_save", "store_flos",
}  # fmt: skip
#: Other calls of the user's, steps of what is named already, uploads (of_events), other evaluation, searches.
ELSEWHERE = {
    "save_state", "save_metrics", "compare_trainer_and_checkpoint_args", "_issue_warnings_after_load",
    "_push_from_checkpoint", "prediction_loop", "_tune_save_checkpoint",
}  # fmt: skip
#: The Trainer's loop itself asks these once more when it ends.
AT_THE_END = {"_get_output_dir", "_sorted_checkpoints"}
PATH = re.compile(r"sav|load(?!er)|checkpoint|rotat|loop|epoch|training|^train$|best|flos|output_dir|rng|scaler")


def test_every_method_of_saving_resuming_and_the_loop_is_known_here():
    there = {name for name, value in vars(Trainer).items() if callable(value) and PATH.search(name)}
    known = CALLED | ELSEWHERE | {*LOADING, *SAVING}
    assert not there - known - {"_sync_replicated_trainable_parameters"}


def overriding(names, method) -> type:
    return type("Own", (Trainer,), {name: method(name) for name in names if name in vars(Trainer)})


def test_what_calls_the_trainers_own_is_called_and_changes_nothing(out, tmp_path, caplog):
    called = set()

    def method(name):
        def call(self, *args, **kwargs):
            called.add(name)
            return getattr(super(own, self), name)(*args, **kwargs)

        return call

    own = overriding(CALLED, method)
    judged = {
        "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "eval_dataset": Sequences(4, seed=1)
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "easyckpt"):
        with pytest.raises(Stopped):
            make(out, own, callbacks=[At(5, stop)], **judged).train()
        trainer = make(out, own, **judged)
        trainer.train(resume_from_checkpoint=True)
    assert called == CALLED & vars(Trainer).keys()
    named = [record.getMessage() for record in caplog.records if "Own" in record.getMessage()]
    assert len(named) == 1
    assert named[0].startswith("Own overrides train, _inner_training_loop, which is handed a directory")
    assert checkpoints(out) == [2, 4, 6, 8]
    assert all(whole(out, step) for step in checkpoints(out))
    other = make(tmp_path / "straight", wrap=False, **judged)
    other.train()
    assert same(weights(trainer), weights(other))


def test_what_is_never_called_is_named(out, caplog):
    def method(name):
        def call(self, *args, **kwargs):
            if name in AT_THE_END or args == (None,):  # (up to 5.0 also where nothing is resumed)
                return getattr(super(own, self), name)(*args, **kwargs)
            raise AssertionError(name)

        return call

    own = overriding([*SAVING, *LOADING], method)
    with caplog.at_level(logging.WARNING, "easyckpt"):
        with pytest.raises(Stopped):
            make(out, own, save_total_limit=2, callbacks=[At(5, stop)]).train()
        forget_memory()
        make(out, own, save_total_limit=2).train(resume_from_checkpoint=True)
    for name in {*SAVING, *LOADING} & vars(Trainer).keys():
        assert re.search(rf"Own overrides [^:]*\b{name}\b", caplog.text), name
    assert checkpoints(out) == [6, 8]


class SavesByItself(Trainer):
    def _save_checkpoint(self, *args, **kwargs):
        path = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}" / "own.bin"
        if self.state.global_step != 4:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"own")


def test_a_saving_of_its_own_is_left_alone_and_named_once(out, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "easyckpt"), pytest.raises(Stopped):
        make(out, SavesByItself, callbacks=[At(5, stop)]).train()
    assert caplog.text.count("SavesByItself._save_checkpoint has not called super()") == 1
    assert [str(path.relative_to(out)) for path in out.glob("checkpoint-*/*")] == ["checkpoint-2/own.bin"]
    assert not (out / "checkpoint-4").exists()
    trainer = make(out, SavesByItself)
    with caplog.at_level(logging.INFO, "easyckpt"):
        trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path))
    assert [entry["step"] for entry in trainer.state.log_history[:8]] == list(range(1, 9)), "memory was gone on from"


def test_a_saving_of_its_own_is_named_where_the_trainer_saves_too(out, sharded, caplog):
    with caplog.at_level(logging.WARNING, "easyckpt"):
        make(out, SavesByItself).train()
    assert caplog.text.count("SavesByItself._save_checkpoint has not called super()") == 1


def test_what_stands_in_the_place_of_small_methods_works(out, tmp_path):
    seen = []

    class Own(Trainer):
        def _load_best_model(self):
            seen.append(whole(out, 8))

        def _load_callback_state(self):
            seen.append("state")

    judged = {
        "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "eval_dataset": Sequences(4, seed=1)
    }  # fmt: skip
    with pytest.raises(Stopped):
        make(out, Own, callbacks=[At(7, stop)], **judged).train()
    trainer = make(out, Own, **judged)
    trainer.train(resume_from_checkpoint=True)
    assert seen == ["state", True]
    other = make(tmp_path / "straight", Own, wrap=False, **judged)
    other.train()
    assert same(weights(trainer), weights(other))


def test_a_step_without_the_trainers_logging_is_snapshotted(out, tmp_path, caplog):
    class Own(Trainer):
        def _maybe_log_save_evaluate(self, *args, **kwargs):
            pass

    with caplog.at_level(logging.WARNING, "easyckpt"):
        with pytest.raises(Stopped):
            make(out, Own, callbacks=[At(5, stop)]).train()
        trainer, begun = make(out, Own), []
        trainer.add_callback(At(5, begun.append))
        trainer.train(resume_from_checkpoint=True)
    assert begun
    assert "Own" not in caplog.text
    assert same(weights(trainer), straight(tmp_path))


class LoopsByItself(Trainer):
    """As far as a loop has to go to be heard."""

    def _inner_training_loop(self, *args, **kwargs):
        loader = self.get_train_dataloader()
        self.create_optimizer_and_scheduler(3)
        self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.state = TrainerState(max_steps=3, num_train_epochs=1)
        self.current_gradient_accumulation_steps = 1
        self._total_loss_scalar, self._globalstep_last_logged = 0.0, 0
        self.callback_handler.on_train_begin(self.args, self.state, self.control)
        for _, inputs in zip(range(3), loader, strict=False):
            self.callback_handler.on_step_begin(self.args, self.state, self.control)
            self.training_step(self.model_wrapped, inputs)
            self.optimizer.step()
            self.state.global_step += 1
            self.callback_handler.on_step_end(self.args, self.state, self.control)


def test_a_loop_of_its_own_is_named(out, caplog):
    with caplog.at_level(logging.WARNING, "easyckpt"):
        make(out, LoopsByItself).train()
    assert caplog.text.count("LoopsByItself._inner_training_loop does not call super()._inner_training_loop()") == 1
    assert caplog.text.count("has trained step 1 without calling _maybe_log_save_evaluate") == 1


@pytest.mark.skipif(not hasattr(Trainer, "_run_epoch"), reason="this version's loop is one method")
def test_an_epoch_of_its_own_is_named(out, caplog):
    class Own(Trainer):
        def _run_epoch(self, *args, **kwargs):
            self.callback_handler.on_step_begin(self.args, self.state, self.control)
            raise Stopped

    with caplog.at_level(logging.WARNING, "easyckpt"), pytest.raises(Stopped):
        make(out, Own).train()
    assert caplog.text.count("Own._run_epoch does not call super()._run_epoch()") == 1


def test_a_train_of_its_own_is_named(out, caplog):
    class Own(Trainer):
        def train(self, *args, **kwargs):
            return 7

    with caplog.at_level(logging.WARNING, "easyckpt"):
        assert make(out, Own).train() == 7
    assert "Own.train() has ended without the Trainer's own training" in caplog.text


def test_a_method_that_is_set_on_the_object_is_named(out, caplog):
    trainer = make(out, wrap=False)
    trainer.get_train_dataloader = trainer.get_train_dataloader
    with caplog.at_level(logging.WARNING, "easyckpt"):
        TrainerWrapper(trainer).train()
    assert caplog.text.count("get_train_dataloader is set on the Trainer object itself") == 1
