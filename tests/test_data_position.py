"""DataPosition: straight(N) == stop-at-k + resume(N) for data order, data randomness and all later global draws.

A stop is simulated in one process: a snapshot holds the position's state and all global generators; the resumed run
gets a new loader, a new data set and generators that stand elsewhere.
"""

from __future__ import annotations

import copy
import itertools
import random

import numpy
import pytest
import torch
from support.images import image_of
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from easyckpt.errors import ConfigError, DamagedCheckpoint, StateMismatch, UsageError
from easyckpt.state.apply import check_all
from easyckpt.state.capture import StateCapture
from easyckpt.state.data_position import DataComponent, DataPosition
from easyckpt.state.sampler import SkipBatchSampler

EPOCHS = 3
LENGTH = 11
BATCH = 3  # the last batch is short


def _draw():
    return (torch.rand(1).item(), random.random(), float(numpy.random.rand()))


class Noisy(Dataset):
    """Every item draws from all three global generators."""

    def __init__(self, length=LENGTH):
        self.length, self.read = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return (index, *_draw())


class NoisyAtOnce(Noisy):
    def __getitems__(self, indices):
        assert type(indices) is list  # nothing of ours reaches the data set
        return [self[index] for index in indices]


class OwnGenerator(Noisy):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def __getitem__(self, index):
        return (*super().__getitem__(index), torch.rand(1, generator=self.generator).item())


class Stream(IterableDataset):
    """Order drawn from the global generators when a pass begins, other in each epoch."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        order = torch.randperm(LENGTH).tolist()
        shift = int(numpy.random.randint(1000)) + random.randrange(1000)
        for item in order[first::step]:
            yield (item + 100 * self.epoch, shift)


class Counting(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter(range(LENGTH)[info.id :: info.num_workers])


class NumpySampler(Sampler):
    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(numpy.random.permutation(LENGTH).tolist())


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


LOADERS = {
    "shuffle": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True),
    "sequential": lambda: DataLoader(Noisy(), batch_size=BATCH),
    "drop_last": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True, drop_last=True),
    "getitems": lambda: DataLoader(NoisyAtOnce(), batch_size=BATCH, shuffle=True),
    "skip sampler": lambda: DataLoader(Noisy(), batch_sampler=SkipBatchSampler(LENGTH, BATCH, seed=1)),
    "own generator": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True, generator=generator()),
    "sampler's generator": lambda: DataLoader(
        Noisy(),
        batch_sampler=BatchSampler(
            RandomSampler(range(LENGTH), replacement=True, num_samples=LENGTH, generator=generator()), BATCH, True
        ),
    ),
    "replacement": lambda: DataLoader(
        Noisy(), batch_size=BATCH, sampler=RandomSampler(range(LENGTH), replacement=True, num_samples=70)
    ),
    "numpy sampler": lambda: DataLoader(Noisy(), batch_size=BATCH, sampler=NumpySampler()),
    "no batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "data set's generator": lambda: DataLoader(OwnGenerator(), batch_size=BATCH, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "stream, no batches": lambda: DataLoader(Stream(), batch_size=None),
    "not a loader": Stream,
    "workers": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=2),
    "workers, getitems": lambda: DataLoader(NoisyAtOnce(), batch_size=BATCH, shuffle=True, num_workers=2),
    "workers, own generator": lambda: DataLoader(
        Noisy(), batch_size=BATCH, shuffle=True, num_workers=2, generator=generator()
    ),
    "workers, skip sampler": lambda: DataLoader(
        Noisy(), batch_sampler=SkipBatchSampler(LENGTH, BATCH, seed=1), num_workers=2, prefetch_factor=1
    ),
    "workers, no batches": lambda: DataLoader(Noisy(6), batch_size=None, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True),
    "persistent, own generator": lambda: DataLoader(
        Noisy(), batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True, generator=generator()
    ),
    "persistent, stream": lambda: DataLoader(Counting(), batch_size=BATCH, num_workers=2, persistent_workers=True),
    "workers, stream": lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=2),
}


def plain(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [plain(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


def rng():
    return (torch.get_rng_state(), random.getstate(), numpy.random.get_state())


def set_rng(states):
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


def scatter(seed):
    """Generators as they stand in a process that knows nothing of the snapshot."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


