"""Deciding together: all ranks restore the same whole state, or none of them changes anything."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.checkpoints import LINE, make_view, write_checkpoint

from easyckpt import errors
from easyckpt.distributed.rendezvous import LocalChannel
from easyckpt.errors import (
    DamagedCheckpoint,
    OutOfSpace,
    PartlyApplied,
    PeerFailed,
    PeerTimeout,
    StateMismatch,
    WorldSizeChanged,
)
from easyckpt.loading.apply import restore_agreed
from easyckpt.loading.reader import open_storage
from easyckpt.loading.resolve import Candidate
from easyckpt.loading.snapshot import open_memory
from easyckpt.storage.local import LocalStorage

TIMEOUT = 20.0


class Room:
    """Channels of ranks that are threads of this process."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=TIMEOUT)
        self.values: list[str] = [""] * world_size
        self.channels = [Member(self, rank) for rank in range(world_size)]


class Member:
    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank = room, rank
        self.lost_at: str | None = None

    def exchange(self, name, value, timeout):
        if self.lost_at is not None and name.startswith(self.lost_at):
            raise PeerTimeout(f"rank {1 - self.rank} did not come to {name}")
        self.room.values[self.rank] = json.dumps([name, value])
        self.room.barrier.wait()
        answers = [json.loads(text) for text in self.room.values]
        self.room.barrier.wait()
        assert {answer[0] for answer in answers} == {name}, "the ranks are out of step"
        return [answer[1] for answer in answers]

    def broadcast(self, name, value, timeout):
        return self.exchange(name, value, timeout)[0]

    def fail(self, reason):
        pass

    def close(self, linger=0.0):
        pass


class Rank:
    """One rank's live objects, and what happened to them."""

    def __init__(self, storage, rank=0, world_size=1, memory=()):
        self.storage, self.rank, self.world_size = storage, rank, world_size
        self.memory = {view.meta.step: view for view in memory}
        self.live = torch.full((4,), -1.0)
        self.problems: list[str] = []
        self.passed_over: list[str] = []
        self.applied: list[int] = []

    def open(self, candidate):
        if candidate.tier == "memory":
            return open_memory(self.memory[candidate.step], rank=self.rank, world_size=self.world_size)
        return open_storage(self.storage, candidate.source, rank=self.rank, world_size=self.world_size)

    def check(self, snapshot):
        assert snapshot.leaf(0).shape == (4,)
        return self.problems

    def apply(self, snapshot):
        self.live.copy_(snapshot.leaf(0))
        self.applied.append(snapshot.step)

    def restore(self, channel, candidates):
        return restore_agreed(
            channel, candidates, self.open, self.check, self.apply,
            timeout=TIMEOUT, skipped=lambda candidate, reason: self.passed_over.append(f"{candidate}: {reason}"),
        )  # fmt: skip

    @property
    def untouched(self):
        return self.applied == [] and bool((self.live == -1).all())


def state(step, rank=0):
    return {"w": torch.arange(4.0) + step + 1000 * rank}


def views(step, world_size=1):
    return [make_view(state(step, rank), rank=rank, world_size=world_size, step=step) for rank in range(world_size)]


def stored(step):
    return Candidate(step=step, tier="storage", timeline=LINE, source=f"step-{step:08d}", attempt="try-1")


def in_memory(step):
    return Candidate(step=step, tier="memory", timeline=LINE, source="")


def rot(storage, step, rank=0):
    path = f"{storage.root}/step-{step:08d}/rank-{rank:05d}.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))


def together(ranks, candidates, channels=None):
    """Each rank's result, or its error."""
    channels = channels or Room(len(ranks)).channels

    def run(rank):
        try:
            return ranks[rank].restore(channels[rank], candidates)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks))))


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "root")


@pytest.fixture
def pair(storage):
    """Two ranks over checkpoints of steps 10 and 20."""
    for step in (10, 20):
        write_checkpoint(storage, *views(step, 2))
    return [Rank(storage, rank, 2) for rank in (0, 1)]


# One rank.


def test_the_first_candidate_is_restored_and_no_other_is_read(storage):
    write_checkpoint(storage, *views(10))
    rank = Rank(storage, memory=views(11))
    taken = rank.restore(LocalChannel(), [in_memory(11), stored(10)])
    assert taken == in_memory(11)
    assert torch.equal(rank.live, state(11)["w"])
    assert rank.passed_over == []


