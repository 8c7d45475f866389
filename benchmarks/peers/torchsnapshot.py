"""torchsnapshot: `Snapshot.async_take`, as its documents advise where host memory is abundant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.peers.base import Job, Peer, newest


class TorchSnapshot(Peer):
    name = "torchsnapshot"
    package = "torchsnapshot-nightly"
    about = (
        "`Snapshot.async_take`, in a process group of one rank (without one it fails here: `create_store` expects an "
        "IPv6 address); the directory with the highest number is loaded"
    )

    def __init__(self, root: Path, job: Job) -> None:
        super().__init__(root, job)
        from torchsnapshot import Snapshot, StateDict

        dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, is_master=True), rank=0, world_size=1)
        self._snapshot = Snapshot
        self._progress = StateDict(step=0)
        self._state = {"model": job.model, "optimizer": job.optimizer, "progress": self._progress}
        self._pending: Any = None

    def write(self, step: int, due: bool) -> None:
        self.wait()
        self._progress["step"] = step
        self._pending = self._snapshot.async_take(str(self.path(step)), self._state)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def load(self) -> int | None:
        path = newest(self.root)
        if path is None:
            return None
        self._snapshot(str(path)).restore(self._state)
        self.job.progress["step"] = self._progress["step"]
        return self.job.progress["step"]

    def close(self) -> None:
        self.wait()
        dist.destroy_process_group()