class Run:
    """A training loop in small. `log` gets everything that must be equal; `snapshots` one entry per step."""

    def __init__(self, make_loader, snapshot=None, first_epoch=0, draws_between=0):
        self.log, self.snapshots, self.position = [], [], DataPosition()
        scatter(0 if snapshot is None else 77)
        loader, restore = make_loader(), None
        if snapshot is not None:
            self.position.load_state_dict(snapshot["position"])
            set_rng(snapshot["rng"])

            def restore():
                set_rng(snapshot["rng"])

            self.log += snapshot["log"]
        for epoch in range(first_epoch, EPOCHS):
            for _ in range(draws_between):
                _draw()
            batches = self.position.batches(loader, epoch, "train", restore)
            for batch in batches:
                self.log.append((epoch, plain(batch), _draw()))
                self.snap()
            self.snap()  # at the boundary, when the epoch is known to be over
        self.final = (_draw(), loader.generator.get_state().tolist() if getattr(loader, "generator", None) else None)

    def snap(self):
        position = copy.deepcopy(self.position.state_dict())
        self.snapshots.append({"position": position, "rng": rng(), "log": list(self.log)})


@pytest.mark.parametrize("kind", LOADERS)
def test_resumed_equals_straight(kind):
    straight = Run(LOADERS[kind])
    again = Run(LOADERS[kind])
    assert (again.log, again.final) == (straight.log, straight.final)  # else the test would prove nothing
    assert len({str(entry[:2]) for entry in straight.log}) == len(straight.log)  # data differs from batch to batch
    for snapshot in straight.snapshots:
        resumed = Run(LOADERS[kind], snapshot)
        assert resumed.log == straight.log
        assert resumed.final == straight.final


@pytest.mark.parametrize("kind", ["shuffle", "skip sampler", "persistent", "stream"])
def test_resumed_run_begins_at_its_epoch(kind):
    """A program that keeps the epoch itself never asks for the finished ones."""
    straight = Run(LOADERS[kind])
    for snapshot in straight.snapshots:
        place = snapshot["position"]["train"]
        resumed = Run(LOADERS[kind], snapshot, first_epoch=place["epoch"] + place["finished"])
        assert (resumed.log, resumed.final) == (straight.log, straight.final)


@pytest.mark.parametrize("kind", ["shuffle", "skip sampler"])
def test_draws_on_the_way_to_the_place_are_undone(kind):
    """A program that draws in each epoch draws again in those that were over before the snapshot."""
    straight = Run(LOADERS[kind], draws_between=2)
    for snapshot in straight.snapshots:
        resumed = Run(LOADERS[kind], snapshot, draws_between=2)
        assert (resumed.log, resumed.final) == (straight.log, straight.final)


def test_generators_are_not_put_back_once_the_job_has_moved_on():
    straight = Run(LOADERS["shuffle"])
    position, loader = DataPosition(), LOADERS["shuffle"]()
    position.load_state_dict(straight.snapshots[-1]["position"])
    called = []
    assert list(position.batches(loader, EPOCHS - 1, "train", lambda: called.append("at the place"))) == []
    next(position.batches(loader, 0, "other", lambda: called.append("new")))
    assert list(position.batches(loader, EPOCHS - 1, "train", lambda: called.append("past it"))) == []
    assert called == ["at the place"]


def test_same_as_a_loop_without_easyckpt():
    """Nothing about the training changes by using batches() (persistent workers excepted)."""
    for kind in ("shuffle", "own generator", "numpy sampler", "stream"):
        scatter(0)
        loader, log = LOADERS[kind](), []
        for epoch in range(EPOCHS):
            if isinstance(loader.dataset, Stream):
                loader.dataset.set_epoch(epoch)
            log += [(epoch, plain(batch), _draw()) for batch in loader]
        assert log == Run(LOADERS[kind]).log


