"""Runs of the audited command, each with a root, a memory tier and an environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from easyckpt import catalog, failpoints
from easyckpt.config_sources import AUDIT_VARIABLE, resolve
from easyckpt.errors import EasyckptError, UsageError
from easyckpt.format import layout
from easyckpt.format.layout import NamingScheme
from easyckpt.memory.temporary import TemporaryMemory
from easyckpt.saving.flusher import FLUSH_BEGIN
from easyckpt.storage.local import LocalStorage
from easyckpt.storage.records_apart import open_place

#: Intervals that no audited run comes to: nothing is stored but where it stops.
NEVER = 10**9
#: Lines of a failed command's output that are shown.
LAST_LINES = 25
_POLL_SECONDS = 0.005
#: Beside the logs of an audit that has come to no report.
_UNFINISHED = ".unfinished-audit"


class CommandFailed(EasyckptError):
    """The audited command ended with another exit code than 0."""


@dataclass(frozen=True, slots=True)
class Run:
    """One start of the command: where it saves, and what it has printed."""

    name: str
    root: str
    memory: str
    log: str

    def place(self) -> tuple[LocalStorage, NamingScheme]:
        """Its root's storage and names; the command decides which these are."""
        return open_place(self.root)


@dataclass(frozen=True, slots=True)
class Killed:
    """How a run was killed."""

    seconds: float
    """Since the flush began."""
    step: int
    """Of that flush."""


class Runner:
    """Starts the command. Everything lies below `out`, but for the memory tiers, which `close` removes."""

    def __init__(self, command: Sequence[str], out: str, *, at: int, every: int) -> None:
        self._command, self._out, self._at, self._every = list(command), out, at, every
        self._memories: dict[str, TemporaryMemory] = {}
        self._memory_dir = resolve({}, None).memory_dir
        if left_by_a_failed_command(out):
            shutil.rmtree(os.path.join(out, "logs"))
        os.makedirs(os.path.join(out, "runs"))
        os.makedirs(os.path.join(out, "logs"))
        with open(os.path.join(out, _UNFINISHED), "w"):
            pass

    def close(self, *, keep: bool) -> None:
        """Remove what the runs have left in memory, and on disk unless that is to be kept."""
        for memory in self._memories.values():
            memory.remove()
        if not keep:
            shutil.rmtree(os.path.join(self._out, "runs"), ignore_errors=True)

    def forget_failure(self) -> None:
        """There is a report: what is in `out` is not to be replaced."""
        os.remove(os.path.join(self._out, _UNFINISHED))

    def new(self, name: str, *, after: Run | None = None, same: bool = False) -> Run:
        """A run with a fresh root, or a copy of the root of `after`; `same`: in that very root, with its memory."""
        # A component may be called anything, and its name be part of this one.
        file_name = name if layout.safe_name(f"{name}.events.txt") else f"part-{len(self._memories)}"
        log = os.path.join(self._out, "logs", f"{file_name}.txt")
        if after is not None and same:
            return Run(name, after.root, after.memory, log)
        memory = TemporaryMemory(self._memory_dir)
        self._memories[memory.path] = memory
        root = os.path.join(self._out, "runs", file_name)
        if after is not None:
            shutil.copytree(after.root, root, copy_function=_copy)
        return Run(name, root, memory.path, log)

    def remove(self, run: Run) -> None:
        """Give the space of a run back that nothing goes on from any more."""
        shutil.rmtree(run.root, ignore_errors=True)
        self._memories[run.memory].remove()

    def go(self, run: Run, *, stop: int, store: bool = True, left_out: Sequence[str] = ()) -> None:
        """Run the command until `stop` finished steps, storing as it goes, or there only. Raises CommandFailed."""
        with self._started(run, stop, store, left_out) as process:
            code = process.wait()
        if code:
            raise CommandFailed(
                f"{run.name}: the command ended with exit code {code}; the last lines of {run.log}:\n{_end_of(run.log)}"
            )

    def kill_in_flush(self, run: Run, steps: int, typical: float, chance: random.Random) -> Killed:
        """Run the command, and kill all its processes at some moment of the flush of the step to stop at.

        `typical` is how long such a flush takes, in seconds.
        """
        number = -(-self._at // self._every)
        there = os.path.join(self._out, "runs", f"{run.name}.flushing")
        armed = {
            failpoints.ENVIRONMENT_VARIABLE: f"{FLUSH_BEGIN}@{number}=hold:{there}",
            failpoints.RANK_VARIABLE: "0",
        }
        with self._started(run, steps, True, (), armed) as process:
            while not os.path.exists(there):
                if process.poll() is not None:
                    raise CommandFailed(
                        f"{run.name}: the command ended (exit code {process.returncode}) before it flushed step "
                        f"{number * self._every}; the last lines of {run.log}:\n{_end_of(run.log)}"
                    )
                time.sleep(_POLL_SECONDS)
            attempts = catalog.scan(*run.place()).of_kind("temporary")
            seconds = chance.uniform(0.0, typical)
            with open(f"{there}.go", "w"):
                pass
            time.sleep(seconds)
            _kill_all(process)
        # The program may save at other steps as well.
        return Killed(seconds, attempts[-1].step if attempts else number * self._every)

    @contextlib.contextmanager
    def _started(
        self, run: Run, stop: int, store: bool, left_out: Sequence[str], more: dict[str, str] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        settings = {
            "root": run.root,
            "stop_step": stop,
            "search_from": self._at,
            "left_out": list(left_out),
            "save_mem_interval": 1,
            "save_storage_interval": self._every if store else NEVER,
            "max_ckpt_num": None,
            "back_pressure": "wait",
            "memory_dir": run.memory,
            "log_file_path": f"{run.log.removesuffix('.txt')}.events.txt",
            "events": True,
        }
        environment = {**os.environ, **(more or {}), AUDIT_VARIABLE: json.dumps(settings)}
        with open(run.log, "ab") as log:
            try:
                process = subprocess.Popen(
                    self._command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise UsageError(f"{self._command[0]}: cannot be run: {error.strerror}") from error
        try:
            yield process
        finally:
            if process.poll() is None:
                _kill_all(process)


def left_by_a_failed_command(out: str) -> bool:
    """Whether `out` holds what an audit has left that came to no report, and nothing of anybody else's."""
    return os.path.isdir(out) and set(os.listdir(out)) == {"logs", _UNFINISHED}


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all that have come from it, whatever groups they are in."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(family)


def _copy(source: str, target: str) -> str:
    """Files of tensors are never written again, so that a link will do; all else may be."""
    if layout.weights_format(os.path.basename(source)) is not None:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return target
    return shutil.copy2(source, target)


def _end_of(path: str) -> str:
    with open(path, errors="replace") as file:
        return "".join(file.readlines()[-LAST_LINES:]).rstrip()
