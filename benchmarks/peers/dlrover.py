"""DLRover's flash checkpoint in a plain Python process, which starts its saver beside itself."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from benchmarks.peers.base import Job, Peer

SOCKETS = Path("/tmp/ckpt_sock")  # fixed in DLRover
TRACKER = "dlrover_latest.txt"


class DLRover(Peer):
    name = "DLRover"
    package = "dlrover"
    about = (
        "`DdpCheckpointer`, `StorageType.MEMORY` every step and `DISK` every fifth; started by python, not by "
        "`dlrover-run`, so without its agent"
    )
    syncs = "the file that names the newest step"
    every_step = True

    def __init__(self, root: Path, job: Job) -> None:
        super().__init__(root, job)
        # Its shared memory and sockets carry this name; one of our own leaves other jobs of the machine alone.
        self._run = f"compare-{os.getpid()}"
        os.environ["TORCHELASTIC_RUN_ID"] = self._run
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        self._kinds = StorageType
        self._checkpointer = DdpCheckpointer(str(root))
        self._asked = 0

    def write(self, step: int, due: bool) -> None:
        kind = self._kinds.DISK if due else self._kinds.MEMORY
        self._checkpointer.save_checkpoint(step, self.job.state_dict(), storage_type=kind)
        if due and self._checkpointer._engine.latest_step == step:  # else skipped: the one before is being written
            self._asked = step

    def wait(self) -> None:
        # Its own wait looks every 3 s, which would be measured instead of the save.
        tracker = self.root / TRACKER
        while self._asked and not (tracker.exists() and tracker.read_text() == str(self._asked)):
            time.sleep(0.005)

    def load(self) -> int | None:
        found = self._checkpointer.load_checkpoint()
        return self.job.load_state_dict(found) if found else None

    def close(self) -> None:
        self._checkpointer._engine.close()
        clean(os.getpid())


def clean(process: int) -> None:
    """Remove what the saver of that process has left in shared memory and in /tmp."""
    for path in Path("/dev/shm").glob(f"*compare-{process}*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(SOCKETS / f"compare-{process}", ignore_errors=True)
