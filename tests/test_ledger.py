"""What both threads of a rank know: decisions that come before, or between, what training says."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from easyckpt.config import CheckpointConfig
from easyckpt.errors import LeaseLost, SaveFailed
from easyckpt.saving.ledger import Ledger
from easyckpt.saving.messages import Board, Decision
from easyckpt.saving.slots import Slots


@pytest.fixture
def ledger() -> Ledger:
    """Of a rank that is not rank 0."""
    return Ledger(None, CheckpointConfig(), alone=False)


def hear(ledger: Ledger, number: int, outcome: str, due: int, step: int | None = None) -> None:
    decision = Decision(number=number, outcome=outcome, due=due, step=due if step is None else step, reason="busy")
    for decided, promises in ledger.hear(Board(decisions=(decision,))):
        for promise in promises:
            promise.set_result(decided.step)


def test_a_decision_that_came_before_this_rank_came_to_the_step_is_the_answer(ledger):
    hear(ledger, 1, "skipped", 10)
    with pytest.raises(SaveFailed, match="skipped"):
        ledger.due(10, forced=False).result(0)
    assert ledger.pending() == []


def test_a_skip_that_came_before_is_no_answer_to_a_save_by_name(ledger):
    hear(ledger, 1, "skipped", 10)
    future = ledger.due(10, forced=True)
    assert not future.done()
    assert ledger.held() == {10}
    hear(ledger, 2, "committed", 10)
    assert future.result(0) == 10
    assert ledger.held() == set()


@pytest.mark.parametrize("outcome", ["committed", "skipped", "failed"])
@pytest.mark.parametrize("early", [False, True])
def test_what_became_of_an_older_step_in_its_place_is_no_answer_to_a_save_by_name(ledger, outcome, early):
    asked = [] if early else [ledger.due(10, forced=True)]
    hear(ledger, 1, outcome, 10, step=7)
    future = ledger.due(10, forced=True)
    assert all(one is future for one in asked)
    assert not future.done()
    hear(ledger, 2, "committed", 10)
    assert future.result(0) == 10
    assert ledger.held() == set()


def test_a_due_step_of_which_there_is_no_snapshot_is_posted_as_missing(ledger):
    ledger.tell(step=10, wanted=10, lack="")
    ledger.lacks(10, "no slot is free")
    assert ledger.post.missing == ()  # it is not due so far
    ledger.due(10, forced=False)
    assert (ledger.post.missing, ledger.post.lack) == ((10,), "no slot is free")
    ledger.lacks(9, "an older one")
    assert ledger.post.lack == "no slot is free"


@pytest.mark.parametrize("due", [None, 12])
def test_a_commit_for_whatever_reason_is_the_answer_to_all_who_wait_for_that_step(ledger, due):
    """A signal has flushed it, say, before this rank's training asked for it by name."""
    futures = [ledger.due(10, forced=False), ledger.due(12, forced=True)]
    decision = Decision(number=1, outcome="committed", due=due, step=12)
    for decided, promises in ledger.hear(Board(decisions=(decision,))):
        for promise in promises:
            promise.set_result(decided.step)
    assert [future.result(0) for future in futures] == [12, 12]
    assert ledger.pending() == []
    assert ledger.held() == set()


def test_a_commit_on_a_line_that_training_has_left_is_no_answer(ledger):
    ledger.begin_line("t", committed=40, adopted=None)
    future = ledger.due(50, forced=True)
    for line, committed in [(0, 40), (1, 60)]:
        decision = Decision(number=line + 1, outcome="committed", due=None, step=60, line=line)
        ledger.hear(Board(line=1, decisions=(decision,)))
        assert ledger.committed == committed
        assert bool(ledger.pending()) is (committed < 50)
    assert not future.cancelled()


def test_what_ends_all_saving_decides_all_that_waits(ledger):
    future = ledger.due(10, forced=True)
    ledger.end_all(SaveFailed("the lease is lost"))
    ledger.end_all(SaveFailed("something that follows from it"))
    for waiting in (future, ledger.due(20, forced=False)):
        with pytest.raises(SaveFailed, match="the lease is lost"):
            waiting.result(0)
    for _ in range(2):
        with pytest.raises(SaveFailed, match="the lease is lost"):
            ledger.raise_failure(None)


def lose(ledger: Ledger, at: int) -> None:
    ledger.hear(Board(line=ledger.post.line, lease_lost="taken over", lost_at=at))
    assert ledger.fatal is not None
    ledger.give_up(ledger.fatal)


def raises_at(ledger: Ledger, *steps: int | None) -> list[int | None]:
    raised = []
    for step in steps:
        try:
            ledger.raise_failure(step)
        except LeaseLost:
            raised.append(step)
    return raised


def test_a_lost_lease_decides_what_waits_at_once_and_is_raised_where_all_ranks_raise_it(ledger):
    ledger.tell(step=10)
    waiting = ledger.due(10, forced=False)
    lose(ledger, at=13)
    for future in (waiting, ledger.due(11, forced=True)):
        with pytest.raises(LeaseLost, match="taken over"):
            future.result(0)
    assert (ledger.pending(), ledger.held()) == ([], frozenset())
    assert raises_at(ledger, 11, 12, 13, 14, 13) == [13, 14, 13]


@pytest.mark.parametrize("knows", [True, False])
def test_a_wait_for_a_flush_raises_a_lost_lease_whenever_a_rank_hears_of_it(ledger, knows):
    """All ranks wait for the same flushes after the same step; some of them know of the loss already."""
    ledger.tell(step=10)
    if knows:
        lose(ledger, at=13)
    future = ledger.due(10, forced=False)
    assert future.done() is knows
    lose(ledger, at=13)
    assert raises_at(ledger, None) == [None]


def test_a_wait_for_nothing_raises_a_lost_lease_only_where_every_rank_knows(ledger):
    ledger.tell(step=10)
    lose(ledger, at=13)
    assert raises_at(ledger, None) == []
    ledger.tell(step=13)
    assert raises_at(ledger, None) == [None]


def test_a_line_that_begins_after_a_lost_lease_has_its_own_steps(ledger):
    lose(ledger, at=1000)
    ledger.begin_line("t", committed=5, adopted=None)
    lose(ledger, at=8)
    assert raises_at(ledger, 6, 7, 8) == [8]


def test_who_waits_for_a_slot_when_all_saving_ends_is_told_with_all_ranks_and_not_alone(ledger):
    """The others may have found a slot: they raise at their next call, or where all do."""
    never = SimpleNamespace(count=1, ready=lambda nbytes: True, wait_ready=lambda seconds: None)
    never.acquire, never.drop = lambda *_: None, lambda _: False
    capture = SimpleNamespace(layout=SimpleNamespace(image_bytes=1, encoded=b""), objects=b"")
    lose(ledger, at=13)
    assert Slots(never, ledger, CheckpointConfig()).acquire(10, capture, "t", deadline=math.inf) is None
