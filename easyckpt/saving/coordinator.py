"""What the training thread says to the other ranks, and hears from them.

It only leaves word (`sealed`, `due`) and picks up failures; under the default policy it never waits here. What both
threads know is the `Ledger`; what the background thread does with it is in `coordinator_thread`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from easyckpt.config import CheckpointConfig
from easyckpt.errors import LeaseLost, PeerTimeout, SaveFailed
from easyckpt.saving.coordinator_thread import CoordinatorParts, CoordinatorThread
from easyckpt.saving.leader import Leader, LeaderPolicy
from easyckpt.saving.ledger import Ledger
from easyckpt.saving.live import LiveSnapshot

logger = logging.getLogger("easyckpt")

#: Between two looks at how far a flush for a signal has come.
POLL_SECONDS = 0.01


class Coordinator:
    """See the module's docstring. Methods belong to the training thread where they do not say otherwise."""

    def __init__(self, parts: CoordinatorParts, *, incarnation: str) -> None:
        self._parts, self._ranks = parts, parts.ranks
        leader = Leader(parts.ranks.world_size, _policy(parts.config), incarnation) if parts.ranks.rank == 0 else None
        self.ledger = Ledger(leader, parts.config, alone=parts.ranks.alone)
        self._thread = CoordinatorThread(parts, self.ledger)

    @property
    def committed(self) -> int:
        """The newest step that is known to be committed on the line of training; -1: none."""
        return self.ledger.committed

    def begin_line(self, timeline: str | None, *, committed: int, adopted: tuple[str, int] | None) -> None:
        """A line of training begins.

        `timeline` is None while nothing was saved on it; `committed` is the newest committed step on it (-1: none);
        `adopted` is the (timeline, step) of the memory snapshot that it goes on from.
        """
        self.ledger.begin_line(timeline, committed=committed, adopted=adopted)

    def came_to(self, step: int) -> None:
        """The training loop has handed over `step`."""
        self.ledger.tell(step=step)

    def wanted(self, step: int) -> None:
        """A snapshot of `step` is to be taken: `close` raises unless it, or one of a later step, is durable."""
        self.ledger.tell(step=step, wanted=step, lack="")

    def sealed(self, step: int) -> None:
        """The snapshot of `step` is whole and final on this rank. From any thread."""
        self.ledger.sealed(step)
        self._thread.wake.ring()

    def lacks(self, step: int, reason: str) -> None:
        """There is no snapshot of `step` on this rank, and none will come unless training is over. From any thread."""
        self.ledger.lacks(step, reason)
        self._thread.wake.ring()

    def offer(self, live: LiveSnapshot | None) -> None:
        """The training thread waits and lends its live state as the snapshot of its step; None: it goes on."""
        lent, self._thread.live = self._thread.live, live
        if lent is not None:
            lent.withdraw()
        self._thread.wake.ring()

    def due(self, step: int, *, forced: bool) -> Future[int]:
        """The flush of `step` is due at all ranks. The Future holds the step that was committed, or the reason."""
        future = self.ledger.due(step, forced=forced)
        self._thread.wake.ring()
        return future

    def raise_failure(self, step: int | None) -> None:
        """Raise what went wrong in the background; `step`: only if every rank raises it at this step or before.

        None: after waiting for what was asked for.
        """
        self.ledger.raise_failure(step)

    def lose_lease(self, error: LeaseLost) -> None:
        """Rank 0: nothing is saved any more, and all ranks raise `error` at the same step. From any thread."""
        self.ledger.lose_lease(str(error))
        self._thread.wake.ring()

    def emergency(self, seconds: float) -> bool:
        """A signal has come: have the newest snapshot flushed at once, and wait for that; False if it takes longer.

        From any thread but the training's; takes no lock, which that may hold.
        """
        self._thread.in_emergency = True
        self._thread.emergency_until = time.monotonic() + seconds
        over = self._thread.alarms.ring()
        self._thread.wake.ring()
        return over.wait(seconds)

    def preempted(self, step: int) -> bool:
        """Whether a signal has come to some rank; every rank learns of it at the same step, so none is left alone."""
        if self._ranks.alone:
            return self._thread.in_emergency
        board = self._thread.board
        return board.emergency > 0 and step >= board.preempt_at

    def close(self, timeout: float) -> None:
        """Commit the newest snapshot with all ranks.

        Raises what went wrong, PeerTimeout when ranks do not come, SaveFailed when the newest step that was wanted is
        not durable: the same on all ranks.
        """
        if not self._leave(timeout, closing=True):
            flush = self._thread.board.flush
            running = "" if flush is None else f"the flush of step {flush.step} is still running; "
            raise PeerTimeout(
                f"rank {self._ranks.rank}: closing did not end within {self._parts.config.close_timeout:g} s "
                f"(close_timeout): {running}the newest commit known here is step {self.committed}"
            )
        if self.ledger.fatal is not None:
            raise self.ledger.fatal
        self.raise_failure(None)
        if self.ledger.unsaved is not None:
            raise self.ledger.unsaved
        board = self._thread.board
        if board.close_error:
            raise PeerTimeout(board.close_error)
        if board.not_durable:
            raise SaveFailed(board.not_durable)
        if not board.closed:
            raise SaveFailed(
                f"rank {self._ranks.rank}: the coordinator thread has ended before the job's end was agreed"
            )

    def see_emergency_through(self, signalled: Callable[[], bool]) -> None:
        """Before `abort`: what a signal has asked for, here or at another rank, is decided first, or given up.

        `signalled`: a signal has come here that this Coordinator may not have heard of yet.
        """
        thread = self._thread
        while signalled() or (thread.in_flush_for_signal() and time.monotonic() < thread.emergency_until):
            # The signal that ends a loader's workers has torch raise that here, once for each loader.
            with contextlib.suppress(Exception):
                if thread.join(POLL_SECONDS):
                    return

    def abort(self, timeout: float) -> bool:
        """Start nothing new; wait for what runs. False when it did not end in time."""
        return self._leave(timeout, aborted=True)

    def hurry(self) -> None:
        """In place of `abort`: nothing is waited for, nor by who has called `emergency`."""
        self._thread.hurried = True
        self.ledger.tell(aborted=True)
        self._thread.wake.ring()

    def desert(self, timeout: float) -> None:
        """The flusher has ended: a thread that still waits for what it would have done ends now."""
        self._thread.deserted = True
        self._thread.wake.ring()
        self._thread.join(timeout)

    def _leave(self, timeout: float, **how: bool) -> bool:
        """Post that this rank leaves, and wait for the end of the thread, and of users' callbacks."""
        deadline = time.monotonic() + timeout
        self.ledger.tell(**how)
        self._thread.wake.ring()
        ended = self._thread.join(timeout)
        if not self.ledger.callbacks.stop(max(0.0, deadline - time.monotonic())):
            logger.warning("a callback of a save's Future is still running: it may not come to its end")
        return ended


def _policy(config: CheckpointConfig) -> LeaderPolicy:
    return LeaderPolicy(
        wait_on_back_pressure=config.back_pressure == "wait",
        peer_timeout=config.peer_timeout,
        commit_timeout=config.commit_timeout,
        close_timeout=config.close_timeout,
        signal_deadline=config.signal_deadline,
    )
