"""Futures of flushes. What users have called at their end runs on a thread where it can hold up nothing of ours."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from easyckpt.saving.worker import Worker

logger = logging.getLogger("easyckpt")


class Callbacks:
    """Runs users' callbacks one after the other, on a thread that is made for the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def run(self, callback: Callable[[Future[int]], object], future: Future[int]) -> None:
        """Have `callback(future)` run; returns at once."""

        def call() -> None:
            try:
                callback(future)
            except Exception:  # as the standard library does: whoever has added it is not here to catch it
                logger.exception("a callback of a save's Future has failed")

        with self._lock:
            self._started().submit(call)

    def prepare(self) -> None:
        """A callback is to come. The caller's scheduling policy becomes that of the thread, and of what it starts."""
        with self._lock:
            self._started()

    def _started(self) -> Worker:
        if self._worker is None:
            self._worker = Worker("easyckpt-callbacks", gives_way=False)
        return self._worker

    def stop(self, timeout: float) -> bool:
        """Let what was handed over end; False when it did not within `timeout` seconds."""
        with self._lock:
            worker, self._worker = self._worker, None
        return worker is None or worker.stop(timeout)


class Promise(Future[int]):
    """The Future of one flush: the step that was committed, or the reason why not.

    Its holder cannot cancel it: the flush goes on whatever becomes of who waits for it.
    """

    known_at = 0
    """Once it is done: the first step at which every rank knows how it has ended."""

    def __init__(self, callbacks: Callbacks) -> None:
        super().__init__()
        self._callbacks = callbacks
        self.set_running_or_notify_cancel()

    def add_done_callback(self, fn: Callable[[Future[int]], object]) -> None:
        """As of any Future. Callbacks run one after the other; at once, on the caller's thread, if this is done."""
        if self.done():
            super().add_done_callback(fn)
        else:
            self._callbacks.prepare()
            super().add_done_callback(lambda _: self._callbacks.run(fn, self))


def known_to_all(future: Future[int], step: int) -> bool:
    """Whether every rank that has come to `step` knows how the flush has ended. All ranks get the same answer."""
    return future.done() and (not isinstance(future, Promise) or step >= future.known_at)


def resolved(step: int) -> Promise:
    """The Future of a step that is committed already."""
    promise = Promise(Callbacks())
    promise.set_result(step)
    return promise


def failed(error: BaseException) -> Promise:
    """The Future of a flush that has failed already."""
    promise = Promise(Callbacks())
    promise.set_exception(error)
    return promise
