"""Rank 0's decisions: each due flush gets exactly one, the same for all ranks, whatever the ranks do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyckpt.saving.leader import Due, Leader, LeaderPolicy, Work
from easyckpt.saving.messages import Post, Report

POLICY = LeaderPolicy(
    wait_on_back_pressure=False, peer_timeout=10.0, commit_timeout=20.0, close_timeout=30.0, signal_deadline=5.0
)


class Group:
    """Ranks that answer as told; time is what the test says."""

    def __init__(self, world_size: int, policy: LeaderPolicy = POLICY) -> None:
        self.leader = Leader(world_size, policy, "0badcafe")
        self.posts = [Post() for _ in range(world_size)]
        self.now = 0.0
        self.decisions = {}
        self.board, self.works = self.leader.advance(self.posts, self.now)

    def tell(self, rank: int, **fields) -> None:
        self.posts[rank] = replace(self.posts[rank], **fields)

    def turn(self, seconds: float = 0.1):
        self.now += seconds
        self.board, works = self.leader.advance(self.posts, self.now)
        self.works += works
        for decision in self.board.decisions:
            assert self.decisions.setdefault(decision.number, decision) == decision, "a decision has changed"
        return self.board

    def seal(self, *steps: int) -> None:
        for rank in range(len(self.posts)):
            self.tell(rank, sealed=tuple(steps), step=max(steps))
        self.turn()

    def report_all(self) -> None:
        flush = self.board.flush
        for rank in range(len(self.posts)):
            if flush.share is None:
                report = Report(attempt=flush.attempt, digest="same")
            else:
                report = Report(attempt=flush.attempt, files={f"rank-{rank}": (rank, "d")})
            self.tell(rank, report=report)
        self.turn()

    def finish(self, reason: str | None = None, unknown: bool = False) -> None:
        work = self.works.pop(0)
        self.leader.finished(work, reason=reason, unknown=unknown, nbytes=7, seconds=1.0)
        self.turn()

    def see(self) -> None:
        for rank in range(len(self.posts)):
            self.tell(rank, seen=max((d.number for d in self.board.decisions), default=self.posts[rank].seen))
        self.turn()

    def outcomes(self):
        return [(d.due, d.step, d.outcome) for d in self.decisions.values()]


def test_the_floor_is_the_newest_step_that_every_rank_holds():
    group = Group(2)
    group.tell(0, sealed=(3, 4, 5))
    group.tell(1, sealed=(3, 4))
    assert group.turn().floor == 4
    group.tell(1, sealed=(6,))  # nothing in common any more: what was true stays true
    assert group.turn().floor == 4


def test_snapshots_that_another_rank_has_passed_without_are_useless():
    group = Group(2)
    group.tell(0, sealed=(5, 6, 7), step=7)
    group.tell(1, sealed=(5,), step=7)  # 6 was skipped there; 7 may be on its way
    group.turn()
    assert (group.board.floor, group.board.useless) == (5, ())
    group.tell(1, sealed=(5, 8), step=8)
    assert group.turn().useless == (6,)
    group.tell(0, sealed=(5, 8), step=9)
    group.tell(1, sealed=(5, 8), step=9)
    group.turn()
    assert (group.board.floor, group.board.useless) == (8, ())


def test_a_floor_that_a_rank_with_a_single_slot_has_written_over_is_not_flushed():
    group = Group(2)
    group.seal(4)
    group.tell(0, sealed=(4,), step=8, missing=(7,), due=(7,))
    group.tell(1, sealed=(7,), step=8, due=(7,))
    group.leader.add_due(Due(7, False))
    assert group.turn().flush is None
    assert group.outcomes() == [(7, 7, "skipped")]


@pytest.mark.parametrize(("step", "outcome"), [(4, "skipped"), (7, "failed")], ids=["floor", "due"])
def test_a_snapshot_that_is_lost_before_its_flush_is_a_skip_where_nobody_has_held_it(step, outcome):
    """A rank holds what is due, so that its loss is a failure; the floor, only where it has more than one slot."""
    group = Group(2)
    group.seal(4)
    group.tell(0, sealed=(4,) if step == 4 else (7,), step=8, missing=(7,) if step == 4 else (), due=(7,))
    group.tell(1, sealed=(4, 7), step=8, due=(7,))
    group.leader.add_due(Due(7, False))
    flush = group.turn().flush
    assert (flush.step, flush.due) == (step, 7)
    group.tell(0, report=Report(attempt=flush.attempt, error="rank 0 holds it no more", lost=True))
    group.tell(1, report=Report(attempt=flush.attempt, digest="same"))
    group.turn()
    group.turn()
    group.finish()
    assert group.outcomes() == [(7, step, outcome)]


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_ranks_that_skip_different_steps_never_block_each_other(slots):
    """Two ranks with few slots, each skipping when none is free by the reuse rule: the floor goes on rising."""
    group = Group(2)
    holds: list[set[int]] = [set(), set()]
    floors = []
    for step in range(1, 60):
        for rank in range(2):
            board = group.board
            reusable = {s for s in holds[rank] if s < board.floor or s in board.useless}
            if (step + 3 * rank) % 7 == 0:  # this rank discards the snapshot alone
                pass
            elif len(holds[rank]) < slots or reusable:
                if len(holds[rank]) == slots:
                    holds[rank].remove(min(reusable))
                holds[rank].add(step)
            group.tell(rank, sealed=tuple(sorted(holds[rank])), step=step)
        floors.append(group.turn().floor)
    assert all(later > earlier for earlier, later in zip(floors[10::15], floors[25::15], strict=False))


def test_a_due_flush_waits_for_the_slowest_rank_then_compares_writes_and_commits():
    group = Group(2)
    group.leader.add_due(Due(10, forced=False))
    group.tell(0, sealed=(10,))
    assert group.turn().flush is None
    group.tell(1, sealed=(10,))
    assert group.turn().flush.step == 10
    assert group.board.flush.share is None
    group.report_all()
    assert group.board.flush.share is True
    group.report_all()
    assert group.works[0] == Work(
        kind="commit", flush=group.board.flush, files={"rank-0": (0, "d"), "rank-1": (1, "d")}
    )
    group.finish()
    assert group.outcomes() == [(10, 10, "committed")]
    assert group.leader.committed == 10
    group.see()
    assert group.board.decisions == ()


def test_ranks_that_differ_store_their_replicated_state_each():
    group = Group(2)
    group.leader.add_due(Due(10, forced=False))
    group.seal(10)
    attempt = group.board.flush.attempt
    group.tell(0, report=Report(attempt=attempt, digest="a"))
    group.tell(1, report=Report(attempt=attempt, digest="b"))
    assert group.turn().flush.share is False


def test_an_error_on_one_rank_abandons_the_attempt_on_all():
    group = Group(2)
    group.leader.share = True
    group.leader.add_due(Due(10, forced=False))
    group.seal(10)
    group.tell(1, report=Report(attempt=group.board.flush.attempt, error="disk full"))
    group.turn()
    assert "rank 1: disk full" in group.board.flush.abandoned
    group.tell(0, report=Report(attempt=group.board.flush.attempt, error="abandoned"))
    group.turn()
    assert group.works[0].kind == "clean up"
    group.finish(reason="x")
    assert group.outcomes() == [(10, 10, "failed")]
    assert "disk full" in group.decisions[1].reason


def test_a_silent_rank_is_named_after_the_timeout():
    group = Group(3)
    group.leader.share = True
    group.leader.add_due(Due(10, forced=False))
    group.seal(10)
    attempt = group.board.flush.attempt
    for rank in (0, 2):
        group.tell(rank, report=Report(attempt=attempt, files={}))
    group.turn(POLICY.commit_timeout + 1)
    assert "rank 1" in group.board.flush.abandoned
    group.turn(POLICY.commit_timeout + 1)
    assert group.works[0].kind == "clean up"


def test_a_report_of_an_older_attempt_says_nothing_about_this_one():
    group = Group(1)
    group.leader.add_due(Due(10, forced=False))
    group.tell(0, report=Report(attempt="0badcafe-000000", files={"old": (1, "d")}))
    group.seal(10)
    group.turn()
    assert group.works == []


def wait_with(group: Group, *alive: int) -> None:
    """Much longer than any timeout, in which these ranks show that they are there."""
    for beat in range(1, 40):
        for rank in alive:
            group.tell(rank, beat=beat)
        group.turn(POLICY.peer_timeout / 3)


def test_training_that_pauses_with_the_due_snapshot_not_whole_is_waited_for():
    """A validation right after a due save: the snapshot is whole at the next optimizer step, whenever that is."""
    group = Group(2)
    group.leader.share = True
    group.leader.add_due(Due(10, forced=False))
    group.tell(0, step=10, sealed=(9,), due=(10,))
    group.tell(1, step=10, sealed=(9, 10), due=(10,))
    group.turn()
    boards = []
    for _ in range(3):
        wait_with(group, 0)
        boards.append(group.board)
    assert group.outcomes() == []
    assert len({board.waited for board in boards}) == 3  # who looks at the board sees that it is not forgotten
    group.tell(0, sealed=(9, 10))
    assert group.turn().flush.step == 10


@pytest.mark.parametrize("gone", ["never came", "came"])
def test_a_rank_that_is_not_there_any_more_is_not_waited_for(gone):
    group = Group(3)
    group.leader.add_due(Due(10, forced=False))
    for rank in range(3):
        came = rank != 1 or gone == "came"
        group.tell(rank, step=10 if came else 9, sealed=(9,), due=(10,) if came else ())
    group.turn()
    wait_with(group, 0, 2, *([1] if gone == "never came" else []))
    assert group.outcomes() == [(10, 10, "failed")]
    assert "rank 1 did not come to step 10" in group.decisions[1].reason


def test_training_that_pauses_is_not_waited_for_where_the_training_of_another_rank_waits_for_it():
    """A rank without memory waits in its due save, and the others may need it to come to the next optimizer step."""
    group = Group(2)
    group.leader.add_due(Due(10, forced=False))
    group.tell(0, step=10, sealed=(9,), due=(10,))
    group.tell(1, step=10, sealed=(10,), due=(10,), without_memory=True)
    assert group.turn().without_memory
    wait_with(group, 0, 1)
    assert group.outcomes() == [(10, 10, "failed")]


def test_a_signal_while_training_pauses_after_a_due_save_saves_what_is_whole():
    group = Group(1)
    group.tell(0, step=10, sealed=(9,), due=(10,))
    group.leader.add_due(Due(10, forced=False))
    assert group.turn().flush is None
    group.tell(0, emergency=1)
    assert (group.turn().flush.step, group.board.flush.due) == (9, None)


def test_a_due_step_that_a_signal_has_flushed_is_not_flushed_again():
    group = Group(1)
    group.seal(10)
    group.tell(0, emergency=1)
    group.turn()
    group.leader.add_due(Due(10, forced=False))  # in the middle of it
    group.report_all()
    group.finish()
    group.leader.add_due(Due(10, forced=True))  # between the commit and the moment that anyone hears of it
    group.turn()
    assert group.outcomes() == [(None, 10, "committed")]
    assert group.board.flush is None


def test_after_going_back_failures_are_raised_soon_and_a_signal_is_seen_soon():
    group = Group(1)
    for step in range(200):  # 100 steps a second
        group.tell(0, step=step)
        group.turn(0.01)
    group.tell(0, emergency=1)
    group.turn(0.01)
    group.leader.begin_line(1, committed=50, floor=-1)
    group.tell(0, line=1, step=50)
    group.turn(1.0)  # a load takes its time
    group.tell(0, step=51, missing=(51,), due=(51,))
    group.leader.add_due(Due(51, forced=True))
    group.turn(0.01)
    for step in (group.decisions[1].raise_at, group.board.preempt_at):
        assert 51 + 2 <= step <= 51 + 2 + 40


@pytest.mark.parametrize("forced", [False, True])
def test_back_pressure_skips_what_was_not_asked_for_by_name(forced):
    group = Group(1)
    group.leader.add_due(Due(10, forced=False))
    group.seal(10)
    group.leader.add_due(Due(20, forced=forced))
    group.seal(10, 20)
    assert group.outcomes() == ([] if forced else [(20, 20, "skipped")])
    group.report_all()
    group.finish()
    assert (group.board.flush is not None) is forced


def test_a_rank_that_lacks_the_due_snapshot_makes_all_flush_the_floor_instead():
    group = Group(2)
    group.leader.share = True
    group.leader.add_due(Due(10, forced=False))
    group.tell(0, sealed=(9, 10))
    group.tell(1, sealed=(9,), missing=(10,))
    assert (group.turn().flush.step, group.board.flush.due) == (9, 10)


def test_a_rank_that_lacks_a_snapshot_asked_for_by_name_fails_it_for_all():
    group = Group(2)
    group.leader.add_due(Due(10, forced=True))
    group.tell(0, sealed=(9, 10))
    group.tell(1, sealed=(9,), missing=(10,))
    group.turn()
    assert group.outcomes() == [(10, 10, "failed")]
    assert "rank 1" in group.decisions[1].reason


def test_failures_are_raised_at_a_step_that_every_rank_has_ahead():
    group = Group(2)
    group.leader.share = True
    for step in range(1, 11):  # 100 steps a second
        for rank in range(2):
            group.tell(rank, step=step)
        group.turn(0.01)
    group.leader.add_due(Due(10, forced=False))
    group.tell(0, sealed=(10,))
    group.tell(1, missing=(10,))
    group.turn(0.01)
    group.leader.add_due(Due(10, forced=True))
    group.turn(0.01)
    assert all(decision.raise_at >= 10 + 2 + 25 for decision in group.decisions.values())


def test_a_signal_on_one_rank_flushes_the_floor_and_ends():
    group = Group(2)
    group.leader.share = True
    group.seal(7)
    group.tell(1, emergency=1)
    assert group.turn().emergency
    assert (group.board.flush.step, group.board.flush.due) == (7, None)
    group.report_all()
    group.finish()
    assert group.turn().emergency_over
    assert group.outcomes() == [(None, 7, "committed")]


@pytest.mark.parametrize("running", [False, True])
def test_an_emergency_ends_with_the_newest_snapshot_at_the_signal_though_training_goes_on(running):
    group = Group(2)
    group.seal(3)
    if running:
        group.leader.add_due(Due(3, forced=False))
        group.turn()
    group.seal(4)
    group.tell(1, emergency=1)
    group.turn()
    flushed = []
    for step in range(5, 50):
        group.seal(step - 1, step)
        if group.board.emergency_over:
            break
        if group.board.flush is not None and not group.works:
            group.report_all()
        if group.works:
            flushed.append(group.works[0].flush.step)
            group.finish()
            group.see()
    assert group.board.emergency_over
    assert group.now < POLICY.signal_deadline
    assert flushed[-1] >= 4
    assert len(flushed) <= 2 + running


def test_a_signal_after_an_emergency_begins_another_one():
    group = Group(2)
    group.leader.share = True
    for number, step, fails in [(1, 7, None), (2, 9, "disk full"), (3, 9, None)]:
        group.seal(step)
        group.tell(number % 2, emergency=number)
        board = group.turn()
        assert (board.emergency, board.emergency_over, board.flush.step) == (number, False, step)
        group.report_all()
        group.finish(fails)
        group.see()
        assert group.turn().emergency_over
    assert [step for _, step, outcome in group.outcomes() if outcome == "committed"] == [7, 9]


def test_a_signal_in_an_emergency_has_its_own_one_afterwards():
    group = Group(1)
    group.seal(7)
    group.tell(0, emergency=1)
    group.turn()
    group.seal(7, 8)
    group.tell(0, emergency=2)
    assert (group.turn().emergency, group.board.flush.step) == (1, 7)
    group.report_all()
    group.finish()
    group.turn()
    assert (group.turn().emergency, group.board.flush.step) == (2, 8)


def test_an_emergency_that_fails_is_over_and_not_tried_for_ever():
    group = Group(1)
    group.seal(7)
    group.tell(0, emergency=1)
    group.turn()
    group.report_all()
    group.finish(reason="disk full")
    assert group.turn().emergency_over
    assert group.board.flush is None


def test_the_end_commits_the_newest_snapshot_and_closes_once():
    group = Group(2)
    group.leader.share = True
    group.seal(7)
    group.tell(0, closing=True)
    assert not group.turn().closed
    group.tell(1, closing=True)
    assert group.turn().flush.step == 7
    group.report_all()
    group.finish()
    assert group.turn().closed
    assert group.board.close_error == ""


@pytest.mark.parametrize("committed", [-1, 6])
def test_an_end_without_the_newest_step_names_it_who_lacks_it_and_why(committed):
    group = Group(2)
    group.leader.begin_line(1, committed=committed, floor=6)
    group.tell(0, line=1, sealed=(6, 7), wanted=7, closing=True)
    group.tell(1, line=1, sealed=(6,), wanted=7, lack="no slot is free", closing=True)
    group.turn()
    if committed < 6:
        assert group.board.flush.step == 6  # what all hold is committed nevertheless
        group.report_all()
        group.report_all()
        group.finish()
    assert group.turn().closed
    assert "step 7," in group.board.not_durable
    assert "rank 1: no slot is free" in group.board.not_durable
    assert "rank 0" not in group.board.not_durable
    assert "newest committed step is 6" in group.board.not_durable


@pytest.mark.parametrize("wanted", [-1, 5, 7])
def test_an_end_with_all_that_was_wanted_is_good(wanted):
    group = Group(1)
    group.seal(7)
    group.tell(0, wanted=wanted, closing=True)
    group.turn()
    group.report_all()
    group.finish()
    assert group.turn().closed
    assert group.board.not_durable == ""


def test_snapshots_that_a_closing_rank_lacks_are_useless_at_once():
    """A rank that takes its last snapshot at the end would else wait for their slots for ever."""
    group = Group(2)
    group.tell(0, sealed=(5, 6), step=7)
    group.tell(1, sealed=(5, 7), step=7)
    assert group.turn().useless == ()
    group.tell(1, closing=True)
    assert group.turn().useless == (6,)


def test_a_rank_that_never_closes_is_named():
    group = Group(2)
    group.seal(7)
    group.tell(0, closing=True)
    group.turn()
    group.turn(POLICY.close_timeout + 1)
    assert group.board.closed
    assert "rank 1" in group.board.close_error


def test_a_flush_that_outlives_the_close_is_named():
    group = Group(1)
    group.seal(7)
    group.tell(0, closing=True)
    group.turn()
    assert group.board.flush.step == 7
    group.turn(POLICY.close_timeout + 1)
    assert group.board.closed
    assert group.board.close_error.startswith("the flush of step 7 did not end")


def test_after_an_exception_on_one_rank_nothing_new_is_started():
    group = Group(2)
    group.seal(7)
    group.tell(0, closing=True, wanted=7)
    group.tell(1, aborted=True, wanted=7)
    assert group.turn().closed
    assert group.board.flush is None
    assert "step 7, " in group.board.not_durable  # the rank that has closed in good faith must not end well
    assert "rank 1: it has left after an exception" in group.board.not_durable


def test_an_exception_after_all_was_committed_spoils_the_end_of_nobody_else():
    group = Group(2)
    group.leader.begin_line(1, committed=7, floor=7)
    group.tell(0, line=1, sealed=(7,), wanted=7, closing=True)
    group.tell(1, line=1, sealed=(7,), wanted=7, aborted=True)
    assert group.turn().closed
    assert group.board.not_durable == ""


def test_a_flush_that_training_has_gone_back_behind_says_nothing_about_the_line_that_is_open():
    """A signal's flush still runs when the program loads an older step: what comes then is not committed by it."""
    group = Group(1)
    group.seal(60)
    group.tell(0, emergency=1)
    group.turn()
    group.leader.begin_line(1, committed=40, floor=-1)
    group.tell(0, line=1, step=40, sealed=())
    group.report_all()
    group.finish()
    assert group.leader.committed == 40
    assert [decision.line for decision in group.board.decisions] == [0]
    group.leader.add_due(Due(50, forced=True))
    group.tell(0, step=50, sealed=(50,))
    assert group.turn().flush.step == 50


