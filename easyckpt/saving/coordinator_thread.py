"""The background thread by which the ranks agree: it speaks for this rank, listens to rank 0, and on rank 0 leads.

It waits for nobody: what takes long (all I/O of the storage tier) is the flusher's, whose answers it collects.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from easyckpt.config import CheckpointConfig
from easyckpt.distributed.mailbox import Mailbox
from easyckpt.distributed.ranks import Ranks
from easyckpt.errors import EasyckptError, PeerTimeout, SaveFailed
from easyckpt.events import Event, FlushCommitted, FlushFailed, FlushSkipped
from easyckpt.memory.arena import Arena
from easyckpt.memory.slot import SlotMeta
from easyckpt.saving import last_look
from easyckpt.saving.alarms import Alarms
from easyckpt.saving.failures import error_of
from easyckpt.saving.flusher import Flusher
from easyckpt.saving.leading import Leading
from easyckpt.saving.ledger import Ledger
from easyckpt.saving.live import LiveSnapshot
from easyckpt.saving.messages import Board, Decision, Flush, Post, Report, dump, load_board
from easyckpt.saving.participant import Participant
from easyckpt.saving.waking import Bell, Latch
from easyckpt.saving.worker import give_way
from easyckpt.saving.writer import SnapshotBytes

logger = logging.getLogger("easyckpt")

QUICK_POLL_SECONDS = 0.001
SLOW_POLL_SECONDS = 0.05
LEAVE_TIMEOUT_SECONDS = 10.0
#: The same after an exception, when the others may not be leaving at all.
HURRIED_LEAVE_SECONDS = 1.0
BEATS_IN_PEER_TIMEOUT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorParts:
    """What the coordinator's thread works with."""

    ranks: Ranks
    mailbox: Mailbox
    arena: Arena
    flusher: Flusher
    config: CheckpointConfig
    emit: Callable[[Event], None]
    committed_by: Callable[[Flush], bool]
    """Whether an attempt has become a checkpoint, as the root says."""
    dead_peers: Callable[[], list[int]]
    on_lease_lost: Callable[[], None]
    """The root is another job's: what this rank still has to say is not written there. Maybe more than once."""


