"""Which checkpoints are made, which stay, and what becomes of a directory that is in the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
from typing import Any

import pytest
from transformers import Trainer

from easyckpt import SaveFailed, failpoints
from easyckpt.format.trainer_names import TrainerNaming
from tests.trainers.data import Sequences
from tests.trainers.semantics.trainings import (
    STEPS,
    At,
    Stopped,
    checkpoints,
    forget_memory,
    make,
    same,
    stop,
    weights,
    whole,
)


def test_every_save_that_is_asked_for_is_made(out):
    make(out, save_steps=1).train()
    assert checkpoints(out) == list(range(1, STEPS + 1))


def test_a_strategy_of_none_leaves_nothing(out):
    make(out, save_strategy="no").train()
    assert checkpoints(out) == []


def test_a_strategy_of_epochs(out):
    make(out, save_strategy="epoch", max_steps=-1, num_train_epochs=2).train()
    assert checkpoints(out) == [6, 12]


@pytest.mark.parametrize(("limit", "kept"), [(1, [2, 8]), (2, [2, 8]), (3, [2, 6, 8])])
def test_the_best_checkpoint_stays_and_counts(out, limit, kept):
    trainer = make(
        out,
        save_total_limit=limit,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="worth",
        greater_is_better=True,
        eval_dataset=Sequences(4, seed=1),
        compute_metrics=lambda prediction: {"worth": 1.0 / trainer.state.global_step},
    )
    seen = {}
    trainer.add_callback(At(2, lambda control: seen.update(weights(trainer))))
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(out / "checkpoint-2")
    assert same(weights(trainer), seen)
    left = checkpoints(out)
    assert left == ([2] if limit == 1 else kept)  # the Trainer itself removes the last one then


def judged(worths: dict[int, float]) -> tuple[dict[str, Any], list[Trainer]]:
    """Arguments of a Trainer (the first of the list) whose model is worth so much at these steps."""
    trainers: list[Trainer] = []
    arguments = {
        "eval_strategy": "steps", "load_best_model_at_end": True, "metric_for_best_model": "worth",
        "greater_is_better": True, "save_total_limit": 2, "eval_dataset": Sequences(4, seed=1),
        "compute_metrics": lambda prediction: {"worth": worths.get(trainers[0].state.global_step, 0.0)},
    }  # fmt: skip
    return arguments, trainers


def test_the_best_stays_also_where_a_resumed_run_is_preempted_at_once(out):
    arguments, trainers = judged({2: 9.0})
    trainers.append(make(out, eval_steps=2, callbacks=[At(7, stop)], **arguments))
    with pytest.raises(Stopped):
        trainers[0].train()
    assert checkpoints(out) == [2, 6]
    forget_memory()
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        trainers[0] = make(out, eval_steps=2, callbacks=[At(6, lambda control: signal.raise_signal(15))], **arguments)
        trainers[0].train(resume_from_checkpoint=True)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert trainers[0].state.global_step < STEPS
    assert checkpoints(out)[0] == 2


def test_the_best_is_the_one_that_was_saved(out):
    arguments, trainers = judged({2: 5.0, 3: 6.0, 5: 7.0})
    trainers.append(make(out, eval_steps=1, **arguments))
    trainers[0].train()
    assert checkpoints(out) == [2, 8]


def test_a_better_one_takes_the_place_of_the_best(out):
    arguments, trainers = judged({2: 5.0, 4: 6.0})
    trainers.append(make(out, eval_steps=2, **arguments))
    trainers[0].train()
    assert checkpoints(out) == [4, 8]


def test_what_the_options_keep_stays_beside_the_best(out):
    arguments, trainers = judged({2: 5.0})
    trainers.append(make(out, eval_steps=2, options={"keep_every": 4}, **arguments))
    trainers[0].train()
    assert checkpoints(out) == [2, 4, 8]


def test_a_number_that_is_needed_again_is_moved_aside(out):
    make(out, max_steps=4).train()
    first = (out / "checkpoint-4" / "model.safetensors").read_bytes()
    make(out, max_steps=4, seed=7, learning_rate=1e-3).train()
    assert checkpoints(out) == [2, 4]
    assert (out / "checkpoint-4" / "model.safetensors").read_bytes() != first
    aside = [name for name in os.listdir(out) if (TrainerNaming().parse_stale(name) or (0,))[0] == 4]
    assert [(out / name / "model.safetensors").read_bytes() for name in aside] == [first]


def test_what_is_in_the_way_stays_until_the_new_one_is_whole(out):
    make(out, max_steps=4, save_steps=4).train()
    failpoints.arm("commit.rename.before=error:EIO")
    with pytest.raises(SaveFailed):
        make(out, max_steps=4, save_steps=4, seed=7).train()
    assert checkpoints(out) == [4]


def test_a_whole_attempt_takes_no_place_of_the_trainers_own(out):
    make(out, max_steps=4, save_steps=4).train()
    attempt = json.loads((out / "checkpoint-4" / "manifest.json").read_text())["attempt"]
    shutil.copytree(out / "checkpoint-4", out / TrainerNaming().temporary(4, attempt))  # killed before its rename
    (out / "checkpoint-4" / "manifest.json").unlink()  # and the number was taken by the unwrapped Trainer then
    (out / "checkpoint-4" / "mine.txt").write_text("mine")
    make(out, save_steps=4).train(resume_from_checkpoint=True)
    assert whole(out, 4)
    assert len(list(out.glob("_easyckpt-stale-checkpoint-4*/mine.txt"))) == 1


def test_a_directory_of_the_users_in_the_way(out):
    def make_one(control):
        (out / "checkpoint-6").mkdir()
        (out / "checkpoint-6" / "mine.txt").write_text("mine")

    make(out, callbacks=[At(5, make_one)]).train()
    assert checkpoints(out) == [2, 4, 6, 8]
    assert whole(out, 6)
    assert len(list(out.glob("_easyckpt-stale-checkpoint-6*/mine.txt"))) == 1
