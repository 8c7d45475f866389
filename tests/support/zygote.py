"""A process that has imported everything and forks jobs, so that a start costs milliseconds instead of an import.

The jobs are real processes: they have their own process group, environment and standard error, end as interpreters end
(atexit handlers, exit codes), and are killed as any other. Only who started them differs: torchrun starts some in
`test_ranks_that_die.py` and in the campaign, to show that this is no matter.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__)


# -- in the tests ------------------------------------------------------------------------------------------------------


class Zygote:
    """The server, as the tests see it; started when it is first needed and ended with them.

    It is one of the interpreter `python` that has imported `modules` besides.
    """

    def __init__(self, python: Path | str = sys.executable, modules: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [python, str(HERE), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[2])},
            start_new_session=True,
        )
        self._newest: dict[int, Child] = {}
        """By number, which a later child may have again."""
        self._unread = b""
        atexit.register(self.stop)

    def fork(
        self,
        arguments: list[str],
        environment: dict[str, str],
        stderr: Path,
        group: int = 0,
        program: str | None = None,
    ) -> Child:
        """Run job.py, or the Python source `program`, with `arguments`, in process group `group` (0: a new one).

        What it prints goes to a file beside `stderr`.
        """
        request = {"arguments": arguments, "environment": environment, "stderr": str(stderr), "group": group}
        request["program"] = program
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        while True:
            words = self._line(None)
            if words[0] == "forked":
                child = self._newest[int(words[1])] = Child(self, int(words[1]), stderr)
                return child
            self._newest[int(words[1])].status = int(words[2])

    def wait_for(self, child: Child, timeout: float) -> int | None:
        """Exit code of `child`, as subprocess gives it; None while it lives, after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while child.status is None:
            words = self._line(max(0.0, deadline - time.monotonic()))
            if not words:
                return None
            self._newest[int(words[1])].status = int(words[2])
        return child.status

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _line(self, timeout: float | None) -> list[str]:
        """The next thing that the server says, as words; none when it says nothing in `timeout` seconds."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([descriptor], [], [], timeout)[0]:
                return []
            data = os.read(descriptor, 65536)
            assert data, "the server of forked jobs has died"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode().split()


class Child:
    """One forked job, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, zygote: Zygote, pid: int, stderr: Path) -> None:
        self._zygote, self.pid, self._stderr = zygote, pid, stderr
        self.status: int | None = None

    def poll(self) -> int | None:
        return self._zygote.wait_for(self, 0.0)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        if self._zygote.wait_for(self, 1e6 if timeout is None else timeout) is None:
            raise subprocess.TimeoutExpired("job.py", timeout or 0.0)
        paths = (stdout_beside(self._stderr), self._stderr)
        # A child that was killed at once has not come to making them.
        printed, said = (path.read_text(errors="replace") if path.exists() else "" for path in paths)
        return printed, said

    @property
    def returncode(self) -> int | None:
        return self.poll()


_zygote: Zygote | None = None


def zygote() -> Zygote:
    global _zygote
    if _zygote is None:
        _zygote = Zygote()
    return _zygote


def fork_program(program: str, *arguments: object, directory: Path, **environment: str) -> Child:
    """Run Python source in a process of its own; what it says goes to files in `directory`."""
    handle, stderr = tempfile.mkstemp(prefix="stderr-", dir=directory)
    os.close(handle)
    words = [str(argument) for argument in arguments]
    return zygote().fork(words, {**os.environ, **environment}, Path(stderr), program=program)


def stdout_beside(stderr: Path) -> Path:
    return Path(f"{stderr}.stdout")


# -- in the server -----------------------------------------------------------------------------------------------------


def serve() -> dict[str, Any]:
    """Fork as requests come; returns, in each child, the request that it is for. Ends the server itself at the end."""
    children: dict[int, int] = {}  # pidfd -> pid
    unread = b""
    while True:
        for descriptor in select.select([0, *children], [], [])[0]:
            if descriptor:
                pid = children.pop(descriptor)
                os.close(descriptor)
                say(f"ended {pid} {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
                continue
            data = os.read(0, 65536)
            if not data:  # the tests have ended
                for pid in children.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                request: dict[str, Any] = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    for other in children:
                        os.close(other)
                    return request
                os.setpgid(pid, request["group"] or pid)  # before the test hears of it: it may kill the group at once
                children[os.pidfd_open(pid)] = pid
                say(f"forked {pid}")


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def become(request: dict[str, Any]) -> None:
    """Be the process that was asked for."""
    from easyckpt import failpoints

    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    opened = [
        os.open(os.devnull, os.O_RDONLY),
        os.open(stdout_beside(Path(request["stderr"])), flags, 0o644),
        os.open(request["stderr"], flags, 0o644),
    ]
    for number, descriptor in enumerate(opened):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["job.py", *request["arguments"]]
    failpoints._armed = failpoints._from_environment()


def main_of(request: dict[str, Any]) -> Callable[[], None] | None:
    if request["program"] is None:
        return None
    code = compile(request["program"], "program", "exec")
    return lambda: exec(code, {"__name__": "__main__"})


def end_as_interpreters_do(main: Callable[[], None]) -> NoReturn:
    """Run `main` and the exit handlers. What an interpreter does after these, freeing all modules, costs a second."""
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        code = 1
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import gc
    import importlib

    import job
    import torch.nn.parallel
    import torch.optim.adamw
    import torch.utils.data  # noqa: F401 - everything that a job would import
    from torch import _dynamo  # noqa: F401 - register_optimizer_step_pre_hook is kept out of torch.compile with it

    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()
    order = serve()
    become(order)
    end_as_interpreters_do(main_of(order) or job.main)
