"""Rank 0's decisions, as a pure state machine: posts in, board and work out. No I/O, no threads, no clock of its own.

Every due flush gets exactly one decision, and every rank gets the same one. A due step that is committed by the time
that its turn comes needs none: each rank learns of the commit. A flush goes through::

    (compare digests) ─▶ all ranks write ─▶ all ranks reported ─▶ commit ─▶ decision "committed"
                              └─ an error, or a rank that is silent too long ─▶ abandoned ─▶ decision "failed"
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from easyckpt.event_kinds import STILL_RUNNING
from easyckpt.saving.attempt import Attempt, Work, attempt_name
from easyckpt.saving.decisions import Decisions
from easyckpt.saving.failures import missing_at_the_end
from easyckpt.saving.messages import Board, Flush, Post
from easyckpt.saving.pace import Pace

__all__ = ["Due", "Leader", "LeaderPolicy", "Work"]


@dataclass(frozen=True, slots=True)
class Due:
    """A flush that is due at all ranks."""

    step: int
    forced: bool
    """Asked for by name: waits for its turn and is never skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderPolicy:
    """The settings that decisions depend on; times in seconds."""

    wait_on_back_pressure: bool
    peer_timeout: float
    commit_timeout: float
    close_timeout: float
    signal_deadline: float