def test_nothing_to_restore_is_none():
    assert Rank(None).restore(LocalChannel(), []) is None


def test_the_newest_that_is_whole_is_taken_and_each_other_is_told(storage):
    for step in (10, 20, 30):
        write_checkpoint(storage, *views(step))
    rot(storage, 20)
    torn = Candidate(step=30, tier="storage", timeline=LINE, source="step-00000030", problem="no manifest")
    rank = Rank(storage)
    assert rank.restore(LocalChannel(), [torn, stored(20), stored(10)]) == stored(10)
    assert torch.equal(rank.live, state(10)["w"])
    assert "step-00000030: no manifest" in rank.passed_over[0]
    assert "rank 0: " in rank.passed_over[1]
    assert "rank-00000.safetensors: chunk 0" in rank.passed_over[1]


def test_passing_over_is_logged(storage, caplog):
    for step in (10, 20):
        write_checkpoint(storage, *views(step))
    rot(storage, 20)
    rank = Rank(storage)
    restore_agreed(LocalChannel(), [stored(20), stored(10)], rank.open, rank.check, rank.apply, timeout=TIMEOUT)
    assert "cannot restore step-00000020" in caplog.text
    assert "rank 0" in caplog.text


def test_where_all_are_damaged_nothing_starts_from_nothing(storage):
    for step in (10, 20):
        write_checkpoint(storage, *views(step))
        rot(storage, step)
    rank = Rank(storage)
    with pytest.raises(
        DamagedCheckpoint, match=r"none of 2 candidates(.|\n)*step-00000020(.|\n)*step-00000010(.|\n)*from a backup"
    ):
        rank.restore(LocalChannel(), [stored(20), stored(10)])
    assert rank.untouched


def test_one_that_vanished_is_passed_over(storage):
    write_checkpoint(storage, *views(10))
    rank = Rank(storage)
    assert rank.restore(LocalChannel(), [stored(20), stored(10)]) == stored(10)


def test_one_that_is_not_what_its_candidate_says_is_passed_over(storage):
    write_checkpoint(storage, *views(10))
    wrong = Candidate(step=11, tier="storage", timeline=LINE, source="step-00000010")
    assert Rank(storage).restore(LocalChannel(), [wrong, stored(10)]) == stored(10)


def test_a_state_that_does_not_fit_is_refused_and_older_ones_are_not_tried(storage):
    for step in (10, 20):
        write_checkpoint(storage, *views(step))
    rank = Rank(storage)
    rank.problems = [f"model.w{number}: (4,) saved, (5,) here" for number in range(30)]
    with pytest.raises(StateMismatch, match=r"step-00000020(.|\n)*model\.w0: (.|\n)*and 10 more"):
        rank.restore(LocalChannel(), [stored(20), stored(10)])
    assert rank.untouched


def test_a_failed_apply_says_so_and_nothing_older_is_put_over_it(storage):
    for step in (10, 20):
        write_checkpoint(storage, *views(step))
    rank = Rank(storage)

    def fail(snapshot):
        rank.applied.append(snapshot.step)
        raise RuntimeError("out of tune")

    rank.apply = fail
    with pytest.raises(PartlyApplied, match="step-00000020 was verified, but applying it failed: out of tune"):
        rank.restore(LocalChannel(), [stored(20), stored(10)])
    assert rank.applied == [20]


def test_too_little_memory_to_read_is_not_taken_for_damage(storage):
    write_checkpoint(storage, *views(10))
    rank = Rank(storage)

    def full(candidate):
        raise OutOfSpace("no memory")

    rank.open = full
    with pytest.raises(OutOfSpace):
        rank.restore(LocalChannel(), [stored(10)])


def test_the_snapshot_is_closed_whatever_happens(storage):
    write_checkpoint(storage, *views(10))
    for failing in (None, "check", "apply"):
        rank = Rank(storage)
        opened = []
        real = rank.open
        rank.open = lambda candidate, real=real, opened=opened: opened.append(real(candidate)) or opened[-1]
        if failing:
            setattr(rank, failing, lambda snapshot: 1 / 0)
            with pytest.raises((ZeroDivisionError, PartlyApplied)):
                rank.restore(LocalChannel(), [stored(10)])
        else:
            rank.restore(LocalChannel(), [stored(10)])
        assert opened[0].image is None


# Two ranks.


def test_all_ranks_take_the_same(pair):
    assert together(pair, [stored(20), stored(10)]) == [stored(20)] * 2
    for rank in pair:
        assert torch.equal(rank.live, state(20, rank.rank)["w"])