@pytest.mark.parametrize("kind", ["shuffle", "skip sampler"])
def test_consumed_batches_are_not_read(kind):
    straight = Run(LOADERS[kind])
    snapshot = straight.snapshots[2]
    position, loader = DataPosition(), LOADERS[kind]()
    position.load_state_dict(snapshot["position"])
    rest = flat(plain(batch)[0] for batch in position.batches(loader, 0))
    assert loader.dataset.read == rest
    assert rest == straight.log[3][1][0]


def test_prefetched_batches_do_not_count():
    position, loader = DataPosition(), LOADERS["workers, skip sampler"]()
    for _ in position.batches(loader, 0):
        assert position.state_dict()["train"]["consumed"] == 1
        assert loader.batch_sampler.consumed == 1  # the sampler, as a component by itself, agrees
        break
    state = position.state_dict()["train"]
    assert (state["epoch"], state["consumed"], state["finished"]) == (0, 1, False)


def test_sampler_and_position_do_not_skip_twice():
    straight = Run(LOADERS["skip sampler"])
    position, loader = DataPosition(), LOADERS["skip sampler"]()
    position.load_state_dict(straight.snapshots[1]["position"])
    loader.batch_sampler.load_state_dict({**loader.batch_sampler.state_dict(), "consumed": 2})
    got = [plain(batch)[0] for batch in position.batches(loader, 0)]
    assert got == [entry[1][0] for entry in straight.log[2:4]]


def test_break_keeps_the_place_and_the_generators():
    scatter(5)
    whole = [plain(batch) for batch in DataPosition().batches(LOADERS["shuffle"](), 0)]
    for kind in ("shuffle", "workers", "persistent"):
        scatter(5)
        position, loader, got = DataPosition(), LOADERS[kind](), []
        for batch in position.batches(loader, 0):
            got.append(plain(batch))
            if len(got) == 2:
                break
        drawn = rng()
        for batch in position.batches(loader, 0):
            got.append(plain(batch))
        assert sorted(flat(batch[0] for batch in got)) == list(range(LENGTH))
        if kind == "shuffle":
            assert got == whole
        else:
            assert torch.equal(rng()[0], drawn[0])  # the second loop's replay left no trace
        assert list(position.batches(loader, 0)) == []
        assert len(list(position.batches(loader, 1))) == len(whole)


def test_giving_an_epoch_up_for_the_next():
    position, loader = DataPosition(), LOADERS["sequential"]()
    next(iter(position.batches(loader, 0)))
    assert len(list(position.batches(loader, 1))) == 4
    assert list(position.batches(loader, 0)) == []


def test_an_iterator_is_read_from_where_it_stands():
    position, stream = DataPosition(), iter(range(10))
    for item in position.batches(stream, 0):
        if item == 3:
            break
    assert list(position.batches(stream, 0)) == [4, 5, 6, 7, 8, 9]
    resumed = DataPosition()
    state = position.state_dict()
    state["train"].update(consumed=4, finished=False)
    resumed.load_state_dict(state)
    assert list(resumed.batches(iter(range(10)), 0)) == [4, 5, 6, 7, 8, 9]


class TwoLoaders:
    """Training with an evaluation every second step, nested, and one after each epoch."""

    def __init__(self, snapshot=None):
        self.log, self.snapshots, position = [], [], DataPosition()
        scatter(0 if snapshot is None else 78)
        shared = generator(9)
        train = DataLoader(Noisy(), batch_size=BATCH, shuffle=True, generator=shared)
        test = DataLoader(Noisy(5), batch_size=2, shuffle=True, generator=shared)
        restore = None
        if snapshot is not None:
            position.load_state_dict(snapshot["position"])
            set_rng(snapshot["rng"])

            def restore():
                set_rng(snapshot["rng"])

            self.log += snapshot["log"]
        step = 0 if snapshot is None else snapshot["step"]
        for epoch in range(EPOCHS):
            for batch in position.batches(train, epoch, "train", restore):
                self.log.append((epoch, plain(batch), _draw()))
                step += 1
                if step % 2 == 0:
                    for nested in position.batches(test, step, "eval", restore):
                        self.log.append(("eval", step, plain(nested), _draw()))
                self.snapshots.append(
                    {
                        "position": copy.deepcopy(position.state_dict()),
                        "rng": rng(),
                        "log": list(self.log),
                        "step": step,
                    }
                )
        self.final = (_draw(), shared.get_state().tolist())


