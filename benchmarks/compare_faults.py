"""Real faults: a bit flipped, a file missing, a kill while writing. What does the job that starts again load?"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks import peers
from benchmarks.compare_job import PREPARED
from benchmarks.peers.base import EVERY, newest, saved
from benchmarks.peers.dlrover import clean

KILLS = 5  # tries to hit one write
STARTS = 3  # tries to start a process that loads
PATIENCE = 180.0  # seconds without an end: it hangs
MISSED, NOT_STARTED, WHOLE, OLDER, REFUSED, NOTHING, WRONG, HUNG = (
    "never hit",
    "did not start",
    "unharmed",
    "fell back",
    "refused",
    "found nothing",
    "wrong in silence",
    "hung",
)


class ChildFailed(Exception):
    """A training process ended otherwise than it should."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model, and of its batches."""

    width: int
    layers: int
    batch: int

    def arguments(self) -> list[str]:
        return [f"--width={self.width}", f"--layers={self.layers}", f"--batch={self.batch}"]


@dataclass(slots=True)
class Place:
    """Where one job saves: its root, and its own directory for snapshots in memory."""

    root: Path
    memory: Path

    def lose_memory(self) -> None:
        """As a reboot would."""
        shutil.rmtree(self.memory)
        self.memory.mkdir()