@pytest.mark.parametrize("bad", [0, 1])
def test_one_ranks_damage_makes_all_fall_back_together(pair, storage, bad):
    rot(storage, 20, bad)
    assert together(pair, [stored(20), stored(10)]) == [stored(10)] * 2
    for rank in pair:
        assert torch.equal(rank.live, state(10, rank.rank)["w"])
        assert rank.applied == [10]
        assert f"rank {bad}: " in rank.passed_over[0]


def test_a_slot_that_one_rank_cannot_open_sends_all_to_storage(pair):
    pair[0].memory = {21: views(21, 2)[0]}
    pair[1].memory = {21: make_view(state(21), rank=0, world_size=2, step=21)}
    assert together(pair, [in_memory(21), stored(20)]) == [stored(20)] * 2


def test_damage_on_different_ranks_leaves_nothing_and_all_are_told(pair, storage):
    rot(storage, 20, 0)
    rot(storage, 10, 1)
    for error in together(pair, [stored(20), stored(10)]):
        assert isinstance(error, DamagedCheckpoint)
        assert "rank 0: " in str(error)
        assert "rank 1: " in str(error)
    assert all(rank.untouched for rank in pair)


def test_rank_0s_candidates_count(pair):
    """Directory listings may differ between hosts for a while."""
    room = Room(2)
    lists = [[stored(20), stored(10)], [stored(10)]]
    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(lambda rank: pair[rank].restore(room.channels[rank], lists[rank]), (0, 1)))
    assert taken == [stored(20)] * 2


@pytest.mark.parametrize("odd", [0, 1])
def test_a_mismatch_on_one_rank_is_raised_on_all(pair, odd):
    pair[odd].problems = ["model.w: (4,) saved, (5,) here"]
    for number, error in enumerate(together(pair, [stored(20), stored(10)])):
        assert isinstance(error, StateMismatch)
        assert "model.w: (4,) saved" in str(error)
        assert number == odd or f"rank {odd}: " in str(error)
    assert all(rank.untouched for rank in pair)


def test_another_world_size_is_raised_on_all_and_nothing_is_applied(storage):
    write_checkpoint(storage, *views(10, 4))
    ranks = [Rank(storage, rank, 2) for rank in (0, 1)]
    for error in together(ranks, [stored(10)]):
        assert isinstance(error, WorldSizeChanged)
        assert "saved by 4 ranks" in str(error)
    assert all(rank.untouched for rank in ranks)


def test_an_unexpected_error_on_one_rank_is_raised_on_all(pair):
    pair[1].check = lambda snapshot: 1 / 0
    first, second = together(pair, [stored(20), stored(10)])
    assert isinstance(first, PeerFailed)
    assert "rank 1: ZeroDivisionError" in str(first)
    assert isinstance(second, ZeroDivisionError)
    assert all(rank.untouched for rank in pair)


def test_nothing_is_applied_before_the_last_rank_has_verified(pair):
    verified = threading.Event()
    real = pair[1].check

    def late(snapshot):
        assert pair[0].untouched
        verified.set()
        return real(snapshot)

    def apply(snapshot):
        assert verified.is_set()
        Rank.apply(pair[0], snapshot)

    pair[1].check, pair[0].apply = late, apply
    assert together(pair, [stored(20)]) == [stored(20)] * 2


def test_a_failed_apply_on_one_rank_reaches_all(pair):
    pair[1].apply = lambda snapshot: 1 / 0
    errors_ = together(pair, [stored(20), stored(10)])
    assert all(isinstance(error, PartlyApplied) for error in errors_)
    assert "rank 1: division by zero" in str(errors_[0])


def test_a_rank_lost_while_applying_leaves_no_rank_thinking_that_all_is_well(pair):
    room = Room(2)
    room.channels[0].lost_at = room.channels[1].lost_at = "restore: apply"
    for error in together(pair, [stored(20)], room.channels):
        assert isinstance(error, PartlyApplied)
        assert isinstance(error.__cause__, errors.PeerTimeout)


def test_a_rank_lost_before_the_vote_applies_nothing(pair):
    room = Room(2)
    room.channels[0].lost_at = room.channels[1].lost_at = "restore: vote"
    for error in together(pair, [stored(20)], room.channels):
        assert isinstance(error, PeerTimeout)
    assert all(rank.untouched for rank in pair)
