"""Data without a length, read once or in several passes, and tables of the datasets library."""

from __future__ import annotations

from typing import Any

from tests.trainers.data import DrawnStream, EpochStream, Stream, sequences
from tests.trainers.scenarios.table import BATCH, BOUNDARY, EIGHT, LONG, TEN, WORKERS, Setup, scenario


@scenario()
def iter_once() -> Setup:
    """A data set without a length, longer than the training."""
    return Setup(train=Stream(LONG))


@scenario()
def iter_multi() -> Setup:
    """Several passes over a stream, which the Trainer counts as one epoch."""
    return Setup(train=Stream(EIGHT))


@scenario(until=BOUNDARY)
def iter_multi_bound() -> Setup:
    """Stopped between two passes."""
    return Setup(train=Stream(TEN))


@scenario()
def iter_multi_ga2() -> Setup:
    """Each pass ends with half a step."""
    return Setup({"gradient_accumulation_steps": 2}, train=Stream(7 * BATCH))


@scenario()
def iter_multi_epoch() -> Setup:
    """The stream is told its epoch."""
    return Setup(train=EpochStream(EIGHT))


@scenario()
def iter_drawn() -> Setup:
    """The stream draws its order, and noise, from the global generators."""
    return Setup(train=DrawnStream(LONG))


@scenario()
def iter_drawn_multi() -> Setup:
    """It does in each pass."""
    return Setup(train=DrawnStream(EIGHT))


@scenario()
def iter_drawn_w2() -> Setup:
    """Two workers draw, each by itself."""
    return Setup(WORKERS, train=DrawnStream(EIGHT))


@scenario(until=BOUNDARY)
def iter_drawn_bound() -> Setup:
    """The order of the next pass is still to be drawn."""
    return Setup(train=DrawnStream(TEN))


@scenario()
def iter_w2() -> Setup:
    """Two workers share the stream."""
    return Setup(WORKERS, train=Stream(LONG))


@scenario()
def iter_multi_w2() -> Setup:
    """They do in several passes."""
    return Setup(WORKERS, train=Stream(EIGHT))


def table_of(count: int) -> Any:
    from datasets import Dataset as Table

    items = [tokens.tolist() for tokens in sequences(count)]
    return Table.from_dict({"input_ids": items, "labels": items})


@scenario()
def hf_map() -> Setup:
    """A table of the datasets library."""
    return Setup(train=table_of(EIGHT))


@scenario()
def hf_iter() -> Setup:
    """The same as a stream with a shuffling buffer."""
    return Setup(train=table_of(LONG).to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=16))


@scenario()
def hf_iter_multi() -> Setup:
    """In each pass the buffer is shuffled otherwise."""
    return Setup(train=table_of(EIGHT).to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=16))


@scenario()
def hf_iter_multi_w2() -> Setup:
    """Two workers have a buffer each."""
    return Setup(WORKERS, train=table_of(EIGHT).to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=16))
