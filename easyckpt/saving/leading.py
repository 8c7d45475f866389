"""Rank 0's part for all ranks: hand the leader what they post, publish its board, have its work done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from easyckpt.distributed.mailbox import Mailbox
from easyckpt.errors import EasyckptError
from easyckpt.saving.attempt import Work
from easyckpt.saving.flusher import Flusher
from easyckpt.saving.ledger import Ledger
from easyckpt.saving.messages import Board, Flush, Post, dump, load_post
from easyckpt.saving.participant import Watch
from easyckpt.saving.writer import SnapshotBytes

logger = logging.getLogger("easyckpt")


class Leading:
    """Belongs to the coordinator's thread. `watch` has a function called there once a Future is done."""

    def __init__(
        self,
        mailbox: Mailbox,
        flusher: Flusher,
        ledger: Ledger,
        *,
        view_of: Callable[[Flush], SnapshotBytes],
        watch: Watch,
    ) -> None:
        self._mailbox, self._flusher, self._ledger = mailbox, flusher, ledger
        self._view_of, self._watch = view_of, watch
        self.published: Board | None = None

    def lead(self) -> None:
        """Decide by what is posted now."""
        board, works = self._ledger.lead(self.posts(), time.monotonic())
        for work in works:
            self._start(work)
        if board != self.published:
            self._mailbox.publish(dump(board))
            self.published = board

    def posts(self) -> list[Post | None]:
        """The newest post of each rank."""
        return [None if data is None else load_post(data) for data in self._mailbox.posts()]

    def _start(self, work: Work) -> None:
        flusher, view = self._flusher, None
        if work.kind == "commit":
            try:
                view = self._view_of(work.flush)
            except EasyckptError as error:
                work = replace(work, kind="clean up", flush=replace(work.flush, abandoned=f"rank 0: {error}"))
        future = flusher.clean_up(work) if view is None else flusher.commit(work, view)

        def finish(done: Future[Any]) -> None:
            result = done.result()
            self._ledger.work_done(
                work, reason=result.reason, unknown=result.unknown, nbytes=result.nbytes, seconds=result.seconds
            )
            if view is not None and result.reason is None:
                self._watch(flusher.retain({work.flush.step}), _log_failure)

        self._watch(future, finish)


def _log_failure(done: Future[Any]) -> None:
    if (error := done.exception()) is not None:
        logger.error("a background job has failed", exc_info=error)