def test_posts_of_another_line_are_not_listened_to():
    group = Group(2)
    group.seal(60)
    group.leader.begin_line(1, committed=40, floor=-1)
    assert group.turn().floor == -1
    for rank in range(2):
        group.tell(rank, line=1, sealed=(41,), step=41)
    assert group.turn().floor == 41


def test_a_commit_whose_outcome_is_unknown_is_not_called_failed():
    group = Group(1)
    group.leader.add_due(Due(10, forced=True))
    group.seal(10)
    group.report_all()
    group.finish(reason="fsync of the parent failed", unknown=True)
    assert group.outcomes() == [(10, 10, "unknown")]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_due_flush_is_decided_exactly_once_whatever_happens(data):
    """Ranks seal, lack, fail and fall silent in any order; time passes; each due ends in one decision."""
    world_size = data.draw(st.integers(1, 3))
    group = Group(world_size)
    dues, step = [], 0
    for _ in range(data.draw(st.integers(1, 12))):
        step += 1
        if data.draw(st.booleans()):
            dues.append(step)
            group.leader.add_due(Due(step, forced=data.draw(st.booleans())))
        for rank in range(world_size):
            post = group.posts[rank]
            if data.draw(st.booleans()):
                group.tell(rank, step=step, sealed=(*post.sealed[-3:], step))
            else:
                group.tell(rank, step=step, missing=(*post.missing, step))
        group.turn(data.draw(st.sampled_from([0.01, 1.0])))
        _react(data, group)
    for _ in range(200):
        if len(group.decisions) >= len(dues):
            break
        for rank in range(world_size):
            post = group.posts[rank]
            lacking = {due for due in dues if due not in post.sealed}
            group.tell(rank, missing=tuple(sorted(lacking)))
        _react(data, group)
        group.turn(5.0)
    decided = [decision.due for decision in group.decisions.values()]
    assert sorted(decided) == sorted(dues)


