"""A lean job for tests that kill it: started by fork out of a clean process that has imported everything already.

A start costs some hundredths of a second instead of an import of torch, and the process that forks has no threads.
The state is exact integers, so that any restored state can be told: `history[i]` is the tag of the start that made
step i + 1, and everything else follows from the history.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import easyckpt
from easyckpt import catalog, failpoints
from easyckpt.errors import EasyckptError, OutcomeUnknown
from easyckpt.format import layout
from easyckpt.storage.local import LocalStorage

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_STEPS = 128
#: A job that hangs is ended by SIGALRM, and says where each of its threads stood.
LIMIT_SECONDS = 60
WIDTH = 96  # a parameter of 72 KiB is copied in the background


class Training:
    """A step is a function of the history; it takes microseconds and no autograd."""

    def __init__(self, width: int = WIDTH) -> None:
        self.model = nn.Module()
        self.model.weight = nn.Parameter(torch.zeros(width, width, dtype=torch.float64))
        self.model.register_buffer("history", torch.zeros(MAX_STEPS, dtype=torch.int64))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)
        self.progress: dict[str, Any] = {"step": 0, "note": "", "extra": []}
        self.state = {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def step(self, number: int, tag: int) -> None:
        self.model.weight.grad = torch.full_like(self.model.weight, tag * 64 * number)
        self.optimizer.step()
        self.model.history[number - 1] = tag
        self.progress["step"] = number

    @property
    def history(self) -> list[int]:
        return [int(tag) for tag in self.model.history if tag]

    def grow(self, objects: int = 0, tensors: int = 0) -> None:
        """From here on the state is larger: more in the slot's tail, or in its image."""
        if objects:
            self.progress["note"] = "x" * objects
        if tensors:
            self.progress["extra"] = [torch.full((tensors,), 7.0)]

    def problem(self) -> str | None:
        """Why this is not exactly the state after as many steps as it says; None when it is."""
        history = self.history
        again = Training(len(self.model.weight))
        for number, tag in enumerate(history, start=1):
            again.step(number, tag)
        if self.progress["step"] != len(history) or not torch.equal(self.model.history, again.model.history):
            return f"torn: step {self.progress['step']}, history {self.model.history.tolist()}"
        if not torch.equal(self.model.weight, again.model.weight):
            return "the weight is of another step"
        mine, theirs = (t.optimizer.state.get(t.model.weight, {}).get("momentum_buffer") for t in (self, again))
        if (mine is None) != (theirs is None) or (mine is not None and not torch.equal(mine, theirs)):
            return "the momentum is of another step"
        if any(not torch.equal(extra, torch.full_like(extra, 7.0)) for extra in self.progress["extra"]):
            return "the extra tensor is damaged"
        return None


# -- the job, in a forked child


