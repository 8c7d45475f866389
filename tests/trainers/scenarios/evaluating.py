"""Logging, evaluating and saving, and kills within an evaluation."""

from __future__ import annotations

from tests.trainers.data import Sequences
from tests.trainers.scenarios.table import BOUNDARY, EIGHT, SAVE, TEN, Setup, scenario


@scenario()
def log4() -> Setup:
    """The loss logged at step 16 is the mean since step 12, the one at 12 since 8: it counts steps before the stop."""
    return Setup({"logging_steps": 4})


@scenario()
def log7() -> Setup:
    """The loss is logged more rarely than checkpoints are saved."""
    return Setup({"logging_steps": 7})


@scenario()
def tokens_seen() -> Setup:
    """Counted tokens go on."""
    return Setup({"include_num_input_tokens_seen": True})


@scenario()
def eval3() -> Setup:
    """Evaluation between the saves, and at the step after which the job is killed."""
    return Setup({"eval_strategy": "steps", "eval_steps": 3}, evaluation=Sequences(10, seed=1))


@scenario(until=11, moment="on_prediction_step")
def eval_killed() -> Setup:
    """Killed in the middle of an evaluation."""
    return Setup({"eval_strategy": "steps", "eval_steps": 11}, evaluation=Sequences(10, seed=1))


@scenario(until=BOUNDARY)
def eval_epoch() -> Setup:
    """Evaluated, logged and saved where an epoch ends, and killed there."""
    strategies = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
    return Setup(strategies, train=Sequences(TEN), evaluation=Sequences(10, seed=1))


@scenario(until=BOUNDARY, moment="on_prediction_step", saved=None)
def eval_epoch_killed() -> Setup:
    """Killed in the middle of the evaluation at an epoch's end: it is not left out afterwards."""
    strategies = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    return Setup(strategies, train=Sequences(TEN), evaluation=Sequences(10, seed=1))


@scenario(steps=14)
def early() -> Setup:
    """Stops early, at the step at which it would have without a kill: the count of vain evaluations is state."""
    from transformers import EarlyStoppingCallback

    judged = {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    stop = EarlyStoppingCallback(early_stopping_patience=6, early_stopping_threshold=10.0)
    arguments = {"eval_strategy": "steps", "eval_steps": 2, **judged}
    return Setup(arguments, evaluation=Sequences(8, seed=1), more={"callbacks": [stop]})


@scenario()
def best() -> Setup:
    """Ends with the best model, which was best before the kill: its checkpoint is kept."""
    judged = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 2}
    arguments = {"eval_strategy": "steps", "eval_steps": SAVE, "learning_rate": 3e-2, **judged}
    return Setup(arguments, evaluation=Sequences(8, seed=1))


@scenario()
def best_last() -> Setup:
    """Ends with the best model, which comes after the kill; one checkpoint is kept."""
    judged = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 1}
    arguments = {"eval_strategy": "steps", "eval_steps": SAVE, "learning_rate": 1e-3, **judged}
    return Setup(arguments, train=Sequences(EIGHT), evaluation=Sequences(EIGHT))


@scenario(saved=12)
def best_saved() -> Setup:
    """Only what is best is saved."""
    judged = {"save_strategy": "best", "metric_for_best_model": "eval_loss", "greater_is_better": False}
    arguments = {"eval_strategy": "steps", "eval_steps": 4, "learning_rate": 1e-3, **judged}
    return Setup(arguments, train=Sequences(EIGHT), evaluation=Sequences(EIGHT))


@scenario()
def limit1() -> Setup:
    """One checkpoint is kept."""
    return Setup({"save_total_limit": 1})


@scenario(saved=None)
def never_saved() -> Setup:
    """Nothing goes to storage on the way: memory alone brings the job back."""
    return Setup({"save_strategy": "no"})
