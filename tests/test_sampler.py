"""SkipBatchSampler: order from seed and epoch, ranks, skipping."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from easyckpt.errors import ConfigError, StateMismatch
from easyckpt.state.sampler import SkipBatchSampler


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def _epoch(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


def test_every_index_once_in_an_order_of_seed_and_epoch():
    sampler = SkipBatchSampler(10, 3, seed=5)
    first, second = _epoch(sampler, 0), _epoch(sampler, 1)
    assert [len(batch) for batch in first] == [3, 3, 3, 1]
    assert len(sampler) == 4
    for batches in (first, second):
        assert sorted(flat(batches)) == list(range(10))
    assert first != second
    assert _epoch(SkipBatchSampler(10, 3, seed=5), 1) == second  # epoch 1 is not a replay of epoch 0
    assert _epoch(SkipBatchSampler(10, 3, seed=6), 0) not in (first, second)
    assert _epoch(SkipBatchSampler(10, 3, shuffle=False), 7) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_global_generators_are_left_alone():
    before = torch.get_rng_state()
    _epoch(SkipBatchSampler(10, 3), 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 12, 13, 25])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_get_equal_batches_and_padding_repeats_the_beginning(length, drop_last):
    ranks = [SkipBatchSampler(length, 2, drop_last=drop_last, rank=rank, world_size=4) for rank in range(4)]
    batches = [_epoch(sampler, 2) for sampler in ranks]
    shapes = [[len(batch) for batch in rank] for rank in batches]
    assert all(shape == shapes[0] for shape in shapes)
    assert all(len(sampler) == len(shapes[0]) for sampler in ranks)
    order = flat(_epoch(SkipBatchSampler(length, 1), 2))
    # what all ranks read in one step is one stretch of the order
    read = []
    for step in range(len(shapes[0])):
        for place in range(shapes[0][step]):
            read += [batches[rank][step][place] for rank in range(4)]
    if drop_last:
        assert read == order[: length // 8 * 8]
    else:
        padded = (order * 4)[: (length + 3) // 4 * 4] if length else []
        assert read == padded


def test_global_batch_does_not_depend_on_the_number_of_ranks():
    one = _epoch(SkipBatchSampler(24, 8, rank=0, world_size=1), 1)
    four = [_epoch(SkipBatchSampler(24, 2, rank=rank, world_size=4), 1) for rank in range(4)]
    assert [sorted(flat(rank[step] for rank in four)) for step in range(3)] == [sorted(batch) for batch in one]


def test_rank_from_environment(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    sampler = SkipBatchSampler(9, 1, shuffle=False)
    assert list(sampler) == [[2], [5], [8]]
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ConfigError, match="RANK"):
        SkipBatchSampler(9, 1)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"length": -1}, "length"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"seed": "x"}, "seed"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"world_size": 0}, "world_size"),
        ({"rank": -1}, "rank"),
    ],
)
def test_bad_arguments_name_the_field(arguments, field):
    with pytest.raises(ConfigError, match=f"^{field}:"):
        SkipBatchSampler(**{"length": 4, "batch_size": 2, **arguments})
    with pytest.raises(ConfigError, match=r"^epoch:"):
        SkipBatchSampler(4, 2).set_epoch(-1)


class _Recording(Dataset):
    def __init__(self):
        self.read = []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.read.append(index)
        return index


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_alone_as_a_component(stop):
    straight = _epoch(SkipBatchSampler(10, 3, seed=1), 4)
    sampler = SkipBatchSampler(10, 3, seed=1)
    sampler.set_epoch(4)
    for number, _ in enumerate(DataLoader(_Recording(), batch_sampler=sampler), start=1):
        if number == stop:
            state = sampler.state_dict()
            break
    resumed, data = SkipBatchSampler(10, 3, seed=1), _Recording()
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.consumed) == (4, stop)
    resumed.set_epoch(4)
    rest = [batch.tolist() for batch in DataLoader(data, batch_sampler=resumed)]
    assert rest == straight[stop:]
    assert data.read == flat(straight[stop:])  # consumed batches are not read
    assert _epoch(resumed, 5) == _epoch(sampler, 5)
    assert list(resumed) == _epoch(sampler, 5)  # a further pass of the same epoch is a whole one


def test_other_settings_are_refused_and_nothing_changes():
    state = SkipBatchSampler(10, 3, seed=1).state_dict() | {"epoch": 3, "consumed": 2}
    sampler = SkipBatchSampler(10, 4, seed=2)
    with pytest.raises(StateMismatch, match=r"batch_size 3 -> 4, seed 1 -> 2"):
        sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.consumed) == (0, 0)
    assert _epoch(sampler, 0) == _epoch(SkipBatchSampler(10, 4, seed=2), 0)
