"""Starting, killing and reading `job.py` from a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("job.py")
REPOSITORY = JOB.parents[2]
WAIT_SECONDS = 120.0


@dataclass
class Job:
    """One start of the job; `notes` are those of this start only."""

    process: subprocess.Popen[str]
    notes_path: Path
    world_size: int
    skip: dict[int, int] = field(default_factory=dict)

    def notes(self, rank: int = 0) -> list[dict[str, Any]]:
        path = Path(f"{self.notes_path}.{rank}")
        lines = path.read_text().splitlines() if path.exists() else []
        notes = []
        for line in lines[self.skip.get(rank, 0) :]:
            try:
                notes.append(json.loads(line))
            except ValueError:  # the last line of a killed process
                break
        return notes

    def values(self, key: str, rank: int = 0) -> list[Any]:
        return [note[key] for note in self.notes(rank) if key in note]

    def wait_for(self, key: str, least: int, rank: int = 0) -> None:
        """Until the job has noted `key` with a value of at least `least`."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not any(value >= least for value in self.values(key, rank)):
            assert self.process.poll() is None, f"the job has ended: {self.process.communicate()[1][-3000:]}"
            assert time.monotonic() < deadline, f"the job never came to {key} {least}: {self.notes(rank)[-3:]}"
            time.sleep(0.002)

    def kill(self) -> None:
        """SIGKILL to the whole process group: torchrun, its workers, their children."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def end(self, timeout: float = WAIT_SECONDS) -> int:
        """Wait for the end; returns the exit code. `stderr` holds what was written there."""
        try:
            _, self.stderr = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            _, self.stderr = self.process.communicate()
            raise AssertionError(f"the job did not end within {timeout} s: {self.stderr[-3000:]}") from None
        return self.process.returncode

    @property
    def digest(self) -> list[str]:
        """Of the end state, for each rank."""
        return [self.values("digest", rank)[-1] for rank in range(self.world_size)]


def start(
    root: Path,
    notes: Path,
    *arguments: str,
    steps: int,
    ranks: int = 1,
    settings: dict[str, Any] | None = None,
    torchrun: tuple[str, ...] = (),
    **environment: str,
) -> Job:
    """Start `job.py`, under torchrun for more than one rank, as the leader of a process group of its own."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *torchrun]
    command += [str(JOB), f"--root={root}", f"--notes={notes}", f"--steps={steps}"]
    command += [f"--settings={json.dumps(settings or {})}", *arguments]
    # gloo reads the addresses of the ranks before a restart if the agent's store is shared over restarts.
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    skip = {}
    for rank in range(ranks):
        path = Path(f"{notes}.{rank}")
        skip[rank] = len(path.read_text().splitlines()) if path.exists() else 0
    process = subprocess.Popen(
        command,
        env={**os.environ, **defaults, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return Job(process, notes, ranks, skip)


def run(root: Path, notes: Path, *arguments: str, steps: int, code: int = 0, **options: Any) -> Job:
    """Start the job and wait for its end with exit code `code`."""
    job = start(root, notes, *arguments, steps=steps, **options)
    assert job.end() == code, job.stderr[-4000:]
    return job