def _react(data, group: Group) -> None:
    flush = group.board.flush
    if flush is not None and not group.works:
        for rank in range(len(group.posts)):
            answer = data.draw(st.sampled_from(["good", "error", "silent"]))
            if answer == "good":
                report = Report(attempt=flush.attempt, digest="d", files={})
                group.tell(rank, report=report)
            elif answer == "error":
                group.tell(rank, report=Report(attempt=flush.attempt, error="EIO"))
        group.turn()
    if group.works:
        reason = data.draw(st.sampled_from([None, "EIO"]))
        group.finish(reason=reason, unknown=reason is not None and data.draw(st.booleans()))


def test_a_lost_lease_is_told_to_all_for_a_step_that_none_has_come_to_and_nothing_begins_after_it():
    group = Group(2)
    group.leader.share = True
    group.seal(9)
    group.leader.lose_lease("taken over")
    group.leader.lose_lease("something that follows from it")
    board = group.turn()
    assert (board.lease_lost, board.lost_at > 9) == ("taken over", True)
    group.leader.add_due(Due(10, forced=True))
    group.tell(0, emergency=1)
    group.seal(9, 10)
    assert (group.board.flush, group.works, group.board.emergency_over) == (None, [], True)
    for rank in range(2):
        group.tell(rank, closing=True)
    assert group.turn().closed
    assert group.works == []


