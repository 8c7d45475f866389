"""`torch.distributed.checkpoint`: a state wrapped as in its recipes; saved at once, in a thread, or in a process."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful

from benchmarks.peers.base import Job, Peer, newest


class App(Stateful):
    """The state as DCP's recipe wraps it."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._job.model, self._job.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self._job.progress["step"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self._job.model,
            self._job.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self._job.progress["step"] = state_dict["step"]


class Save(Peer):
    name = "DCP save"
    about = "`dcp.save`, the state wrapped as in its recipe; the directory with the highest number is loaded"
    syncs = "files"

    def write(self, step: int, due: bool) -> None:
        dcp.save({"app": App(self.job)}, checkpoint_id=self.path(step), no_dist=True)

    def load(self) -> int | None:
        path = newest(self.root)
        if path is None:
            return None
        dcp.load({"app": App(self.job)}, checkpoint_id=path, no_dist=True)
        return self.job.progress["step"]


class AsyncThread(Save):
    name = "DCP async, thread"
    about = "`dcp.async_save`, which waits for the save before it, as in its recipe"
    kind = AsyncCheckpointerType.THREAD
    alone = True

    def __init__(self, root: Path, job: Job) -> None:
        super().__init__(root, job)
        self._pending: Future[Any] | None = None

    def write(self, step: int, due: bool) -> None:
        self.wait()
        pending = dcp.async_save(
            {"app": App(self.job)},
            checkpoint_id=self.path(step),
            no_dist=self.alone,
            async_checkpointer_type=self.kind,
        )
        assert isinstance(pending, Future)
        self._pending = pending

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None


class AsyncProcess(AsyncThread):
    name = "DCP async, process"
    about = "the same with `AsyncCheckpointerType.PROCESS`, which needs a process group: one of one rank"
    kind = AsyncCheckpointerType.PROCESS
    alone = False

    def __init__(self, root: Path, job: Job) -> None:
        super().__init__(root, job)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def close(self) -> None:
        dist.destroy_process_group()
