"""torch_checkpointing, with the configuration that its documents give for a machine without a GPU."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Job, Peer, newest


class TorchCheckpointing(Peer):
    name = "torch_checkpointing"
    package = "torch-checkpointing"
    about = (
        "`CheckpointManager`, asynchronous; pinned memory and non-blocking copies off (no GPU), direct I/O off (it "
        "fails with EINVAL on ext4); `lock()` around the optimizer's step"
    )

    def __init__(self, root: Path, job: Job) -> None:
        super().__init__(root, job)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        config = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self._manager = CheckpointManager(config)
        self._pending: Future[Any] | None = None

    def before_step(self) -> None:
        # The lock is a reader's: entering it is the wait, and no capture can begin before the step has ended.
        with self._manager.lock():
            pass

    def write(self, step: int, due: bool) -> None:
        self._pending = self._manager.save(str(self.path(step)), self.job.state_dict())

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def load(self) -> int | None:
        path = newest(self.root)
        if path is None:
            return None
        model = self.job.model.state_dict()
        restored = self._manager.load(str(path), into={"model": model, "optimizer": None, "step": 0})
        self.job.optimizer.load_state_dict(restored["optimizer"])
        self.job.progress["step"] = int(restored["step"])
        return self.job.progress["step"]

    def close(self) -> None:
        self._manager.close()
