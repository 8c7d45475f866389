"""The background thread by which the ranks agree: what is sealed everywhere, what is flushed, how it ended.

The training thread only leaves word here (`sealed`, `due`) and picks up failures; it never waits for this thread
under the default policy. Rank 0's thread also runs the `Leader`. All I/O of the storage tier is the flusher's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any

from easyckpt.config import CheckpointConfig
from easyckpt.distributed.mailbox import Mailbox
from easyckpt.distributed.ranks import Ranks
from easyckpt.errors import EasyckptError, OutcomeUnknown, PeerTimeout, SaveError, SaveFailed, StorageError
from easyckpt.events import Event, FlushCommitted, FlushFailed, FlushSkipped
from easyckpt.memory.arena import Arena
from easyckpt.memory.slot import SlotMeta
from easyckpt.saving.flusher import Flusher
from easyckpt.saving.leader import Due, Leader, LeaderPolicy, Work
from easyckpt.saving.live import LiveSnapshot
from easyckpt.saving.messages import Board, Decision, Flush, Post, Report, dump, load_board, load_post
from easyckpt.saving.participant import Participant
from easyckpt.saving.worker import Worker
from easyckpt.saving.writer import SnapshotBytes

logger = logging.getLogger("easyckpt")

QUICK_POLL_SECONDS = 0.001
SLOW_POLL_SECONDS = 0.05
LEAVE_TIMEOUT_SECONDS = 10.0


class Coordinator:
    """See the module's docstring. `lock` guards everything shared with the training thread; no I/O happens under it."""

    def __init__(
        self,
        ranks: Ranks,
        mailbox: Mailbox,
        arena: Arena,
        flusher: Flusher,
        config: CheckpointConfig,
        *,
        incarnation: str,
        emit: Callable[[Event], None],
        committed_by: Callable[[Flush], bool],
        dead_peers: Callable[[], list[int]],
    ) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.floor = -1
        self.useless: frozenset[int] = frozenset()
        self.committed = -1
        self.emergency_over = threading.Event()
        self.in_emergency = False
        self._signalled = False
        self._timeline: str | None = None
        self._adopted: tuple[str, int] | None = None
        self._ranks, self._mailbox, self._arena, self._flusher = ranks, mailbox, arena, flusher
        self._config, self._emit, self._committed_by = config, emit, committed_by
        self._dead_peers = dead_peers
        self._leader = _make_leader(ranks, config, incarnation) if ranks.rank == 0 else None
        self._post = Post()
        self._posted: Post | None = None
        self._board = Board()
        self._published: Board | None = None
        self._waiting: dict[int, Future[int]] = {}
        self._forced: set[int] = set()
        """Those of them that are asked for by name, and never skipped."""
        self._early: dict[int, Decision] = {}
        """Decisions about due steps that this rank's training has not come to yet: rank 0 may be ahead of it."""
        self._asked = -1
        """Newest step that was due here."""
        self._held: dict[int, int] = {}
        self._held_attempt: str | None = None
        self._live: LiveSnapshot | None = None
        self._part = Participant(flusher, view_of=self._view, watch=self._watch, report=self._report, emit=emit)
        self._jobs: list[tuple[Future[Any], Callable[[Future[Any]], None]]] = []
        self._failures_in_a_row = 0
        self._unsaved: EasyckptError | None = None
        """The newest failure, if nothing was committed since."""
        self._failure: tuple[int, EasyckptError] | None = None
        self._error: EasyckptError | None = None
        self._left = False
        self._wake = threading.Event()
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="easyckpt-coordinator", daemon=True)
        self._thread.start()

    # -- called by the training thread ---------------------------------------------------------------------------

    def begin_line(self, timeline: str | None, *, committed: int, adopted: tuple[str, int] | None) -> None:
        """A line of training begins.

        `timeline` is None while nothing was saved on it; `committed` is the newest committed step on it (-1: none);
        `adopted` is the (timeline, step) of the memory snapshot that it goes on from.
        """
        with self.lock:
            floor = -1 if adopted is None else adopted[1]
            self._timeline, self._adopted = timeline, adopted
            self.committed, self.floor, self.useless = committed, floor, frozenset()
            self._early, self._asked = {}, -1
            line = self._post.line + 1
            step = max(committed, floor)
            self._post = replace(self._post, line=line, step=step, wanted=-1, lack="", missing=())
            if self._leader is not None:
                self._leader.begin_line(line, committed, floor)

    def sealed(self, step: int) -> None:
        """The snapshot of `step` is whole and final on this rank."""
        if self._ranks.alone and self._leader is not None:
            with self.lock:  # nobody else to ask: the floor is known at once
                self.floor = self._leader.floor = max(self.floor, step)
        self._wake.set()

    def came_to(self, step: int) -> None:
        """The training loop has handed over `step`."""
        with self.lock:
            self._post = replace(self._post, step=step)

    def wanted(self, step: int) -> None:
        """A snapshot of `step` is to be taken: `close` raises unless it, or one of a later step, is durable."""
        with self.lock:
            self._post = replace(self._post, step=step, wanted=step, lack="")

    def due(self, step: int, *, forced: bool) -> Future[int]:
        """The flush of `step` is due at all ranks. The Future holds the step that was committed, or the reason."""
        with self.lock:
            if step <= self.committed:
                return _resolved(step)
            if self._error is not None:
                return _failed(self._error)
            self._asked = max(self._asked, step)
            early = self._take_early(step, forced)
            if early is not None:
                return early
            future = self._waiting.get(step)
            new = future is None
            if future is None:
                future = self._waiting[step] = _promised()
                self._hold(step)
                if step == self._post.wanted and self._post.lack:
                    self._post = replace(self._post, missing=(*self._post.missing, step))
            if forced:
                self._forced.add(step)
            if self._leader is not None and (new or forced):
                self._leader.add_due(Due(step, forced))
        self._wake.set()
        return future

    def _take_early(self, step: int, forced: bool) -> Future[int] | None:
        """What was decided about `step` before this rank came to it. Called under `lock`."""
        decision = self._early.pop(step, None)
        self._early = {other: early for other, early in self._early.items() if other > step}
        if decision is None or (forced and decision.outcome == "skipped"):
            return None
        error = _error_of(decision)
        return _resolved(decision.step) if error is None else _failed(error)

    def lacks(self, step: int, reason: str) -> None:
        """There is no snapshot of `step` on this rank, and none will come unless training is over."""
        with self.lock:
            if step in self._waiting:
                self._post = replace(self._post, missing=(*self._post.missing, step))
            if step == self._post.wanted:
                self._post = replace(self._post, lack=reason)
        self._wake.set()

    @property
    def error(self) -> EasyckptError | None:
        """What has ended all saving."""
        return self._error

    def held(self) -> frozenset[int]:
        """Steps whose slots must not be reused. Call under `lock`, together with reading `floor`."""
        return frozenset(self._held)

    def pending(self) -> list[Future[int]]:
        """Flushes without a decision yet."""
        with self.lock:
            return list(self._waiting.values())

    def raise_failure(self, step: int | None) -> None:
        """Raise what went wrong in the background; `step`: only if every rank raises it at this step or before."""
        with self.lock:
            error: EasyckptError | None = self._error
            if error is None and self._failure is not None and (step is None or step >= self._failure[0]):
                error, self._failure = self._failure[1], None
        if error is not None:
            raise error

    def fail(self, error: EasyckptError) -> None:
        """Something that ends all saving (a lost lease, lost peers): raised at every call from now on."""
        with self.changed:
            self._error = self._error or error
            waiting = self._give_up_waiting()
            self.changed.notify_all()
        _resolve_all(waiting, error)
        self._wake.set()

    def announce_emergency(self) -> None:
        """A signal has come. Takes no lock: may be called while the training thread holds it."""
        self.in_emergency = self._signalled = True
        self._wake.set()

    def preempted(self, step: int) -> bool:
        """Whether a signal has come to some rank; every rank learns of it at the same step, so none is left alone."""
        if self._ranks.alone:
            return self.in_emergency
        return self._board.emergency and step >= self._board.preempt_at

    def close(self, timeout: float) -> None:
        """Commit the newest snapshot with all ranks.

        Raises what went wrong, PeerTimeout when ranks do not come, SaveFailed when the newest step that was wanted is
        not durable: the same on all ranks.
        """
        with self.lock:
            self._post = replace(self._post, closing=True)
        self._wake.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise PeerTimeout(
                f"rank {self._ranks.rank}: closing did not end within {self._config.close_timeout:g} s "
                f"(close_timeout); the newest commit known here is step {self.committed}"
            )
        self.raise_failure(None)
        if self._unsaved is not None:
            raise self._unsaved
        if self._board.close_error:
            raise PeerTimeout(self._board.close_error)
        if self._board.not_durable:
            raise SaveFailed(self._board.not_durable)

    def abort(self, timeout: float) -> bool:
        """Start nothing new; wait for what runs. False when it did not end in time."""
        with self.lock:
            self._post = replace(self._post, aborted=True)
        self._wake.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = QUICK_POLL_SECONDS
        try:
            while not self._left:
                moved = self._turn()
                pause = QUICK_POLL_SECONDS if moved else min(pause * 1.5, self._longest_pause())
                if self._wake.wait(pause):
                    pause = QUICK_POLL_SECONDS
                self._wake.clear()
            self._linger()
        except EasyckptError as error:
            self._lost(error)
        except Exception as error:
            logger.exception("the coordinator thread has failed")
            self._lost(SaveFailed(f"rank {self._ranks.rank}: the coordinator thread has failed: {error!r}"))
        self.emergency_over.set()  # a signal that comes later has nothing to wait for

    def _turn(self) -> bool:
        """One round of listening and speaking; returns whether anything moved."""
        before = (self._board, self._posted)
        self._collect_jobs()
        self._speak()
        if self._leader is not None:
            self._lead()
        data = self._mailbox.board()
        if data is not None:
            board = load_board(data)
            if board != self._board and board.line == self._post.line:
                self._moved = time.monotonic()
                self._listen(board)
        self._give_up_on_the_dead()
        self._check_silence()
        return (self._board, self._posted) != before

    def _longest_pause(self) -> float:
        outstanding = self._waiting or self._part.attempt or self._post.closing or self._post.emergency
        behind = any(meta.step > self.floor for meta in self._sealed_on_line())
        return SLOW_POLL_SECONDS / 5 if outstanding or behind else SLOW_POLL_SECONDS

    def _speak(self) -> None:
        with self.lock:
            sealed = tuple(sorted(meta.step for meta in self._sealed_on_line()))
            post = self._post = replace(self._post, sealed=sealed, emergency=self._signalled)
        if post != self._posted:
            self._mailbox.post(dump(post))
            self._posted = post

    def offer(self, live: LiveSnapshot | None) -> None:
        """The training thread waits and lends its live state as the snapshot of its step; None: it goes on."""
        with self.lock:
            self._live = live
        self._wake.set()

    def _sealed_on_line(self) -> list[SlotMeta]:
        live = self._live
        if live is not None:
            return [live.meta]
        line = (self._timeline, self._adopted)
        return [
            meta for meta in self._arena.sealed() if meta.timeline == line[0] or (meta.timeline, meta.step) == line[1]
        ]

    def _view(self, step: int) -> SnapshotBytes:
        live = self._live
        if live is not None and live.meta.step == step:
            return live
        for meta in self._sealed_on_line():
            if meta.step == step:
                return self._arena.view(step, meta.timeline)
        raise SaveFailed(f"rank {self._ranks.rank} holds no whole snapshot of step {step} any more")

    def _lead(self) -> None:
        assert self._leader is not None
        posts = [None if data is None else load_post(data) for data in self._mailbox.posts()]
        with self.lock:
            board, works = self._leader.advance(posts, time.monotonic())
            self._hold_flush(board.flush)
        for work in works:
            self._start_work(work)
        if board != self._published:
            self._mailbox.publish(dump(board))
            self._published = board

    def _start_work(self, work: Work) -> None:
        if work.kind == "commit":
            view = self._view(work.flush.step)
            future = self._flusher.commit(work, view)
        else:
            future = self._flusher.clean_up(work)

        def finish(done: Future[Any]) -> None:
            assert self._leader is not None
            result = done.result()
            with self.lock:
                self._leader.finished(
                    work, reason=result.reason, unknown=result.unknown, nbytes=result.nbytes, seconds=result.seconds
                )
            if work.kind == "commit" and result.reason is None:
                self._watch(self._flusher.retain({work.flush.step}), _log_failure)

        self._watch(future, finish)

    def _watch(self, future: Future[Any], then: Callable[[Future[Any]], None]) -> None:
        self._jobs.append((future, then))
        future.add_done_callback(lambda _: self._wake.set())

    def _collect_jobs(self) -> None:
        for job in [job for job in self._jobs if job[0].done()]:
            self._jobs.remove(job)
            job[1](job[0])

    def _listen(self, board: Board) -> None:
        decided: list[tuple[Future[int], Decision]] = []
        with self.changed:
            self._hold_flush(board.flush)
            for decision in board.decisions:
                if decision.number > self._post.seen:
                    future = self._take(decision)
                    decided += [(future, decision)] if future is not None else []
            self.floor = max(self.floor, board.floor)
            self.useless = frozenset(board.useless)
            self.in_emergency = self.in_emergency or board.emergency
            self._board = board
            self.changed.notify_all()
        for future, decision in decided:  # without the lock: their callbacks are the user's code
            error = _error_of(decision)
            future.set_result(decision.step) if error is None else future.set_exception(error)
        if board.flush is not None:
            self._part.take_part(board.flush)
        if board.emergency_over:
            self.emergency_over.set()
        if board.closed:
            with self.lock:
                waiting = self._give_up_waiting()
            _resolve_all(waiting, SaveFailed("the job has ended"))
            self._left = True

    def _hold_flush(self, flush: Flush | None) -> None:
        """Keep the slot of a flush from its announcement to its decision. Called under `lock`."""
        if flush is not None and flush.attempt != self._held_attempt:
            self._held_attempt = flush.attempt
            self._hold(flush.step)

    def _hold(self, step: int) -> None:
        self._held[step] = self._held.get(step, 0) + 1

    def _report(self, report: Report) -> None:
        with self.lock:
            self._post = replace(self._post, report=report)

    def _take(self, decision: Decision) -> Future[int] | None:
        """Act on `decision`. Called under `lock`. Returns the Future that it decides."""
        future = None
        self._post = replace(
            self._post,
            seen=decision.number,
            missing=tuple(step for step in self._post.missing if step != decision.due),
        )
        if decision.attempt is not None:
            self._release(decision.step)
            self._part.end()
        due = decision.due
        if due in self._forced and decision.outcome == "skipped":
            pass  # meant for the due flush of the same step; the one that was asked for is still to come
        elif due is not None and due in self._waiting:
            self._release(due)
            self._forced.discard(due)
            future = self._waiting.pop(due)
        elif due is not None and due > self._asked:
            self._early[due] = decision
        self._record(decision, _error_of(decision))
        return future

    def _record(self, decision: Decision, error: SaveError | None) -> None:
        step, attempt = decision.step, decision.attempt or ""
        if decision.outcome == "committed":
            self.committed = max(self.committed, decision.step)
            self._failures_in_a_row, self._unsaved = 0, None
            self._emit(FlushCommitted(step=step, attempt=attempt, bytes=decision.nbytes, seconds=decision.seconds))
        elif decision.outcome == "skipped":
            self._emit(FlushSkipped(step=step, reason=decision.reason))
        else:
            self._failures_in_a_row += 1
            self._unsaved = error
            self._emit(FlushFailed(step=step, attempt=attempt, reason=decision.reason))
            tolerated = self._config.on_failure == "continue" and self._failures_in_a_row <= self._config.max_failures
            if not tolerated and error is not None and self._failure is None:
                self._failure = (decision.raise_at, error)

    def _release(self, step: int) -> None:
        self._held[step] = self._held.get(step, 0) - 1
        if self._held[step] <= 0:
            del self._held[step]

    def _give_up_on_the_dead(self) -> None:
        """In an emergency nobody waits for a rank that is known to be dead."""
        if self.in_emergency and not self.emergency_over.is_set() and (dead := self._dead_peers()):
            logger.warning("the emergency flush is given up: rank %s has died", ", ".join(map(str, dead)))
            self.emergency_over.set()

    def _check_silence(self) -> None:
        """Give up when nothing has moved for longer than anything that rank 0 decides may take.

        Rank 0 looks at itself too: its storage may hang for good. So every Future is resolved in bounded time.
        """
        outstanding = bool(self._waiting or self._part.attempt)
        limit = self._config.commit_timeout + 2 * self._config.peer_timeout
        if outstanding and time.monotonic() - self._moved > limit:
            what = "rank 0 has decided nothing" if self._leader is None else "storage has not answered rank 0"
            raise PeerTimeout(f"{what} for {limit:g} s")
        if not outstanding:
            self._moved = time.monotonic()

    def _linger(self) -> None:
        """The coordinator leaves last: other ranks must be able to read the end, for a bounded time."""
        self._speak_left()
        deadline = time.monotonic() + LEAVE_TIMEOUT_SECONDS
        while self._leader is not None and time.monotonic() < deadline:
            posts = [None if data is None else load_post(data) for data in self._mailbox.posts()]
            if all(post is not None and post.left for post in posts):
                return
            time.sleep(QUICK_POLL_SECONDS)

    def _speak_left(self) -> None:
        with self.lock:
            self._post = replace(self._post, left=True)
        self._speak()

    def _lost(self, error: EasyckptError) -> None:
        """The other ranks cannot be reached any more. What was under way may have become durable: look."""
        flush = self._board.flush
        outcome: EasyckptError = error
        committed = False
        if flush is not None:
            try:
                committed = self._look(flush)
            except (EasyckptError, OSError) as problem:
                outcome = OutcomeUnknown(f"step {flush.step}: {error}; looking into the root failed too: {problem}")
            else:
                if not committed:
                    outcome = OutcomeUnknown(f"step {flush.step}: {error}; it is not committed so far")
        future = None
        with self.changed:
            if committed and flush is not None:
                self.committed = max(self.committed, flush.step)
                future = self._waiting.pop(flush.due, None) if flush.due is not None else None
            self._error = self._error or outcome
            waiting = self._give_up_waiting()
            self.changed.notify_all()
        if future is not None and flush is not None:
            future.set_result(flush.step)
        _resolve_all(waiting, outcome)

    def _look(self, flush: Flush) -> bool:
        """Whether `flush` is committed, as the root says; a storage that hangs is not waited for for ever."""
        worker = Worker("easyckpt-look")
        try:
            return worker.submit(lambda: self._committed_by(flush)).result(self._config.peer_timeout)
        except FutureTimeout:
            raise StorageError(f"no answer for {self._config.peer_timeout:g} s") from None
        finally:
            worker.stop(0.0)

    def _give_up_waiting(self) -> list[Future[int]]:
        """Futures that get no decision any more. Called under `lock`; to be resolved without it."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        self._forced.clear()
        return waiting


def _make_leader(ranks: Ranks, config: CheckpointConfig, incarnation: str) -> Leader:
    policy = LeaderPolicy(
        wait_on_back_pressure=config.back_pressure == "wait",
        peer_timeout=config.peer_timeout,
        commit_timeout=config.commit_timeout,
        close_timeout=config.close_timeout,
        signal_deadline=config.signal_deadline,
    )
    return Leader(ranks.world_size, policy, incarnation)


def _error_of(decision: Decision) -> SaveError | None:
    if decision.outcome == "committed":
        return None
    kind = OutcomeUnknown if decision.outcome == "unknown" else SaveFailed
    return kind(f"step {decision.step} was not committed ({decision.outcome}): {decision.reason}")


def _log_failure(done: Future[Any]) -> None:
    if (error := done.exception()) is not None:
        logger.error("a background job has failed", exc_info=error)


def _promised() -> Future[int]:
    """A Future that its holder cannot cancel: the flush goes on whatever becomes of who waits for it."""
    future: Future[int] = Future()
    future.set_running_or_notify_cancel()
    return future


def _resolve_all(waiting: list[Future[int]], error: EasyckptError) -> None:
    for future in waiting:
        future.set_exception(error)


def _resolved(step: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(step)
    return future


def _failed(error: EasyckptError) -> Future[int]:
    future: Future[int] = Future()
    future.set_exception(error)
    return future