class Job:
    """One start. What it knows goes to `order["notes"]` as JSON lines, each written before the next thing happens."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.tag: int = order["tag"]
        self.training = Training(order.get("width", WIDTH))
        self.settings: dict[str, Any] = {"save_storage_interval": 2, "max_ckpt_num": 2, "back_pressure": "wait"}
        self.settings |= {"signals": (), "lease_timeout": 1000.0, "lease_interval": 400.0} | order.get("settings", {})
        self._notes = os.open(order["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.checkpointer: easyckpt.Checkpointer = None  # type: ignore[assignment]
        logging.getLogger("easyckpt").addHandler(_ToNotes(self))

    def note(self, **note: Any) -> None:
        os.write(self._notes, (json.dumps(note) + "\n").encode())

    def guarded(self, where: str, call, *arguments: Any, **keywords: Any) -> Any:
        """A user who catches what is raised, and goes on."""
        try:
            return call(*arguments, **keywords)
        except (EasyckptError, OSError, TimeoutError) as error:
            self.note(raised=type(error).__name__, where=where, text=str(error), ours=isinstance(error, EasyckptError))
            if self.order.get("dies_without_storage") and not _answers(self.order["root"]):
                os._exit(0)  # a power cut takes the job as well
            return error

    def open(self) -> int | None:
        """Construct and load; a second try where an armed error hit the first."""
        for _ in range(2):
            made = self.guarded(
                "construct", easyckpt.Checkpointer, self.order["root"], self.training.state, **self.settings
            )
            if isinstance(made, easyckpt.Checkpointer):
                self.checkpointer = made
                break
        else:
            return None
        for _ in range(2):
            restored = self.guarded("load", made.load, step=self.order.get("load_step"))
            if isinstance(restored, easyckpt.Restored):
                problem = self.training.problem()
                self.note(restored=restored.step, tier=restored.tier, history=self.training.history, problem=problem)
                return restored.step
        return None

    def finish(self, step: int) -> None:
        """Train one step, save it, and note what is sealed and durable now."""
        self.training.step(step, self.tag)
        self.note(finished=step)
        if step % 3 == 0 and not self.order.get("plain"):
            before = self.guarded("save", self.checkpointer.save, step)
            if not isinstance(before, BaseException):
                outcome = self.guarded("result", before.result, 30)
                self._failed(outcome) if isinstance(outcome, BaseException) else self.note(durable=outcome)
            else:
                self._failed(before)
        else:
            self.guarded("save_if_needed", self.checkpointer.save_if_needed, step)
        if step % self.settings["save_storage_interval"] == 0:
            outcome = self.guarded("wait", self.checkpointer.wait, 30)
            if isinstance(outcome, BaseException):
                self._failed(outcome)
        stats = self.checkpointer.stats()
        if stats.last_sealed_step is not None:
            self.note(sealed=stats.last_sealed_step)
        if stats.last_committed_step is not None:
            self.note(durable=stats.last_committed_step)

    def _failed(self, error: BaseException) -> None:
        """Nothing that is said to have failed may stand there as a checkpoint of this start."""
        if isinstance(error, OutcomeUnknown):
            return
        for entry in catalog.scan(LocalStorage(self.order["root"]), layout.NativeNaming()).committed():
            if f"step {entry.step} was not committed (failed)" in str(error):
                self.note(failed_but_committed=entry.step, text=str(error))

    def close(self) -> None:
        if not isinstance(self.guarded("close", self.checkpointer.close), BaseException):
            self.note(closed=True, durable=self.checkpointer.stats().last_committed_step or 0)


def _answers(root: str) -> bool:
    try:
        os.listdir(root)  # what stat says, the kernel may remember
    except OSError as error:
        return error.errno == errno.ENOENT
    return True


class _ToNotes(logging.Handler):
    def __init__(self, job: Job) -> None:
        super().__init__(logging.WARNING)
        self._job = job

    def emit(self, record: logging.LogRecord) -> None:
        self._job.note(logged=record.getMessage())


def run_job(order: dict[str, Any]) -> None:
    job = Job(order)
    first = job.open()
    if first is None:
        return
    for step in range(first + 1, first + order["steps"] + 1):
        if step == first + order.get("arm_at", -1):
            failpoints.arm(order["armed_later"])
        if step == first + order.get("grow_objects_at", -1):
            job.training.grow(objects=300_000)
        if step == first + order.get("grow_tensors_at", -1):
            job.training.grow(tensors=200_000)
        job.finish(step)
    if order.get("renew"):
        lease = job.checkpointer._opened.lease
        assert lease is not None
        house = job.checkpointer._housekeeper
        house._do("renewing the lease", lambda: house._renew(lease))  # as its thread does, but now
    if order.get("leave"):  # dies without a word, all of its snapshots sealed
        job.guarded("wait", job.checkpointer.wait, 30)
        job.checkpointer._parts.flusher.submit(lambda: None).result()  # the rotation after the last commit has ended
        job.note(sealed=job.checkpointer.stats().last_sealed_step or 0, left=True)
        os._exit(0)
    job.close()


def _child(order: dict[str, Any]) -> None:
    status = 1
    try:
        with open(order["log"], "ab") as log:
            os.dup2(log.fileno(), 2)
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.alarm(order.get("limit", LIMIT_SECONDS))
        os.environ.update(order.get("environment", {}))
        if order.get("count"):
            _count_hits(order["count"])
        failpoints.arm(order.get("armed", ""))
        _note_hits(order["notes"])
        run_job(order)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _note_hits(path: str) -> None:
    act = failpoints._act
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def noting(name: str, action: str) -> None:
        os.write(descriptor, (json.dumps({"hit": name}) + "\n").encode())
        act(name, action)

    failpoints._act = noting


def _count_hits(path: str) -> None:
    """Count instead of arming: each hit of a failpoint adds a line to the file at `path`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    failpoints.hit = lambda name: os.write(descriptor, f"{name}\n".encode())  # type: ignore[assignment,return-value]


