"""One background thread that runs jobs in the order in which they were handed over."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from easyckpt.saving.waking import Latch

Result = TypeVar("Result")


def give_way() -> None:
    """Let this thread, when it wakes up, not push a training thread off its core for a time slice of some milliseconds.

    It gets the same share of the CPU as before, only later (Linux: SCHED_BATCH). Another policy was chosen on purpose.
    """
    with contextlib.suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Worker:
    """A daemon thread with a queue of jobs.

    Unlike the executors of the standard library it never keeps the interpreter from exiting: a job that hangs in a
    dead file system must not hang the process as well. Errors of a job are kept in its Future.
    """

    def __init__(self, name: str, *, gives_way: bool = True) -> None:
        """`gives_way` False: for code of the user's, whose threads and processes would inherit the policy."""
        self._gives_way = gives_way
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = Latch()
        threading.Thread(target=self._run, name=name, daemon=True).start()

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
        # Not the thread's own join: after one that Ctrl-C has interrupted, some Pythons take a thread for ended.
        return self._ended.wait(timeout)

    def _run(self) -> None:
        if self._gives_way:
            give_way()
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what a finished job refers to must not live until the next one comes
        self._ended.set()
