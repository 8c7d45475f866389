"""Passes over the data that end where nobody could have reckoned: cut short, or with half a step."""

from __future__ import annotations

from tests.trainers.data import DrawnStream, NoisySequences, Sequences
from tests.trainers.scenarios.table import BATCH, BOUNDARY, PERSISTENT, RANDOM_WORKERS, TEN, WORKERS, Setup, scenario

EPOCHWISE = {"save_strategy": "epoch", "logging_strategy": "epoch"}


def cut(train: Sequences, **arguments: object) -> Setup:
    """Three epochs of ten steps, of which a callback leaves out the last three."""
    from transformers import TrainerCallback

    class Cut(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 7 == 0

    length = {"max_steps": -1, "num_train_epochs": 3}
    more = {"callbacks": [Cut()]}
    return Setup({**EPOCHWISE, **length, **arguments}, train=train, more=more)


@scenario(until=14, saved=14, steps=21)
def cut_short() -> Setup:
    """A callback ends each epoch early, and the stop is where it has done so."""
    return cut(Sequences(TEN))


@scenario(until=17, saved=14, steps=21)
def cut_short_inside() -> Setup:
    """The same, stopped inside the epoch that follows."""
    return cut(Sequences(TEN))


@scenario(until=14, saved=14, steps=21, unlike_stock=RANDOM_WORKERS)
def cut_short_w2_pers() -> Setup:
    """The same workers in each epoch have read ahead what is not trained on."""
    return cut(NoisySequences(TEN), **PERSISTENT)


def half() -> Setup:
    strategies = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    accumulation = {"gradient_accumulation_steps": 2}
    return Setup({**strategies, **accumulation}, train=DrawnStream(7 * BATCH), evaluation=Sequences(8))


@scenario(until=12, saved=12)
def half_step() -> Setup:
    """Each pass over a stream ends with half a step, and with a checkpoint; stopped right behind one."""
    return half()


@scenario(until=13, saved=12)
def half_step_inside() -> Setup:
    """The same, stopped inside the pass that follows."""
    return half()


@scenario(until=BOUNDARY, unlike_stock=RANDOM_WORKERS)
def noise_w2_bound() -> Setup:
    """Workers draw, each by itself, and the stop is between two epochs."""
    return Setup(WORKERS, train=NoisySequences(TEN))


@scenario(until=BOUNDARY, unlike_stock=RANDOM_WORKERS)
def noise_w2_pers_bound() -> Setup:
    """The same workers in each epoch do."""
    return Setup(PERSISTENT, train=NoisySequences(TEN))