def serve() -> None:
    """Fork a child for each order on stdin; answer with its exit status."""
    Training().step(1, 1)  # torch imports half of itself at the first optimizer step: here, not in every child
    assert len(os.listdir("/proc/self/task")) == 1 or torch.get_num_threads() == 1
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.close(0)
            _child(json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


# -- in the test


class Zygote:
    """The process that forks the jobs: one for all tests of a pytest process."""

    _one: Zygote | None = None

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.crashjob"],
            cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        atexit.register(self.stop)

    @classmethod
    def get(cls) -> Zygote:
        if cls._one is None:
            cls._one = cls()
        return cls._one

    def run(self, **order: Any) -> int:
        """Run one job; returns its exit code, minus the signal's number where a signal ended it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()


class Starts:
    """Starts of jobs on one root, one after the other, each with notes of its own."""

    def __init__(self, directory: Path, memory_dir: Path) -> None:
        self.directory, self.memory_dir = directory, memory_dir
        directory.mkdir(parents=True, exist_ok=True)
        memory_dir.mkdir(parents=True, exist_ok=True)
        self.root = directory / "run"
        self.count = 0

    def start(self, **order: Any) -> Notes:
        self.count += 1
        notes, log = self.directory / f"notes.{self.count}", self.directory / f"log.{self.count}"
        order = {"tag": self.count, "steps": 0, "root": str(self.root), "notes": str(notes), "log": str(log)} | order
        order["environment"] = {"EASYCKPT_MEMORY_DIR": str(self.memory_dir)}
        status = Zygote.get().run(**order)
        text = log.read_text()
        told = notes.read_text()[-3000:] if notes.exists() else ""
        assert status in (0, -signal.SIGKILL), f"{status}: {text[-3000:]}\n{told}"
        assert "Traceback" not in text, text[-3000:]
        return Notes(notes, order["tag"], status)

    def wipe_memory(self) -> None:
        """Lose all snapshots. The owner's file stays: it shows the next start that the one before is dead."""
        for path in self.memory_dir.iterdir():
            if not path.name.endswith((".owner", ".lock")):
                path.unlink()


class Notes:
    def __init__(self, path: Path, tag: int, status: int) -> None:
        self.tag, self.status = tag, status
        lines = path.read_text().splitlines() if path.exists() else []
        self.all: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def values(self, key: str) -> list[Any]:
        return [note[key] for note in self.all if key in note]

    def newest(self, key: str) -> int:
        return max(self.values(key), default=-1)

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL

    @property
    def restored(self) -> dict[str, Any]:
        return next(note for note in self.all if "restored" in note)


def leftovers(root: Path) -> list[str]:
    """Names that no finished job leaves. Temporary files around the lease may be another contender's: see catalog."""
    around_lease = f".{layout.LEASE}."
    return [name for name in sorted(os.listdir(root)) if name.startswith(".") and not name.startswith(around_lease)]


if __name__ == "__main__":
    serve()
