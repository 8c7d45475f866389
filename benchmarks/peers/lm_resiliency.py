"""lm-resiliency's checkpoint manager, in the loop that its GEMINI guide gives; with its checksums off and on."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.peers.base import EVERY, Job, Peer


class LmResiliency(Peer):
    name = "lm-resiliency"
    package = "lm-resiliency"
    about = (
        "`InMemoryCheckpointManager` in the loop of its GEMINI guide, `maybe_wait` before the optimizer's step; "
        "memory not pinned (no GPU), checksums off (its default)"
    )
    syncs = "files, directory"
    every_step = True
    late = 1
    checked = False

    def __init__(self, root: Path, job: Job) -> None:
        super().__init__(root, job)
        from lm_resiliency import InMemoryCkptConfig
        from lm_resiliency.experimental import InMemoryCheckpointManager

        self._manager = InMemoryCheckpointManager(
            InMemoryCkptConfig(
                interval=1,
                disk_flush_interval=EVERY,
                disk_folder=str(root),
                run_id="compare",
                verify_integrity=self.checked,
                pin_memory=torch.cuda.is_available(),
            )
        )

    def before_step(self) -> None:
        self._manager.maybe_wait()

    def write(self, step: int, due: bool) -> None:
        self._manager.save(self.job.state_dict(), step)

    def wait(self) -> None:
        self._manager._disk.wait()  # no public call waits for the disk without ending the manager

    def write_through(self, step: int) -> None:
        self._manager.save(self.job.state_dict(), step)
        self._manager.maybe_wait()
        self._manager.flush_to_disk(step)
        self.wait()

    def load(self) -> int | None:
        if self._manager.find_latest() < 0:
            return None
        found = self._manager.load()
        return None if found is None else self.job.load_state_dict(found[0])

    def close(self) -> None:
        self._manager.close()


class LmResiliencyChecked(LmResiliency):
    name = "lm-resiliency, CRC"
    about = "the same with `verify_integrity=True`"
    checked = True