@contextmanager
def place(parent: Path | None = None) -> Iterator[Place]:
    """A fresh one, removed at the end."""
    root = Path(tempfile.mkdtemp(prefix="easyckpt-bench-", dir=parent))
    memory = Path(
        tempfile.mkdtemp(prefix="easyckpt-bench-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    )
    try:
        yield Place(root, memory)
    finally:
        shutil.rmtree(root)
        shutil.rmtree(memory, ignore_errors=True)


class Child:
    """One process of `compare_job`, in a session of its own so that all of it can be killed."""

    def __init__(self, mode: str, name: str, where: Place, size: Size, *more: str, threads: int | None = None) -> None:
        environment = {**os.environ, "EASYCKPT_MEMORY_DIR": str(where.memory)}
        environment.pop("OMP_NUM_THREADS", None)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        command = [sys.executable, "-m", "benchmarks.compare_job", mode, f"--peer={name}", f"--root={where.root}"]
        self.process = subprocess.Popen(
            [*command, *size.arguments(), *more],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._alarm = threading.Timer(PATIENCE, self.kill)
        self._alarm.daemon = True
        self.hung = False
        self._alarm.start()

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it prints, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # a kill may cut the last one
                yield json.loads(line)

    def kill(self) -> None:
        """SIGKILL to the process and all that it has started."""
        self.hung |= threading.current_thread() is self._alarm
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Wait for its end; raises ChildFailed with its last line of stderr unless it ended well."""
        code = self.process.wait()
        self._close()
        if code != 0:
            self._errors.seek(0)
            said = self._errors.read()
            self._errors.close()
            raise ChildFailed("it hung" if self.hung else error_in(said) or f"exit code {code}")
        self._errors.close()

    def bury(self) -> None:
        """After a kill."""
        self.process.wait()
        self._close()
        self._errors.close()

    def _close(self) -> None:
        self._alarm.cancel()
        self.kill()  # what its libraries have left running
        assert self.process.stdout is not None
        self.process.stdout.close()
        clean(self.process.pid)


def error_in(text: str) -> str:
    """The exception that ended a program, out of what it wrote to stderr; a note on destructors does not count."""
    errors = [line for line in text.splitlines() if re.match(r"[A-Za-z_.]+(Error|Exception|Interrupt|Exit)\b", line)]
    fatal = text.rpartition('Traceback (most recent call last):\n  File "<frozen runpy>"')[2]
    first = [line for line in errors if line in fatal]
    return (first or errors or text.strip().splitlines() or [""])[0].strip()[:400]


def results(child: Child) -> list[dict[str, Any]]:
    """All lines of a child that ends well."""
    found = list(child.lines())
    child.end()
    return found


@dataclass(slots=True)
class Written:
    """What a job has saved, and what is true."""

    digests: dict[str, int] = field(default_factory=dict)
    """Of the state after every step -> that step."""
    seconds: float = 0.0
    """The last save to storage, from the call until the library said that it is written."""
    peak_bytes: int = 0
    """Largest sum of the processes' memory (PSS: shared pages count once)."""

    def take(self, line: dict[str, Any]) -> None:
        if "digest" in line:
            self.digests[line["digest"]] = line["step"]
        self.seconds = line.get("seconds", self.seconds)


def prepare(name: str, where: Place, size: Size) -> Written:
    """Two checkpoints, written and closed as usual."""
    written = Written()
    child = Child("write", name, where, size, f"--steps={PREPARED}")
    with watched(child, written):
        for line in child.lines():
            written.take(line)
        child.end()
    return written


@contextmanager
def watched(child: Child, written: Written) -> Iterator[None]:
    """Look at the memory of its processes from time to time."""
    over = threading.Event()

    def look() -> None:
        process = psutil.Process(child.process.pid)
        while not over.wait(0.05):
            total = 0
            try:
                family = [process, *process.children(recursive=True)]
            except psutil.Error:
                return
            for one in family:
                try:
                    rollup = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
                except OSError:
                    continue
                total += sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
            written.peak_bytes = max(written.peak_bytes, total)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def load(name: str, where: Place, size: Size) -> dict[str, Any]:
    """What a job finds that starts again in `where`, in a process of its own.

    A library that fails before it is asked to load says nothing about the checkpoint: that is tried again.
    """
    said = ""
    for _ in range(STARTS):
        child, lines = Child("load", name, where, size), []
        try:
            for line in child.lines():
                lines.append(line)
            child.end()
            return lines[-1]
        except ChildFailed as failure:
            said = str(failure)
            if lines:
                return {"error": said, "hung": child.hung}
    return {"error": said, "not started": True}


def outcome(loaded: dict[str, Any], digests: dict[str, int], expected: int) -> str:
    """What a load after a fault was worth; `expected`: the step of the checkpoint that was harmed."""
    if "not started" in loaded:
        return NOT_STARTED
    if "error" in loaded:
        return HUNG if loaded.get("hung") else REFUSED
    if loaded["step"] is None:
        return NOTHING
    step = digests.get(loaded["digest"])
    if step is None:
        return WRONG
    return OLDER if step < expected else WHOLE


def largest_file(checkpoint: Path) -> Path:
    """The largest file of a checkpoint, which may be the checkpoint itself."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()] if checkpoint.is_dir() else [checkpoint]
    return max(files, key=lambda path: (path.stat().st_size, str(path)))


def flip(path: Path, position: float) -> Callable[[], None]:
    """Flip a bit of the byte at `position` (0 to 1) of the file; returns what flips it back."""
    at = int(path.stat().st_size * position)

    def turn() -> None:
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x10]))

    turn()
    return turn


def damaged(name: str, where: Place, size: Size, written: Written, positions: list[float]) -> dict[str, Any]:
    """After a flipped bit, and after the loss of the largest file, of the newest of two checkpoints."""
    checkpoint = newest(where.root)
    assert checkpoint is not None
    victim, step = largest_file(checkpoint), max(saved(where.root))
    flipped = []
    for position in positions:
        flip_back = flip(victim, position)
        flipped.append(load(name, where, size))
        flip_back()
    victim.unlink()
    missing = load(name, where, size)
    return {
        "bit flip": [described(one, written.digests, step) for one in flipped],
        "missing file": [described(missing, written.digests, step)],
    }


def killed(name: str, where: Place, size: Size, seconds: float, chance: random.Random) -> dict[str, Any] | None:
    """SIGKILL to all processes of a job while it writes its second checkpoint; `seconds`: how long that takes.

    None: it was written before the kill came.
    """
    written = Written()
    child = Child("write", name, where, size)
    expected, too_late = None, False
    for line in child.lines():  # what it has told before it died is read to the end
        written.take(line)
        too_late |= "written" in line and line["written"] == expected
        if expected is None and line.get("writing", 0) > EVERY:
            expected = line["writing"]
            time.sleep(chance.uniform(0.05, 0.9) * seconds)
            child.kill()
    if expected is None:
        child.end()
        raise ChildFailed("it ended before it was killed")
    child.bury()
    if too_late:
        return None
    result = {}
    if peers.peer(name).memory_survives:
        # The job that finds it may write it to storage when it ends: without memory, all is as the kill left it.
        as_killed = where.root.with_name(f"{where.root.name}-as-killed")
        shutil.copytree(where.root, as_killed)
        result["killed, memory kept"] = described(load(name, where, size), written.digests, expected)
        shutil.rmtree(where.root)
        as_killed.rename(where.root)
    where.lose_memory()
    result["killed"] = described(load(name, where, size), written.digests, expected)
    return result


def described(loaded: dict[str, Any], digests: dict[str, int], expected: int) -> dict[str, Any]:
    """For the results."""
    about = {key: loaded[key] for key in ("step", "error") if key in loaded}
    return {"outcome": outcome(loaded, digests, expected), "harmed": expected, **about}


def all_faults(name: str, size: Size, tries: int, chance: random.Random) -> tuple[Written, dict[str, Any]]:
    """Every fault for one library."""
    with place() as where:
        written = prepare(name, where, size)
        if newest(where.root) is None:
            return written, {}  # no checkpointing
        found = damaged(name, where, size, written, [chance.uniform(0.1, 0.9) for _ in range(tries)])
    for _ in range(tries):
        for fault, one in killed_in_time(name, size, written.seconds, chance).items():
            found.setdefault(fault, []).append(one)
    return written, found


def killed_in_time(name: str, size: Size, seconds: float, chance: random.Random) -> dict[str, Any]:
    """A kill that came while the checkpoint was being written; later and later ones are none."""
    for _ in range(KILLS):
        with place() as where:
            found = killed(name, where, size, seconds, chance)
        if found is not None:
            return found
        seconds /= 2
    return {"killed": {"outcome": MISSED}}
