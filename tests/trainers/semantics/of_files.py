"""What is in a checkpoint's directory, and who can read it."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from easyckpt import DamagedCheckpoint
from tests.trainers.models import gpt2
from tests.trainers.semantics.trainings import (
    STEPS,
    STOCK_FILES,
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


def test_the_layout_is_the_frameworks(out, tmp_path):
    trainer = make(out, save_total_limit=2)
    trainer.train()
    assert checkpoints(out) == [6, 8]
    assert {path.name for path in (out / "checkpoint-8").iterdir()} == STOCK_FILES | {"manifest.json"}
    assert [name for name in os.listdir(out) if not name.startswith(("_easyckpt", "checkpoint-"))] == []
    loaded = GPT2LMHeadModel.from_pretrained(out / "checkpoint-8")
    assert same(loaded.state_dict(), weights(trainer))
    assert same(weights(trainer), straight(tmp_path))


def test_files_hold_what_the_trainer_itself_would_have_written(out, tmp_path):
    make(out).train()
    make(tmp_path / "stock", wrap=False).train()
    ours, theirs = out / "checkpoint-8", tmp_path / "stock" / "checkpoint-8"
    for name in ("optimizer.pt", "scheduler.pt"):
        assert equal(torch.load(ours / name, weights_only=True), torch.load(theirs / name, weights_only=True)), name
    one, other = (torch.load(path / "rng_state.pth", weights_only=False) for path in (ours, theirs))
    assert equal(one, other)
    one, other = (json.loads((path / "trainer_state.json").read_text()) for path in (ours, theirs))
    for state in (one, other):
        for entry in state["log_history"]:
            entry.pop("step_time", None)
    assert one == other


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "tolist"):
        return one.tolist() == other.tolist()
    return one == other


def test_the_stock_trainer_resumes_from_ours(out, tmp_path):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(6, stop)]).train()
    trainer = make(out, wrap=False)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path))


def test_we_resume_from_the_stock_trainers(out, tmp_path, caplog):
    with pytest.raises(Stopped):
        make(out, wrap=False, callbacks=[At(5, stop)]).train()
    trainer = make(out)
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer.train(resume_from_checkpoint=True)
    assert "written by the Trainer itself" in caplog.text
    assert same(weights(trainer), straight(tmp_path))
    assert checkpoints(out) == [2, 4, 6, 8]
    assert not (out / "checkpoint-4" / "manifest.json").exists()
    assert (out / "checkpoint-6" / "manifest.json").exists()


def test_files_added_to_a_checkpoint_do_not_spoil_it(out):
    make(out).train()
    (out / "checkpoint-8" / "README.md").write_text("the best one")
    assert whole(out, 8)


def test_a_model_only_is_no_state_to_go_on_from(out):
    with pytest.raises(Stopped):
        make(out, save_only_model=True, callbacks=[At(5, stop)]).train()
    assert {path.name for path in (out / "checkpoint-4").iterdir()} == STOCK_FILES - {
        "optimizer.pt", "scheduler.pt", "rng_state.pth",
    } | {"manifest.json"}  # fmt: skip
    forget_memory()
    with pytest.raises(DamagedCheckpoint, match="save_only_model"):
        make(out).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("how", ["another order", "pickles"])
def test_weights_of_another_step_are_in_no_checkpoint(out, tmp_path, how):
    """Files with copies of weights are made when the Trainer saves; the end of a job commits other steps too."""
    if how == "pickles" and "save_safetensors" not in TrainingArguments.__dataclass_fields__:
        pytest.skip("this version writes no pickles")

    def leave(control):
        raise SystemExit(0)

    def begun(**arguments):
        trainer = make(out, save_steps=4, **arguments, **({"save_safetensors": False} if how == "pickles" else {}))
        if how == "another order":
            weight = trainer.model.transformer.h[0].mlp.c_fc.weight
            weight.data = weight.data.t().contiguous().t()
        return trainer

    with pytest.raises(SystemExit):
        begun(callbacks=[At(6, leave)]).train()
    names = {path.name for path in (out / "checkpoint-4").iterdir()}
    left_out = names - {path.name for path in (out / "checkpoint-6").iterdir()}
    assert left_out == {"model.safetensors" if how == "another order" else "pytorch_model.bin"}
    assert whole(out, 6)
    forget_memory()
    trainer = begun()
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.log_history[0]["step"] == 1
    assert len(trainer.state.log_history) == STEPS + 1
    assert same(weights(trainer), straight(tmp_path))


class Transposed:
    """A model one of whose weights lies transposed in memory, so that saving it makes a copy."""

    def __new__(cls):
        model = gpt2()
        weight = model.transformer.h[0].mlp.c_fc.weight
        weight.data = weight.data.t().contiguous().t()
        return model


class Ends(TrainerCallback):
    """A clean end in the middle: the newest snapshot is committed, of a step that was not due."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise SystemExit(0)


def test_weights_of_another_step_are_left_out_rather_than_stored(out, tmp_path):
    with pytest.raises(SystemExit):
        make(out, model_init=Transposed, callbacks=[Ends()]).train()
    assert checkpoints(out) == [2, 4, 5]
    assert (out / "checkpoint-4" / "model.safetensors").exists()
    assert not (out / "checkpoint-5" / "model.safetensors").exists()
    assert (out / "checkpoint-5" / "training_args.bin").exists()
    assert whole(out, 5)
    forget_memory()
    trainer = make(out, model_init=Transposed)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path, model_init=Transposed))
    assert same(GPT2LMHeadModel.from_pretrained(out / "checkpoint-8").state_dict(), weights(trainer))


def test_weights_that_torch_save_writes(out, tmp_path):
    """As the Trainer itself does with save_safetensors=False, up to 4.57."""

    class Old(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            torch.save(self.model.state_dict(), os.path.join(output_dir, "pytorch_model.bin"))

    with pytest.raises(SystemExit):
        make(out, Old, callbacks=[Ends()]).train()
    forget_memory()
    trainer = make(out, Old, max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    for name in ("checkpoint-5", "checkpoint-4"):
        stored = torch.load(out / name / "pytorch_model.bin", weights_only=True)
        assert same(stored, GPT2LMHeadModel.from_pretrained(out / name).state_dict()), name
    assert same(stored, weights(trainer)) is False
    assert same(torch.load(out / "checkpoint-5" / "pytorch_model.bin", weights_only=True), weights(trainer))
