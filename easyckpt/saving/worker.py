"""One background thread that runs jobs in the order in which they were handed over."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


class Worker:
    """A daemon thread with a queue of jobs.

    Unlike the executors of the standard library it never keeps the interpreter from exiting: a job that hangs in a
    dead file system must not hang the process as well. Errors of a job are kept in its Future.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Run `job` after all handed over before; returns its result as a Future, which can be cancelled until then."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - every error belongs to whoever waits for the job
                future.set_exception(error)

        self._jobs.put(run)
        return future

    def stop(self, timeout: float | None) -> bool:
        """Let the jobs handed over so far finish; returns False when they did not within `timeout` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what a finished job refers to must not live until the next one comes
