"""A training that goes on with other arguments, or on other ranks, than those it was stopped with."""

from __future__ import annotations

import logging

import pytest
import transformers

from easyckpt import WorldSizeChanged
from easyckpt.integrations.transformers import arguments
from tests.trainers.launch import run
from tests.trainers.semantics.trainings import STEPS, At, Stopped, forget_memory, make, stop

VERSION = transformers.__version__.partition(".")[0]


def test_other_ranks_are_told_what_a_trainers_user_can_do(out, tmp_path):
    words = [out, tmp_path / "heard"]
    ended = run(VERSION, words, ranks=2, beside=tmp_path / "said", job="tests.trainers.listening")
    assert ended.codes == [0, 0], ended.said
    forget_memory()
    with pytest.raises(WorldSizeChanged, match=r"saved by 2 ranks.*as many processes.*without TrainerWrapper") as told:
        make(out).train(resume_from_checkpoint=True)
    assert "from_pretrained" in str(told.value)
    trainer = make(out, wrap=False, max_steps=25, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-24"))
    assert trainer.state.global_step == 25


CHANGED = "arguments were changed"


@pytest.mark.parametrize(
    "change",
    [
        {"gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 3},
        {"seed": 7, "data_seed": 8},
        {"dataloader_num_workers": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_changed_arguments_are_named(out, caplog, change):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    trainer = make(out, **change)
    before = make(out, wrap=False).args
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer.train(resume_from_checkpoint=True)
    (said,) = [record.getMessage() for record in caplog.records if CHANGED in record.getMessage()]
    for name, new in change.items():
        assert f"{name} {getattr(before, name)!r} -> {new!r}" in said
    assert said.count("->") == len(change)
    assert trainer.state.global_step == STEPS


@pytest.mark.parametrize("old", [False, True])
def test_nothing_is_said_of_arguments_that_are_the_same(out, caplog, monkeypatch, old):
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        if old:  # as in a checkpoint of the time when they were not kept
            patch.setattr(arguments, "_NAMES", ())
        make(out, callbacks=[At(5, stop)]).train()
    forget_memory()
    trainer = make(out, **({"gradient_accumulation_steps": 2} if old else {"logging_steps": 3}))
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer.train(resume_from_checkpoint=True)
    assert "resumed from step 4" in caplog.text
    assert CHANGED not in caplog.text
