"""Starting, killing and reading `job.py` from a test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from easyckpt import catalog
from easyckpt.format.layout import NativeNaming
from easyckpt.storage.local import LocalStorage
from tests.support.zygote import Child, zygote

JOB = Path(__file__).with_name("job.py")
REPOSITORY = JOB.parents[2]
WAIT_SECONDS = 120.0


@dataclass
class Job:
    """One start of the job; `notes` are those of this start only."""

    processes: list[subprocess.Popen[str] | Child]
    """The ranks; under torchrun only torchrun."""
    notes_path: Path
    world_size: int
    skip: dict[int, int] = field(default_factory=dict)
    store: Child | None = None
    """Serves the c10d store of the ranks, where none of them does."""
    stderr: str = ""

    @property
    def process(self) -> subprocess.Popen[str] | Child:
        return self.processes[0]

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

    def first(self, key: str) -> list[Any]:
        """The first value of `key` that each rank has noted."""
        return [next(iter(self.values(key, rank)), None) for rank in range(self.world_size)]

    def last(self, key: str) -> list[Any]:
        """The last value of `key` that each rank has noted."""
        return [next(iter(reversed(self.values(key, rank))), None) for rank in range(self.world_size)]

    def wait_for(self, key: str, least: int, rank: int = 0) -> None:
        """Until the job has noted `key` with a value of at least `least`."""
        self.wait_until(lambda: any(value >= least for value in self.values(key, rank)), f"{key} {least}", rank)

    def wait_until(self, true: Callable[[], bool], what: str, rank: int = 0) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not true():
            ended = [process.poll() for process in self.processes]
            assert None in ended, f"the job has ended {ended}: {self.process.communicate()[1][-3000:]}"
            assert time.monotonic() < deadline, f"the job never came to {what}: {self.notes(rank)[-3:]}"
            time.sleep(0.002)

    def kill(self) -> None:
        """SIGKILL to the whole process group: torchrun, its workers, their children."""
        os.killpg((self.store or self.process).pid, signal.SIGKILL)
        self.ends()

    def ends(self, timeout: float = WAIT_SECONDS) -> list[int]:
        """Wait for the end of all processes; returns their exit codes. `stderr` holds what they have written there."""
        deadline = time.monotonic() + timeout
        try:
            texts = [process.communicate(timeout=max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            os.killpg((self.store or self.process).pid, signal.SIGKILL)
            texts = [process.communicate() for process in self.processes]
            stderr = "\n".join(text for _, text in texts)
            raise AssertionError(f"the job did not end within {timeout} s: {stderr[-3000:]}") from None
        self.stderr = "\n".join(text for _, text in texts)
        if self.store is not None and self.store.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it died with its group, which nobody has said yet
                os.kill(self.store.pid, signal.SIGKILL)
        return [int(process.returncode or 0) for process in self.processes]

    def end(self, timeout: float = WAIT_SECONDS) -> int:
        """Wait for the end; returns the first exit code that is not 0."""
        return next((code for code in self.ends(timeout) if code), 0)

    def pid(self, rank: int) -> int:
        """Of a rank, also under torchrun."""
        if len(self.processes) == self.world_size:
            return self.processes[rank].pid
        return next(pid for pid in _children(self.process.pid) if _rank_of(pid) == str(rank))

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
    torchrun: tuple[str, ...] | None = None,
    **environment: str,
) -> Job:
    """Start `job.py` as the leader of a process group of its own, the ranks as torchrun would (or by it, if given).

    As torchrun's agent does, a process that outlives the ranks serves their store. With ``STORE="rank 0"`` rank 0
    does, as under other launchers.
    """
    arguments = (f"--root={root}", f"--notes={notes}", f"--steps={steps}", *arguments)
    arguments = (*arguments, f"--settings={json.dumps(settings or {})}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **environment}
    skip = {}
    for rank in range(ranks):
        path = Path(f"{notes}.{rank}")
        skip[rank] = len(path.read_text().splitlines()) if path.exists() else 0
    if torchrun is None:
        children, store = _forked(list(arguments), environment, ranks, notes)
        return Job(children, notes, ranks, skip, store)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *torchrun]
    process = subprocess.Popen(
        [*command, str(JOB), *arguments],
        # gloo reads the addresses of the ranks before a restart if the agent's store is shared over restarts.
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return Job([process], notes, ranks, skip)


def run(root: Path, notes: Path, *arguments: str, steps: int, code: int = 0, **options: Any) -> Job:
    """Start the job and wait for its end with exit code `code`."""
    job = start(root, notes, *arguments, steps=steps, **options)
    assert job.end() == code, job.stderr[-4000:]
    return job


def _forked(
    arguments: list[str], environment: dict[str, str], ranks: int, notes: Path
) -> tuple[list[Child], Child | None]:
    handle, stderr = tempfile.mkstemp(prefix="stderr-", dir=notes.parent)
    os.close(handle)
    if ranks == 1:
        return [zygote().fork(arguments, environment, Path(stderr))], None
    by_rank_0 = environment.pop("STORE", "") == "rank 0"
    environment |= {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_USE_AGENT_STORE": str(not by_rank_0),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    store = None if by_rank_0 else zygote().fork(["--serve-store"], environment, Path(f"{stderr}.store"))
    leader = 0 if store is None else store.pid
    children: list[Child] = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        child = zygote().fork(arguments, environment | own, Path(f"{stderr}.{rank}"), leader)
        children.append(child)
        leader = leader or child.pid
    return children, store


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def committed(root: Path) -> list[int]:
    """The steps that are committed in `root`."""
    return [entry.step for entry in catalog.scan(LocalStorage(str(root)), NativeNaming()).committed()]


def events(root: Path, rank: int = 0, kind: str | None = None) -> list[dict[str, Any]]:
    """What the event log of `rank` says: a lower bound while the job runs, or where it was killed."""
    path = root / "events" / f"rank-{rank:05d}.jsonl"
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if kind is None or event["event"] == kind:
            found.append(event)
    return found


def _children(parent: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                found.append(int(entry))
    return found


def _rank_of(pid: int) -> str | None:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((entry[5:].decode() for entry in entries if entry.startswith(b"RANK=")), None)
