"""The checkpoint that the state calls its best, where a kill, or somebody, has taken it away."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from easyckpt import failpoints
from tests.trainers.data import Sequences
from tests.trainers.semantics.trainings import At, Stopped, checkpoints, forget_memory, make, same, weights, whole


def judged(out: Path, worths: dict[int, float], callbacks: Any = (), **arguments: Any) -> Trainer:
    """A Trainer whose model is worth so much at these steps."""
    settings: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "worth",
        "greater_is_better": True, "eval_dataset": Sequences(4, seed=1),
        "compute_metrics": lambda prediction: {"worth": worths.get(trainer.state.global_step, 0.0)},
    }  # fmt: skip
    trainer = make(out, callbacks=callbacks, **(settings | arguments))
    return trainer


def killed_while_flushing(out: Path, worths: dict[int, float], number: int, at: int) -> None:
    """Killed at step `at`, when the checkpoint `number` is still on its way."""
    child = os.fork()
    if child == 0:
        try:
            failpoints.arm(f"flush.begin@{number}=hold:{out}.held")
            waiting = At(3, lambda control: trainer._easyckpt.run.taking.drain())
            trainer = judged(out, worths, [waiting, At(at, lambda control: os.kill(os.getpid(), signal.SIGKILL))])
            trainer.train()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("at", [5, 7])  # memory may have gone past it by then; and has
def test_it_is_made_of_its_snapshot(out, tmp_path, at, caplog):
    worths = {2: 5.0, 4: 9.0}
    never_stopped = judged(tmp_path / "straight", worths)
    never_stopped.train()
    killed_while_flushing(out, worths, number=2, at=at)
    assert checkpoints(out) == [2]
    trainer = judged(out, worths)
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer.train(resume_from_checkpoint=True)
    assert caplog.text.count("the best checkpoint, of step 4, was not there yet") == 1 or at == 5
    assert trainer.state.best_model_checkpoint == str(out / "checkpoint-4")
    assert whole(out, 4)
    assert same(weights(trainer), weights(never_stopped))


@pytest.mark.parametrize(("tier", "gone", "best"), [("memory", 1, 2), ("storage", 1, 2), ("memory", 3, 8)])
def test_one_that_is_gone_gives_the_word_to_the_next(out, tier, gone, best, caplog):
    worths, seen = {2: 5.0, 4: 9.0, 8: 1.0}, {}

    def spoil(control):
        for step in (4, 2, 6)[:gone]:
            shutil.rmtree(out / f"checkpoint-{step}")
        raise Stopped

    at_two = At(2, lambda control: seen.update({2: weights(trainer)}))
    trainer = judged(out, worths, [at_two, At(7, spoil)], options={"on_save": "wait", "slots": 2})
    with pytest.raises(Stopped):
        trainer.train()
    if tier == "storage":
        forget_memory()
    trainer = judged(out, worths)
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer.train(resume_from_checkpoint=True)
    assert caplog.text.count("the best checkpoint, is not there") == 1
    assert trainer.state.best_model_checkpoint == str(out / f"checkpoint-{best}")
    assert trainer.state.best_metric == worths[best]
    assert trainer.state.best_global_step == best
    assert same(weights(trainer), seen.get(best, weights(trainer)))
