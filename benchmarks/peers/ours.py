"""easyckpt as its README says."""

from __future__ import annotations

import time
from pathlib import Path

import easyckpt
from benchmarks.peers.base import EVERY, Job, Peer


class Easyckpt(Peer):
    name = "easyckpt"
    about = "`Checkpointer`, `save_storage_interval=5`, the rest by default"
    syncs = "files, directories"
    every_step = True
    memory_survives = True

    def __init__(self, root: Path, job: Job) -> None:
        super().__init__(root, job)
        state = {"model": job.model, "optimizer": job.optimizer, "progress": job.progress}
        self._checkpointer = easyckpt.Checkpointer(root, state, save_storage_interval=EVERY)
        self._loaded = False

    def save(self, step: int, due: bool) -> float:
        if not self._loaded:
            self.load()
        begun = time.perf_counter()
        self._checkpointer.save_if_needed(step)
        seconds = time.perf_counter() - begun
        # Its own figure has the wait in the optimizer's hook in it, which is not seen from here.
        return max(seconds, self._checkpointer.stats().blocked_recent[-1])

    def wait(self) -> None:
        self._checkpointer.wait()

    def write_through(self, step: int) -> None:
        self._checkpointer.save(step, wait=True)

    def load(self) -> int | None:
        self._loaded = True
        restored = self._checkpointer.load()
        return restored.step or None

    def close(self) -> None:
        self._checkpointer.close()