def test_two_loaders_by_name_and_nested():
    straight = TwoLoaders()
    for snapshot in straight.snapshots:
        resumed = TwoLoaders(snapshot)
        assert resumed.log == straight.log
        assert resumed.final == straight.final


def test_two_loaders_side_by_side():
    def run(snapshot=None):
        position, log, snapshots, restore = DataPosition(), [], [], None
        scatter(0 if snapshot is None else 79)
        loaders = [LOADERS["shuffle"](), LOADERS["shuffle"]()]
        if snapshot is not None:
            position.load_state_dict(snapshot[0])
            set_rng(snapshot[1])

            def restore():
                set_rng(snapshot[1])

            log += snapshot[2]
        both = [position.batches(loader, 0, name, restore) for name, loader in zip("ab", loaders, strict=True)]
        for first, second in zip(*both, strict=True):
            log.append((plain(first), plain(second), _draw()))
            snapshots.append((copy.deepcopy(position.state_dict()), rng(), list(log)))
        return log, snapshots

    log, snapshots = run()
    for snapshot in snapshots:
        assert run(snapshot)[0] == log


def test_worker_seeds_differ_by_batch_epoch_and_rank(monkeypatch):
    def drawn(rank, seed=0):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        position = DataPosition()
        torch.manual_seed(seed)
        loader = LOADERS["persistent"]()
        return [tuple(plain(batch)[1]) for epoch in range(2) for batch in position.batches(loader, epoch)]

    first = drawn(0)
    assert len(set(first)) == len(first)
    assert drawn(0) == first
    assert not set(drawn(1)) & set(first)
    assert not set(drawn(0, seed=1)) & set(first)


def test_randomness_in_workers_does_not_depend_on_their_number():
    def drawn(workers):
        torch.manual_seed(0)
        loader = DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=workers)
        return [plain(batch) for batch in DataPosition().batches(loader, 0)]

    assert drawn(1) == drawn(2)


def test_spawned_workers():
    def run(snapshot=None):
        torch.manual_seed(0)
        position = DataPosition()
        loader = DataLoader(Noisy(6), batch_size=2, shuffle=True, num_workers=1, multiprocessing_context="spawn")
        if snapshot:
            position.load_state_dict(snapshot)
        log, states = [], []
        for batch in position.batches(loader, 0):
            log.append(plain(batch))
            states.append(copy.deepcopy(position.state_dict()))
        return log, states

    log, states = run()
    assert run(states[0])[0] == log[1:]


def test_loader_is_left_as_it_was():
    for kind in ("shuffle", "persistent", "skip sampler", "no batches"):
        position, loader = DataPosition(), LOADERS[kind]()
        before = dict(vars(loader))
        for epoch in range(2):
            list(position.batches(loader, epoch))
            assert {**vars(loader), "_iterator": None} == {**before, "_iterator": None}
        if loader._iterator is not None:
            assert loader._iterator._index_sampler is loader.batch_sampler
        assert len(list(loader)) == len(loader)  # and works without us


def test_epoch_is_told_to_whoever_wants_it():
    class Wants(Noisy):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs = (*self.epochs, epoch)

    class Sequence(torch.utils.data.SequentialSampler):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs = (*self.epochs, epoch)

    data = Wants()
    sampler = Sequence(data)
    loader, position = DataLoader(data, sampler=sampler, batch_size=4), DataPosition()
    for epoch in (0, 1, 1, 3):
        list(position.batches(loader, epoch))
    assert data.epochs == sampler.epochs == (0, 1, 3)