class Leader:
    """See the module's docstring. `committed` is the newest step that is committed on the current line (-1: none)."""

    def __init__(self, world_size: int, policy: LeaderPolicy, incarnation: str) -> None:
        self.committed = -1
        self.share: bool | None = True if world_size == 1 else None
        self.floor = -1
        self._whole = -1
        """The floor, if every rank still holds it: one with a single slot writes over it."""
        self._useless: tuple[int, ...] = ()
        self._without_memory = False
        self._line = 0
        self._world_size = world_size
        self._policy = policy
        self._incarnation = incarnation
        self._attempts = 0
        self._dues: deque[Due] = deque()
        self._active: Attempt | None = None
        self._due_since: float | None = None
        self._waited = 0
        self._heard: list[tuple[Post | None, float]] = [(None, 0.0)] * world_size
        """The newest post of each rank, and when it came."""
        self._pace = Pace()
        self._decisions = Decisions(self._pace)
        self._emergency = 0
        self._emergency_over = False
        self._emergency_deadline = 0.0
        self._emergency_floor = -1
        self._preempt_at = 0
        self._failed_floor = -1
        self._closing_since: float | None = None
        self._closed = False
        self._close_error = self._not_durable = ""
        self._lost = self._lease_lost = ""
        """Why this job may write no more; the second once all are told, which a commit that is under way holds up."""
        self._lost_at = 0

    def begin_line(self, line: int, committed: int, floor: int) -> None:
        """Line number `line` begins: what counts as committed and as floor on it (-1: nothing)."""
        self._line, self.committed, self.floor, self._failed_floor = line, committed, floor, -1
        self._useless = ()
        self._pace.go_on_from(max(committed, floor))
        if self._emergency:
            self._preempt_at = self._pace.step_ahead()
        self._lost_at = self._pace.step_ahead()

    def lose_lease(self, reason: str) -> None:
        """The root belongs to another job: what runs is given up, nothing is begun, and all ranks are told."""
        self._lost = self._lost or reason

    def add_due(self, due: Due) -> None:
        """All ranks have come to a due step (rank 0 speaks for all: they run the same loop)."""
        if due.forced:  # of a step that is due anyway: then that one must not be skipped
            self._dues = deque(due if other.step == due.step else other for other in self._dues)
        flush = None if self._active is None else self._active.flush
        running = flush is not None and flush.due == flush.step == due.step  # and not an older step in its place
        if due.step > self.committed and not running and all(due.step != other.step for other in self._dues):
            self._dues.append(due)

    def advance(self, posts: Sequence[Post | None], now: float) -> tuple[Board, list[Work]]:
        """Take in what the ranks post at time `now`; returns the new board and the work to start."""
        posts = [post if post is not None and post.line == self._line else None for post in posts]
        self._heard = [
            heard if heard[0] == post else (post, now) for heard, post in zip(self._heard, posts, strict=True)
        ]
        known = [post for post in posts if post is not None]
        everyone = len(known) == self._world_size
        self._without_memory = any(post.without_memory for post in known)
        self._update_floor(known, everyone)
        if everyone:
            self._decisions.seen(min(post.seen for post in known))
        self._pace.update(max((post.step for post in known), default=-1), now)
        self._begin_emergency(max((post.emergency for post in known), default=0), now)
        self._dues = deque(due for due in self._dues if due.step > self.committed and not self._lost)
        if self._lost:
            self._end_saving(now)
        work = None
        if self._active is None:
            self._next_flush(posts, known, everyone, now)
        else:
            work = self._active.advance(posts, now)
            self.share = self._active.flush.share
            self._skip_while_busy()
        self._end_emergency(now)
        self._end_job(posts, now)
        return self._board(), [work] if work is not None else []

    def finished(self, work: Work, *, reason: str | None, unknown: bool, nbytes: int, seconds: float) -> None:
        """The background work is done; `reason` says why it failed (None: it succeeded)."""
        flush = work.flush
        assert self._active is not None
        assert self._active.flush.attempt == flush.attempt
        lost = self._active.lost and flush.step != flush.due  # what is due is held
        self._active = None
        if work.kind == "clean up":
            self._decisions.take(flush, "skipped" if lost else "failed", reason=flush.abandoned or "abandoned")
        elif reason is None:
            self.committed = max(self.committed, flush.step) if flush.line == self._line else self.committed
            self._decisions.take(flush, "committed", nbytes=nbytes, seconds=seconds)
        else:
            self._decisions.take(flush, "unknown" if unknown else "failed", reason=reason)
        if flush.due is None and flush.line == self._line and self.committed < flush.step and not lost:
            self._failed_floor = flush.step  # tried once for a signal or the end of the job: not again and again

    def _update_floor(self, known: list[Post], everyone: bool) -> None:
        self._whole = -1
        if everyone:
            common = set(known[0].sealed).intersection(*(post.sealed for post in known[1:]))
            self.floor = max(self.floor, max(common, default=-1))
            self._whole = self.floor if self.floor in common else -1
            above = {step for post in known for step in post.sealed if step > self.floor}
            self._useless = tuple(sorted(step for step in above if any(_passed_without(post, step) for post in known)))

    def _next_flush(self, posts: Sequence[Post | None], known: list[Post], everyone: bool, now: float) -> None:
        self._waited = 0
        while self._dues and self._active is None:
            due = self._dues[0]
            self._due_since = self._due_since if self._due_since is not None else now
            without = {rank: post for rank, post in enumerate(posts) if post is None or due.step not in post.sealed}
            lacking = [rank for rank, post in without.items() if post is not None and due.step in post.missing]
            if not without:
                self._start(due.step, due.step, now)
            elif lacking and self._whole > self.committed and not due.forced:
                self._start(self._whole, due.step, now)
            elif lacking:
                ranks = ", ".join(map(str, lacking))
                reason = f"rank {ranks} holds no whole snapshot of step {due.step}"
                self._close_due(due, "failed" if due.forced else "skipped", reason)
            elif late := [rank for rank in without if self._is_late(rank, due, now)]:
                ranks, limit = ", ".join(map(str, late)), f"{self._policy.peer_timeout:g} s (peer_timeout)"
                reason = f"rank {ranks} did not come to step {due.step}, or said nothing since, within {limit}"
                self._close_due(due, "failed", reason)
            else:
                self._waited = int((now - self._due_since) / self._policy.peer_timeout)
                break
            self._due_since = None
            if self._active is not None:
                self._dues.popleft()
        if self._active is None and self._wants_floor(known, everyone):
            self._start(self._whole, None, now)

    def _is_late(self, rank: int, due: Due, now: float) -> bool:
        """Whether a rank without the snapshot of `due` is to be waited for no longer.

        One whose training has come there seals it at its next optimizer step. What lies before that (a validation) may
        take as long as it likes; only that the rank is still there is looked at. With ranks whose training waits for
        this flush meanwhile, there may be no such step.
        """
        assert self._due_since is not None
        post, heard = self._heard[rank]
        came = post is not None and due.step in post.due and not self._without_memory
        since = heard if came else self._due_since
        return now - since > self._policy.peer_timeout

    def _wants_floor(self, known: list[Post], everyone: bool) -> bool:
        """Whether a signal or the end of the job asks for the newest snapshot, whatever its number."""
        if self._floor_is_settled() or any(post.aborted for post in known):
            return False
        if self._in_emergency() and not self._emergency_is_settled():
            return True
        return everyone and not self._closed and all(post.closing for post in known)

    def _end_saving(self, now: float) -> None:
        if self._active is not None:
            self._active.give_up(self._lost, now)
        if not self._lease_lost and (self._active is None or not self._active.committing):
            self._lease_lost, self._lost_at = self._lost, self._pace.step_ahead()

    def _emergency_is_settled(self) -> bool:
        return bool(self._lost) or self._emergency_floor <= max(self.committed, self._failed_floor)

    def _floor_is_settled(self) -> bool:
        return bool(self._lost) or self._whole <= max(self.committed, self._failed_floor)

    def _start(self, step: int, due: int | None, now: float) -> None:
        self._attempts += 1
        attempt = attempt_name(self._incarnation, self._attempts)
        self._active = Attempt(
            Flush(attempt=attempt, step=step, due=due, share=self.share, line=self._line),
            now,
            commit_timeout=self._policy.commit_timeout,
            give_up_timeout=min(self._policy.peer_timeout, self._policy.commit_timeout),
        )

    def _skip_while_busy(self) -> None:
        if self._policy.wait_on_back_pressure:
            return
        assert self._active is not None
        running = self._active.flush.step  # for a signal: may make this very step durable
        for due in [due for due in self._dues if not due.forced and due.step != running]:
            self._dues.remove(due)
            self._decide_due(due, "skipped", STILL_RUNNING)

    def _close_due(self, due: Due, outcome: Literal["failed", "skipped"], reason: str) -> None:
        self._dues.popleft()
        self._decide_due(due, outcome, reason)

    def _decide_due(self, due: Due, outcome: Literal["failed", "skipped"], reason: str) -> None:
        flush = Flush(attempt="", step=due.step, due=due.step, share=None, line=self._line)
        self._decisions.take(flush, outcome, reason=reason)

    def _in_emergency(self) -> bool:
        return self._emergency > 0 and not self._emergency_over

    def _begin_emergency(self, asked: int, now: float) -> None:
        if asked <= self._emergency or self._in_emergency():
            return
        if self._emergency == 0:
            self._preempt_at = self._pace.step_ahead()
        self._emergency, self._emergency_over = asked, False
        self._emergency_deadline = now + self._policy.signal_deadline
        self._emergency_floor = self.floor  # training goes on meanwhile, and its steps would never end
        self._failed_floor = -1  # what has failed before is tried once more

    def _end_emergency(self, now: float) -> None:
        if not self._in_emergency():
            return
        done = self._active is None and self._emergency_is_settled()
        self._emergency_over = done or now > self._emergency_deadline

    def _end_job(self, posts: Sequence[Post | None], now: float) -> None:
        known = [post for post in posts if post is not None]
        if self._closed or not any(post.closing or post.aborted for post in known):
            return
        self._closing_since = self._closing_since if self._closing_since is not None else now
        leaving = sum(post.closing or post.aborted for post in known)
        if leaving == self._world_size and self._active is None and not self._dues:
            aborted = any(post.aborted for post in known)
            self._closed = self._floor_is_settled() or aborted
            if self._closed:
                self._not_durable = missing_at_the_end(known, self.committed)
        elif now - self._closing_since > self._policy.close_timeout:
            late = [rank for rank, post in enumerate(posts) if post is None or not (post.closing or post.aborted)]
            self._close_error = f"{self._unfinished(late)} within {self._policy.close_timeout:g} s (close_timeout)"
            self._closed = True

    def _unfinished(self, late: list[int]) -> str:
        """In words, what the end of the job has waited for in vain; `late`: ranks that are not closing."""
        if late:
            return f"rank {', '.join(map(str, late))} did not close"
        steps = [self._active.flush.step] if self._active is not None else [due.step for due in self._dues]
        return f"the flush of step {', '.join(map(str, steps))} did not end"

    def _board(self) -> Board:
        return Board(
            line=self._line,
            floor=self.floor,
            useless=self._useless,
            without_memory=self._without_memory,
            flush=None if self._active is None else self._active.flush,
            decisions=self._decisions.on_board,
            emergency=self._emergency,
            emergency_over=self._emergency_over,
            preempt_at=self._preempt_at,
            lease_lost=self._lease_lost,
            lost_at=self._lost_at if self._lease_lost else 0,
            closed=self._closed,
            close_error=self._close_error,
            not_durable=self._not_durable,
            waited=self._waited,
        )


def _passed_without(post: Post, step: int) -> bool:
    """Whether a rank will never hold `step`. One step on, it may still be sealing it; at its end it has sealed all."""
    return step not in post.sealed and (post.closing or post.step >= step + 2)