class CoordinatorThread:
    """Runs from construction until rank 0 has ended the job, or the ranks have lost each other.

    Other threads share the `ledger` with it, which has a lock, and beside that only set `live`, `in_emergency`,
    `emergency_until`, `hurried` and `deserted`, ring `alarms` and read `board`, which need none. `wake` has it look at
    once.
    """

    def __init__(self, parts: CoordinatorParts, ledger: Ledger) -> None:
        self.wake = Bell()
        self.live: LiveSnapshot | None = None
        """The training thread waits, and lends its live state as the snapshot of its step."""
        self.in_emergency = False
        """A signal has come, here or to another rank."""
        self.emergency_until = 0.0
        """Until when, by the monotonic clock, what the newest signal asks for is waited for."""
        self.hurried = False
        """Nobody waits for a signal's flush any more."""
        self._given_up = 0
        """Number of the newest emergency that is given up here."""
        self.deserted = False
        """The flusher has ended, and so has what this rank would do."""
        self.alarms = Alarms()
        self.board = Board()
        self._parts, self._ledger = parts, ledger
        self._posted: Post | None = None
        self._jobs: list[tuple[Future[Any], Callable[[Future[Any]], None]]] = []
        leads = parts.ranks.rank == 0
        self._participant = Participant(
            parts.flusher,
            view_of=self._view,
            watch=self._watch,
            report=self._report,
            emit=parts.emit,
            leads=leads,
        )
        self._leading = (
            Leading(parts.mailbox, parts.flusher, ledger, view_of=self._view, watch=self._watch) if leads else None
        )
        self._left = False
        self._beat_seconds = parts.config.peer_timeout / BEATS_IN_PEER_TIMEOUT
        self._moved = time.monotonic()
        self._ended = Latch()
        threading.Thread(target=self._run, name="easyckpt-coordinator", daemon=True).start()

    def in_flush_for_signal(self) -> bool:
        """Whether what a signal, here or at another rank, asks for is neither decided nor given up. From any thread."""
        board = self.board
        return self.alarms.waiting or (board.emergency > self._given_up and not board.emergency_over)

    def join(self, timeout: float) -> bool:
        """Wait for its end; False when it has not come within `timeout` seconds."""
        return self._ended.wait(timeout)

    # Everything below runs on the thread itself.

    def _run(self) -> None:
        give_way()
        pause = QUICK_POLL_SECONDS
        try:
            while not self._left:
                moved = self._turn()
                self._left = self._left or self._may_go()
                pause = QUICK_POLL_SECONDS if moved else min(pause * 1.5, self._longest_pause())
                if self.wake.wait(pause):
                    pause = QUICK_POLL_SECONDS
            self._linger()
            self._ledger.give_up(SaveFailed("the job has ended before this step was flushed"))
        except EasyckptError as error:
            self._lost(error)
        except Exception as error:
            logger.exception("the coordinator thread has failed")
            self._lost(SaveFailed(f"rank {self._parts.ranks.rank}: the coordinator thread has failed: {error!r}"))
        finally:
            self.alarms.end()
            self._ended.set()

    def _turn(self) -> bool:
        """One round of listening and speaking; returns whether anything moved."""
        before, deserted = (self.board, self._posted), self.deserted
        self._collect_jobs()
        self._speak()
        if self._leading is not None:
            self._leading.lead()
        data = self._parts.mailbox.board()
        if data is not None:
            board = load_board(data)
            if board != self.board and board.line == self._ledger.post.line:
                if _progress(board) != _progress(self.board):
                    self._moved = time.monotonic()
                self._listen(board)
        if self.hurried:
            self.alarms.end()
        self._give_up_on_the_dead()
        self._check_silence()
        if deserted and not self._left:
            raise SaveFailed("the job has ended")
        return (self.board, self._posted) != before

    def _longest_pause(self) -> float:
        post, flushes = self._ledger.post, self.in_flush_for_signal()
        outstanding = self._ledger.pending() or self._participant.attempt or post.closing or flushes
        behind = any(meta.step > self._ledger.floor for meta in self._sealed())
        return SLOW_POLL_SECONDS / 5 if outstanding or behind else SLOW_POLL_SECONDS

    # -- snapshots of this rank

    def _sealed(self) -> list[SlotMeta]:
        live, sealed = self.live, self._ledger.on_line(self._parts.arena.sealed())
        return sealed if live is None else [*sealed, live.meta]

    def _view(self, flush: Flush) -> SnapshotBytes:
        step, live = flush.step, self.live
        if flush.line != self._ledger.post.line:  # the same number is another state there
            raise SaveFailed(f"training has gone back meanwhile, and left the line that step {step} lies on")
        if live is not None and live.meta.step == step:
            return live
        for meta in self._ledger.on_line(self._parts.arena.sealed()):
            if meta.step == step:
                return self._parts.arena.view(step, meta.timeline)
        raise SaveFailed(f"it holds no whole snapshot of step {step} any more")

    # -- speaking

    def _speak(self, **fields: Any) -> None:
        beat = int(time.monotonic() / self._beat_seconds) if self._ledger.pending() else 0
        fields |= {"beat": beat, "without_memory": self._parts.arena.count == 0}
        post = self._ledger.speak(self._sealed, emergency=self.alarms.ask(self.board), **fields)
        if post != self._posted:
            self._parts.mailbox.post(dump(post))
            self._posted = post

    def _report(self, report: Report) -> None:
        self._ledger.tell(report=report)

    # -- what others do in the background

    def _watch(self, future: Future[Any], then: Callable[[Future[Any]], None]) -> None:
        """Have `then` called on this thread once `future` is done."""
        self._jobs.append((future, then))
        future.add_done_callback(lambda _: self.wake.ring())

    def _collect_jobs(self) -> None:
        for job in [job for job in self._jobs if job[0].done()]:
            self._jobs.remove(job)
            job[1](job[0])

    # -- listening

    def _listen(self, board: Board) -> None:
        decided = self._ledger.hear(board)
        self.in_emergency = self.in_emergency or board.emergency > 0
        if board.emergency > self.board.emergency and not self.alarms.waiting:
            self.emergency_until = time.monotonic() + self._parts.config.signal_deadline
        self.board = board
        for decision, promises in decided:
            self._parts.emit(_event_of(decision, self._participant.effort(decision.attempt or "")))
            if decision.attempt is not None:
                self._participant.end()
            error = error_of(decision)
            for promise in promises:
                promise.set_result(decision.step) if error is None else promise.set_exception(error)
        if board.lease_lost and self._ledger.fatal is not None:
            self._ledger.give_up(self._ledger.fatal)
            self._parts.on_lease_lost()
        if board.flush is not None:
            self._participant.take_part(board.flush)
        self.alarms.hear(board)
        if board.closed:
            self._ledger.give_up(self._answer(SaveFailed("the job has ended")))
            self._left = True

    def _give_up_on_the_dead(self) -> None:
        """In an emergency nobody waits for a rank that is known to be dead."""
        if self.in_flush_for_signal() and (dead := self._parts.dead_peers()):
            rank, others = self._parts.ranks.rank, ", ".join(map(str, dead))
            logger.warning("rank %d: the emergency flush is given up: rank %s has died", rank, others)
            self._given_up = max(self.board.emergency, self.alarms.asked)
            self.alarms.give_up()

    def _check_silence(self) -> None:
        """Give up when nothing has moved for longer than anything that rank 0 decides may take.

        Rank 0 looks at itself too: its storage may hang for good. So every Future is resolved in bounded time.
        """
        outstanding = bool(self._ledger.pending() or self._participant.attempt)
        limit = self._parts.config.commit_timeout + 2 * self._parts.config.peer_timeout
        if outstanding and time.monotonic() - self._moved > limit:
            what = "storage has not answered rank 0" if self._leading is not None else "rank 0 has decided nothing"
            raise PeerTimeout(f"{what} for {limit:g} s")
        if not outstanding:
            self._moved = time.monotonic()

    # -- the end

    def _may_go(self) -> bool:
        """After an exception nobody is waited for, once nothing runs that this rank has a part in."""
        if self._posted is None or not self._posted.aborted:
            return False
        published = None if self._leading is None else self._leading.published
        board = self.board if published is None else published
        return board.flush is None and not self._jobs

    def _linger(self) -> None:
        """Rank 0 leaves last: other ranks must be able to read the end, for a bounded time."""
        self._speak(left=True)
        aborted = self._ledger.post.aborted
        deadline = time.monotonic() + (HURRIED_LEAVE_SECONDS if aborted else LEAVE_TIMEOUT_SECONDS)
        while self._leading is not None and time.monotonic() < deadline:
            if all(post is not None and post.left for post in self._leading.posts()):
                return
            time.sleep(QUICK_POLL_SECONDS)

    def _lost(self, error: EasyckptError) -> None:
        """The other ranks cannot be reached any more."""
        self._ledger.end_all(self._answer(error))

    def _answer(self, error: EasyckptError) -> EasyckptError:
        """What those get who wait, when nothing is decided any more. What was under way may have become durable."""
        flush = self.board.flush
        if flush is None:
            return error
        unknown = last_look.answer(flush, error, self._parts.committed_by, self._parts.config.peer_timeout)
        if unknown is None:
            self._ledger.found_committed(flush)
        return unknown or error


def _progress(board: Board) -> object:
    """What changes as flushes get on: while one runs, that training goes on and due steps are skipped is no sign."""
    return board.flush or (board.decisions, board.waited)


def _event_of(decision: Decision, effort: tuple[int, float]) -> Event:
    step, attempt = decision.step, decision.attempt or ""
    if decision.outcome == "committed":
        return FlushCommitted(step=step, attempt=attempt, bytes=decision.nbytes, seconds=decision.seconds)
    if decision.outcome == "skipped":
        return FlushSkipped(step=step, reason=decision.reason)
    nbytes, seconds = effort
    return FlushFailed(step=step, attempt=attempt, reason=decision.reason, bytes=nbytes, seconds=seconds)
