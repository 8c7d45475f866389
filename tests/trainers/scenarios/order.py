"""Data in order: accumulation, epochs, samplers, and workers that read ahead."""

from __future__ import annotations

from tests.trainers import models
from tests.trainers.data import Padding, Sequences
from tests.trainers.scenarios.table import (
    BATCH,
    BOUNDARY,
    EIGHT,
    LONG,
    NOT_SEEDABLE,
    PERSISTENT,
    TEN,
    WORKERS,
    Setup,
    scenario,
)


@scenario()
def base() -> Setup:
    """Dropout goes on where it was, in the middle of the one pass over the data."""
    return Setup()


@scenario()
def llama() -> Setup:
    """Another architecture: rotary embeddings, grouped queries, untied weights."""
    return Setup(model=models.llama())


@scenario()
def ga2() -> Setup:
    """A step of two batches."""
    return Setup({"gradient_accumulation_steps": 2})


@scenario()
def ga2_rem() -> Setup:
    """Each epoch's last step has one batch instead of two."""
    return Setup({"gradient_accumulation_steps": 2}, train=Sequences(7 * BATCH))


@scenario(until=8, saved=5)
def ga2_bound() -> Setup:
    """Stopped between two such epochs."""
    return Setup({"gradient_accumulation_steps": 2}, train=Sequences(7 * BATCH))


@scenario(moment="on_substep_end")
def ga4_killed() -> Setup:
    """Killed between the batches of a step."""
    return Setup({"gradient_accumulation_steps": 4}, train=Sequences(EIGHT))


@scenario()
def epochs() -> Setup:
    """Shuffled epochs, stopped inside the second."""
    return Setup(train=Sequences(EIGHT))


@scenario()
def epochs_rem() -> Setup:
    """Each epoch's last batch is a smaller one."""
    return Setup(train=Sequences(EIGHT - 2))


@scenario()
def epochs_drop() -> Setup:
    """Each epoch's last batch is dropped."""
    return Setup({"dataloader_drop_last": True}, train=Sequences(EIGHT + 2))


@scenario(until=BOUNDARY)
def epochs_bound() -> Setup:
    """Stopped where the first epoch has ended and the second has not begun."""
    return Setup(train=Sequences(TEN))


@scenario(until=BOUNDARY - 1)
def epochs_last() -> Setup:
    """Stopped before the last batch of an epoch."""
    return Setup(train=Sequences(TEN))


@scenario()
def epochs_counted() -> Setup:
    """The length of the training is given in epochs, the last of them half a one."""
    return Setup({"max_steps": -1, "num_train_epochs": 2.5}, train=Sequences(EIGHT))


@scenario()
def data_seed() -> Setup:
    """The order of the data has a seed of its own."""
    return Setup({"data_seed": 5}, train=Sequences(EIGHT))


@scenario()
def seedable_off() -> Setup:
    """The sampler draws from torch's generator."""
    return Setup(NOT_SEEDABLE)


@scenario()
def seedable_off_epochs() -> Setup:
    """The sampler draws each epoch's order from torch's generator, between the dropout's draws."""
    return Setup(NOT_SEEDABLE, train=Sequences(EIGHT))


@scenario(until=BOUNDARY)
def seedable_off_bound() -> Setup:
    """The order of the next epoch is still to be drawn."""
    return Setup(NOT_SEEDABLE, train=Sequences(TEN))


@scenario()
def group_len() -> Setup:
    """Sequences of like lengths share a batch."""
    return Setup({"group_by_length": True}, train=Sequences(LONG, (4, 16)), more={"data_collator": Padding()})


@scenario(until=14)
def group_len_epochs() -> Setup:
    """They do in the second epoch too."""
    return Setup({"group_by_length": True}, train=Sequences(EIGHT, (4, 16)), more={"data_collator": Padding()})


@scenario(until=BOUNDARY)
def group_len_bound() -> Setup:
    """And where the stop is between two epochs."""
    return Setup({"group_by_length": True}, train=Sequences(TEN, (4, 16)), more={"data_collator": Padding()})


# -- workers -----------------------------------------------------------------------------------------------------------


@scenario()
def workers2() -> Setup:
    """Two processes read ahead."""
    return Setup(WORKERS)


@scenario()
def epochs_w2() -> Setup:
    """New workers in each epoch."""
    return Setup(WORKERS, train=Sequences(EIGHT))


@scenario()
def epochs_w2_pers() -> Setup:
    """The same workers in each epoch."""
    return Setup(PERSISTENT, train=Sequences(EIGHT))


@scenario(until=BOUNDARY)
def bound_w2_pers() -> Setup:
    """The same workers, stopped between two epochs."""
    return Setup(PERSISTENT, train=Sequences(TEN))