def test_another_number_of_batches_in_the_middle_of_an_epoch_is_refused():
    position = DataPosition()
    next(iter(position.batches(LOADERS["shuffle"](), 2)))
    resumed = DataPosition()
    resumed.load_state_dict(copy.deepcopy(position.state_dict()))
    other = DataLoader(Noisy(), batch_size=2, shuffle=True)
    with pytest.raises(StateMismatch, match="6 batches per epoch, but had 4"):
        next(iter(resumed.batches(other, 2)))
    assert resumed.state_dict()["train"]["consumed"] == 1
    assert len(list(resumed.batches(other, 3))) == 6  # a new epoch may be of another size


def test_loops_that_share_a_name_are_an_error():
    position = DataPosition()
    outer = position.batches(LOADERS["shuffle"](), 0)
    next(outer)
    list(position.batches(LOADERS["shuffle"](), 0))
    with pytest.raises(UsageError, match="a name of its own"):
        next(outer)


def test_load_inside_a_loop_is_an_error():
    position = DataPosition()
    loop = position.batches(LOADERS["shuffle"](), 0)
    next(loop)
    position.load_state_dict(position.state_dict())
    with pytest.raises(UsageError, match="leave the loop first"):
        next(loop)


def test_an_epoch_asked_for_twice_is_said(caplog):
    position, loader = DataPosition(), LOADERS["sequential"]()
    list(position.batches(loader, 0))
    assert not caplog.records
    assert list(position.batches(loader, 0)) == []
    assert "epoch 0 is over" in caplog.text


def test_out_of_order_loaders_are_said(caplog):
    loader = DataLoader(Noisy(), batch_size=BATCH, num_workers=1, in_order=False)
    list(DataPosition().batches(loader, 0))
    assert "in_order=False" in caplog.text


@pytest.mark.parametrize("epoch", [-1, 1.0, None, True])
def test_bad_epoch(epoch):
    with pytest.raises(ConfigError, match="epoch"):
        next(iter(DataPosition().batches(LOADERS["shuffle"](), epoch)))


@pytest.mark.parametrize("state", [{"train": {}}, {"train": 3}, {"train": {"epoch": "x"}}, 5])
def test_foreign_state_is_refused_and_nothing_changes(state):
    position = DataPosition()
    next(iter(position.batches(LOADERS["shuffle"](), 0)))
    with pytest.raises(StateMismatch):
        position.load_state_dict(state)
    assert position.state_dict()["train"]["consumed"] == 1


def test_state_tensors_stay_the_same_objects_within_an_epoch():
    """A capture plan made for one step fits the next."""
    position, loader = DataPosition(), LOADERS["own generator"]()
    seen = []
    for _ in position.batches(loader, 0):
        state = position.state_dict()["train"]
        seen.append([id(state["own"]["loader"]), id(state["start"]["torch"]), id(state["own_start"]["loader"])])
    assert all(ids == seen[0] for ids in seen)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda saved: saved["start"]["numpy"]["state"].update(pos=10**6), "NumPy's generator"),  # it would read there
        (lambda saved: saved["start"]["python"].update(gauss="x"), "Python's generator"),
        (lambda saved: saved["start"].update(torch=torch.zeros(3, dtype=torch.uint8)), "torch's generator"),
        (lambda saved: saved.update(start={}), "Python's generator"),
        (lambda saved: saved.update(own_start={"sampler": 3}), "a loader's generator"),
        (lambda saved: saved.update(consumed=float("inf")), "OverflowError"),
        (lambda saved: saved.pop("epoch"), "epoch"),
    ],
)
def test_a_state_that_is_none_is_found_before_anything_is_applied(change, what):
    position = DataPosition()
    next(iter(position.batches(LOADERS["shuffle"](), 0)))
    state = copy.deepcopy(position.state_dict())
    change(state["train"])
    component = DataComponent("easyckpt.data", position)
    component.value = lambda: state
    image = image_of(StateCapture({"c": {}}, extra={"easyckpt.data": component}).capture())
    live = StateCapture({"c": {}}, extra={"easyckpt.data": DataComponent("easyckpt.data", DataPosition())}).components
    with pytest.raises(DamagedCheckpoint, match=f"'easyckpt.data' is damaged: .*{what}"):
        check_all(live, image.layout, image.layout.trees, image.objects, strict=True, components=None)