def test_a_flush_under_way_is_given_up_with_the_lease():
    group = Group(2)
    group.leader.share = True
    group.leader.add_due(Due(10, forced=True))
    group.seal(10)
    group.leader.lose_lease("taken over")
    board = group.turn()
    assert (board.flush.abandoned, board.lease_lost) == ("taken over", "taken over")


@pytest.mark.parametrize("reason", [None, "rank 0: taken over"])
def test_what_is_being_committed_when_the_lease_is_lost_is_decided_first(reason):
    """It may have become real just before: nobody must be told that it is lost."""
    group = Group(2)
    group.leader.share = True
    group.leader.add_due(Due(10, forced=True))
    group.seal(10)
    group.report_all()
    group.leader.lose_lease("taken over")
    assert (group.turn().flush.abandoned, group.board.lease_lost) == (None, "")
    group.finish(reason)
    assert group.board.lease_lost == "taken over"
    assert group.outcomes() == [(10, 10, "committed" if reason is None else "failed")]


def test_a_line_that_begins_after_the_lease_was_lost_has_a_step_of_its_own_for_that():
    group = Group(1)
    group.seal(1000)
    group.leader.lose_lease("taken over")
    assert group.turn().lost_at > 1000
    group.leader.begin_line(1, 5, -1)
    group.tell(0, line=1, step=5, sealed=())
    assert 5 < group.turn().lost_at < 1000


