"""Data that are drawn: collators and items that ask the global generators."""

from __future__ import annotations

from tests.trainers.data import Masking, NoisySequences, Sequences
from tests.trainers.scenarios.table import (
    BATCH,
    BOUNDARY,
    EIGHT,
    LONG,
    PERSISTENT,
    RANDOM_WORKERS,
    TEN,
    WORKERS,
    Setup,
    scenario,
)


@scenario()
def mlm() -> Setup:
    """The collator draws from all three global generators, one batch ahead of the training."""
    return Setup(more={"data_collator": Masking()})


@scenario()
def mlm_ga2() -> Setup:
    """The same with steps of two batches."""
    return Setup({"gradient_accumulation_steps": 2}, more={"data_collator": Masking()})


@scenario(unlike_stock=RANDOM_WORKERS)
def mlm_w2() -> Setup:
    """The same in workers."""
    return Setup(WORKERS, more={"data_collator": Masking()})


@scenario()
def mlm_eval() -> Setup:
    """Evaluation draws as well, and leaves the training's generators where they would be without a stop."""
    return Setup(
        {"eval_strategy": "steps", "eval_steps": 4}, evaluation=Sequences(8), more={"data_collator": Masking()}
    )


@scenario()
def noise_eval() -> Setup:
    """What is evaluated is random, and is read by two workers."""
    evaluation = NoisySequences(10)
    return Setup({"eval_strategy": "steps", "eval_steps": 4, **WORKERS}, evaluation=evaluation)


@scenario()
def noise() -> Setup:
    """An item is another one at each reading."""
    return Setup(train=NoisySequences(LONG))


@scenario()
def noise_epochs() -> Setup:
    """It is in each epoch."""
    return Setup(train=NoisySequences(EIGHT))


@scenario(until=BOUNDARY)
def noise_bound() -> Setup:
    """And where the stop is between two epochs."""
    return Setup(train=NoisySequences(TEN))


@scenario()
def noise_ga2() -> Setup:
    """And with steps of two batches."""
    return Setup({"gradient_accumulation_steps": 2}, train=NoisySequences(7 * BATCH))


@scenario(unlike_stock=RANDOM_WORKERS)
def noise_w2() -> Setup:
    """And in workers."""
    return Setup(WORKERS, train=NoisySequences(LONG))


@scenario(unlike_stock=RANDOM_WORKERS)
def noise_w2_pers() -> Setup:
    """And in workers that live on through epochs."""
    return Setup(PERSISTENT, train=NoisySequences(EIGHT))
