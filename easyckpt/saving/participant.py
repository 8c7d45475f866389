"""A rank's part in the flush that is on the board: digest, write, report, give up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from easyckpt.errors import EasyckptError, SaveFailed
from easyckpt.events import Event, FlushBegun, Warned
from easyckpt.saving.flusher import Flusher
from easyckpt.saving.messages import Flush, Report
from easyckpt.saving.writer import SnapshotBytes

Watch = Callable[[Future[Any], Callable[[Future[Any]], None]], None]


class Participant:
    """Belongs to the coordinator's thread. `watch` has a function called there once a Future is done."""

    def __init__(
        self,
        flusher: Flusher,
        *,
        view_of: Callable[[Flush], SnapshotBytes],
        watch: Watch,
        report: Callable[[Report], None],
        emit: Callable[[Event], None],
        leads: bool,
    ) -> None:
        self._flusher, self._view_of, self._watch = flusher, view_of, watch
        self._report, self._emit, self._leads = report, emit, leads
        self._warned_of_unequal = False
        self.attempt: str | None = None
        """The attempt that this rank takes part in."""
        self._abandoned = threading.Event()
        self._stages: set[str] = set()
        self._working = False
        self._newest: tuple[str | None, int, float] = (None, 0, 0.0)
        """The attempt that this rank took part in last: its name, bytes of the snapshot, when it began."""

    def take_part(self, flush: Flush) -> None:
        """Do what `flush` asks for now and was not done yet."""
        if flush.attempt != self.attempt:
            self.attempt, self._abandoned, self._stages = flush.attempt, threading.Event(), set()
            self._working = False
        self._warn_of_unequal(flush)
        stage: Literal["digest", "files"] = "digest" if flush.share is None else "files"
        if flush.abandoned is not None:
            self._abandoned.set()
            if not self._working:  # nothing of this rank is to come: rank 0 need not wait for it
                self._report(Report(attempt=flush.attempt, error="given up before this rank came to it"))
        elif stage not in self._stages:
            self._stages.add(stage)
            self._begin(flush, stage)

    def _warn_of_unequal(self, flush: Flush) -> None:
        if flush.share is False and self._leads and not self._warned_of_unequal:
            self._warned_of_unequal = True
            message = (
                f"step {flush.step}: what should be the same on all ranks (parameters of a DDP module, their optimizer "
                "state) is not: each rank's own is stored from now on. Replicas that have drifted apart do not train "
                "as one; look for a rank that changes them by itself"
            )
            self._emit(Warned(step=flush.step, message=message))

    def end(self) -> None:
        """The flush has been decided."""
        self.attempt = None

    def effort(self, attempt: str) -> tuple[int, float]:
        """Bytes of this rank's snapshot in `attempt`, and seconds since it began; nothing where there was none."""
        newest, nbytes, begun = self._newest
        return (nbytes, time.perf_counter() - begun) if newest == attempt else (0, 0.0)

    def _begin(self, flush: Flush, stage: Literal["digest", "files"]) -> None:
        try:
            view = self._view_of(flush)
        except EasyckptError as error:
            self._say_begun(flush, 0)
            self._report(Report(attempt=flush.attempt, error=str(error), lost=True))
            return
        self._say_begun(flush, view.meta.image_bytes)
        digest = stage == "digest"
        job: Future[Any] = self._flusher.digest(view) if digest else self._flusher.write(flush, view, self._abandoned)
        self._working = True
        self._watch(job, lambda done: self._end_job(_result(flush.attempt, stage, done, view)))

    def _end_job(self, report: Report) -> None:
        if report.attempt == self.attempt:  # else it was decided without this job; there may be a newer one by now
            self._working = False
            self._report(report)

    def _say_begun(self, flush: Flush, nbytes: int) -> None:
        if self._newest[0] != flush.attempt:
            self._newest = (flush.attempt, nbytes, time.perf_counter())
            self._emit(FlushBegun(step=flush.step, attempt=flush.attempt, bytes=nbytes))


def _result(attempt: str, stage: Literal["digest", "files"], done: Future[Any], view: SnapshotBytes) -> Report:
    error = done.exception()
    if error is not None:
        lost = isinstance(error, SaveFailed) and not view.still_sealed()  # and not a disk that is full as well
        return Report(attempt=attempt, error=str(error) or repr(error), lost=lost)
    if stage == "digest":
        return Report(attempt=attempt, digest=done.result())
    return Report(attempt=attempt, files=done.result())