def floor_in_its_place():
    """Step 7 is due and rank 0 lacks it, so that the floor is flushed in its place."""
    group = Group(2)
    group.seal(4)
    group.tell(0, sealed=(4,), step=8, missing=(7,), due=(7,))
    group.tell(1, sealed=(4, 7), step=8, due=(7,))
    group.leader.add_due(Due(7, False))
    flush = group.turn().flush
    assert (flush.step, flush.due) == (4, 7)
    return group, flush


def older_in_its_place(lost: bool = False):
    """Step 7 is asked for by name while the floor is flushed in its place."""
    group, flush = floor_in_its_place()
    group.tell(0, sealed=(7,))  # save() takes the snapshot that was skipped before, and is never skipped
    group.leader.add_due(Due(7, True))
    if lost:
        group.tell(0, report=Report(attempt=flush.attempt, error="it is gone", lost=True))
        group.tell(1, report=Report(attempt=flush.attempt, digest="same"))
        group.turn()
        group.turn()
    else:
        group.report_all()
        group.report_all()
    group.finish()
    return group


@pytest.mark.parametrize("lost", [False, True])
def test_an_older_step_in_its_place_is_no_answer_to_a_save_by_name(lost):
    group = older_in_its_place(lost)
    flush = group.turn().flush
    assert (flush.step, flush.due) == (7, 7)
    group.report_all()
    if group.works == []:
        group.report_all()
    group.finish()
    assert (7, 7, "committed") in group.outcomes()


def test_an_emergency_goes_on_when_the_floor_was_written_over_meanwhile():
    group = Group(2)
    group.seal(10)
    group.tell(0, emergency=1)
    flush = group.turn().flush
    assert flush.step == 10
    group.tell(0, report=Report(attempt=flush.attempt, error="it is gone", lost=True), sealed=(11,), step=12)
    group.turn()
    group.tell(1, report=Report(attempt=flush.attempt, error="given up"), sealed=(11,), step=12)
    group.turn()
    group.finish()
    assert not group.board.emergency_over
    assert group.board.flush.step == 11


def test_an_error_of_storage_does_not_pass_for_a_lost_snapshot():
    group, flush = floor_in_its_place()
    group.tell(0, report=Report(attempt=flush.attempt, error="it is gone", lost=True))
    group.tell(1, report=Report(attempt=flush.attempt, error="No space left on device"))
    group.turn()
    group.turn()
    group.finish()
    assert group.outcomes() == [(7, 4, "failed")]
