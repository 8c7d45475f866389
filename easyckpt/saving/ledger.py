"""What the training thread and the coordinator's thread both know and change: snapshots, due flushes, how they ended.

All of it is guarded by `lock`. Every method takes it, unless it says otherwise; under it nobody waits, no I/O happens,
and no code of the user's runs. On rank 0 the leader is part of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from easyckpt.config import CheckpointConfig
from easyckpt.errors import EasyckptError, LeaseLost
from easyckpt.memory.slot import SlotMeta
from easyckpt.saving.failures import Failures, error_of
from easyckpt.saving.leader import Due, Leader, Work
from easyckpt.saving.messages import Board, Decision, Flush, Post
from easyckpt.saving.promises import Callbacks, Promise, failed, resolved


class Ledger:
    """See the module's docstring."""

    def __init__(self, leader: Leader | None, config: CheckpointConfig, *, alone: bool) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Rings when a decision or the end of all saving has made slots free, or waiting for them useless. Take `lock`
        itself to wait for it: Ctrl-C inside a condition's `__enter__` would leave it locked."""
        self.callbacks = Callbacks()
        self.floor = -1
        self.useless: frozenset[int] = frozenset()
        self.committed = -1
        self.blocking = False
        """Due saves must not return before their snapshot is whole: see `Board.without_memory`."""
        self.post = Post()
        self._leader, self._alone = leader, alone
        self._failures = Failures(config)
        self._timeline: str | None = None
        self._adopted: tuple[str, int] | None = None
        self._waiting: dict[int, Promise] = {}
        self._forced: set[int] = set()
        """Those of them that are asked for by name, and never skipped."""
        self._early: dict[int, Decision] = {}
        """Decisions about due steps that this rank's training has not come to yet: rank 0 may be ahead of it."""
        self._asked = -1
        """Newest step that was due here."""
        self._held: dict[int, int] = {}
        self._held_attempt: str | None = None

    # -- lines and snapshots

    def begin_line(self, timeline: str | None, *, committed: int, adopted: tuple[str, int] | None) -> None:
        """See Coordinator."""
        with self.lock:
            floor = -1 if adopted is None else adopted[1]
            self._timeline, self._adopted = timeline, adopted
            self._failures.unsaved = None  # it was raised, and lies on a line that training has left
            self.committed, self.floor, self.useless = committed, floor, frozenset()
            self._early, self._asked = {}, -1
            line, step = self.post.line + 1, max(committed, floor)
            self.post = replace(self.post, line=line, step=step, wanted=-1, lack="", missing=())
            if self._leader is not None:
                self._leader.begin_line(line, committed, floor)

    def on_line(self, metas: Sequence[SlotMeta]) -> list[SlotMeta]:
        """Those snapshots that belong to the line of training. Takes no lock."""
        line = (self._timeline, self._adopted)
        return [meta for meta in metas if meta.timeline == line[0] or (meta.timeline, meta.step) == line[1]]

    def sealed(self, step: int) -> None:
        """The snapshot of `step` is whole. A rank that is alone knows the floor at once: nobody is to be asked."""
        if self._alone and self._leader is not None:
            with self.lock:
                self.floor = self._leader.floor = max(self.floor, step)

    def lacks(self, step: int, reason: str) -> None:
        """See Coordinator."""
        with self.lock:
            if step in self._waiting:
                self.post = replace(self.post, missing=(*self.post.missing, step))
            if step == self.post.wanted:
                self.post = replace(self.post, lack=reason)

    def tell(self, **fields: Any) -> None:
        """Change what this rank posts."""
        with self.lock:
            self.post = replace(self.post, **fields)

    def speak(self, sealed: Callable[[], Sequence[SlotMeta]], **fields: Any) -> Post:
        """What this rank posts now. `sealed` is asked under the lock: who closes has sealed all that it will."""
        with self.lock:
            steps = tuple(sorted(meta.step for meta in sealed()))
            self.post = replace(self.post, sealed=steps, due=tuple(self._waiting), **fields)
            return self.post

    # -- flushes

    def due(self, step: int, *, forced: bool) -> Future[int]:
        """See Coordinator."""
        with self.lock:
            if step <= self.committed:
                return resolved(step)
            if self._failures.fatal is not None:
                self._failures.refused = True
                return failed(self._failures.fatal)
            self._asked = max(self._asked, step)
            early = self._take_early(step, forced)
            if early is not None:
                error = error_of(early)
                known = resolved(early.step) if error is None else failed(error)
                known.known_at = early.raise_at
                return known
            promise = self._waiting.get(step)
            new = promise is None
            if promise is None:
                promise = self._waiting[step] = Promise(self.callbacks)
                self._hold(step)
                if step == self.post.wanted and self.post.lack:
                    self.post = replace(self.post, missing=(*self.post.missing, step))
            if forced:
                self._forced.add(step)
            if self._leader is not None and (new or forced):
                self._leader.add_due(Due(step, forced))
            return promise

    def pending(self) -> list[Promise]:
        """Flushes without a decision yet."""
        with self.lock:
            return list(self._waiting.values())

    def held(self) -> frozenset[int]:
        """Steps whose slots must not be reused. Call it under `lock`, together with reading `floor`."""
        return frozenset(self._held)

    def lead(self, posts: Sequence[Post | None], now: float) -> tuple[Board, list[Work]]:
        """Rank 0: have the leader decide."""
        assert self._leader is not None
        with self.lock:
            board, works = self._leader.advance(posts, now)
            self._hold_flush(board.flush)
            return board, works

    def work_done(self, work: Work, *, reason: str | None, unknown: bool, nbytes: int, seconds: float) -> None:
        """Rank 0: what the leader wanted done has been done."""
        assert self._leader is not None
        with self.lock:
            self._leader.finished(work, reason=reason, unknown=unknown, nbytes=nbytes, seconds=seconds)

    def lose_lease(self, reason: str) -> None:
        """Rank 0: another job owns the root. All ranks hear of it from the board."""
        assert self._leader is not None
        with self.lock:
            self._leader.lose_lease(reason)

    def hear(self, board: Board) -> list[tuple[Decision, list[Promise]]]:
        """Take in what rank 0 says; returns the new decisions with what they decide: to be resolved by the caller."""
        with self.lock:
            if board.line != self.post.line:
                return []  # training has just left it
            self._hold_flush(board.flush)
            new = [decision for decision in board.decisions if decision.number > self.post.seen]
            decided = [(decision, self._take(decision)) for decision in new]
            self.floor = max(self.floor, board.floor)
            self.useless = frozenset(board.useless)
            self.blocking |= board.without_memory
            if board.lease_lost:
                self._failures.end_all(LeaseLost(board.lease_lost), board.lost_at)
            self.changed.notify_all()
            return decided

    def _take(self, decision: Decision) -> list[Promise]:
        """Act on `decision`, under `lock`; returns what it decides."""
        self.post = replace(self.post, seen=decision.number)
        if decision.attempt is not None:
            self._release(decision.step)
        if decision.line != self.post.line:
            return []  # nobody waits for anything on a line that training has left
        due = decision.due
        decided: list[int] = []
        self._failures.record(decision)
        if decision.outcome == "committed":  # for whichever reason it was flushed (a signal, another due step)
            self.committed = max(self.committed, decision.step)
            decided = [step for step in self._waiting if step <= decision.step and step != due]
        if due is not None and not (due in self._forced and _is_no_answer(decision)):
            if due in self._waiting:
                decided.append(due)
            elif due > self._asked:
                self._early[due] = decision
        promises = [self._settle(step) for step in decided]
        for promise in promises:
            promise.known_at = decision.raise_at
        return promises

    def _settle(self, step: int) -> Promise:
        """The due flush of `step` needs no decision any more. Under `lock`."""
        self._release(step)
        self._forced.discard(step)
        self.post = replace(self.post, missing=tuple(other for other in self.post.missing if other != step))
        return self._waiting.pop(step)

    def _take_early(self, step: int, forced: bool) -> Decision | None:
        """What was decided about `step` before this rank came to it. Under `lock`."""
        decision = self._early.pop(step, None)
        self._early = {other: early for other, early in self._early.items() if other > step}
        return None if decision is None or (forced and _is_no_answer(decision)) else decision

    def _hold_flush(self, flush: Flush | None) -> None:
        """Keep the slot of a flush from its announcement to its decision. Under `lock`."""
        if flush is not None and flush.attempt != self._held_attempt:
            self._held_attempt = flush.attempt
            self._hold(flush.step)

    def _hold(self, step: int) -> None:
        self._held[step] = self._held.get(step, 0) + 1

    def _release(self, step: int) -> None:
        self._held[step] = self._held.get(step, 0) - 1
        if self._held[step] <= 0:
            del self._held[step]

    # -- what went wrong

    @property
    def fatal(self) -> EasyckptError | None:
        """What has ended all saving. Takes no lock."""
        return self._failures.fatal

    @property
    def unsaved(self) -> EasyckptError | None:
        """The newest failure of a flush, if nothing was committed since. Takes no lock."""
        return self._failures.unsaved

    def raise_failure(self, step: int | None) -> None:
        """See Coordinator."""
        with self.lock:
            error = self._failures.take(step, self.post.step)
        if error is not None:
            raise error

    def end_all(self, error: EasyckptError) -> None:
        """Nothing is saved any more: `error` is raised at every call, and decides whatever has no decision."""
        with self.lock:
            self._failures.end_all(error)
            self.changed.notify_all()
        self.give_up(error)

    def give_up(self, error: EasyckptError) -> None:
        """Flushes without a decision get none any more."""
        with self.lock:
            waiting = [self._settle(step) for step in list(self._waiting)]
            self._failures.refused |= bool(waiting)
        for promise in waiting:
            promise.set_exception(error)

    def found_committed(self, flush: Flush) -> None:
        """The root says that `flush` is committed, though nobody could tell this rank."""
        with self.lock:
            if flush.line != self.post.line:
                return
            self.committed = max(self.committed, flush.step)
            decided = [step for step in self._waiting if step <= flush.step or step == flush.due]
            promises = [self._settle(step) for step in decided]
        for promise in promises:
            promise.set_result(flush.step)


def _is_no_answer(decision: Decision) -> bool:
    """To a save of this very step, which is to come: it skips the due flush, or another step took its place."""
    return decision.outcome == "skipped" or decision.step != decision.due
