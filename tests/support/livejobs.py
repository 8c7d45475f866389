"""Starting `livejob.py` from a test, which ends or kills it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import livejob


class Job:
    """`livejob` in a process of its own, at its last step."""

    def __init__(self, root: Path, *arguments: str) -> None:
        command = [sys.executable, livejob.__file__, str(root), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline().split()
        assert said[:1] == ["ready"], "the job has failed"
        self.began_at, self.tier = int(said[1]), said[2]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> None:
        self.process.communicate("\n")
        assert self.process.returncode == 0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs in `tmp_path / "exp"`; those that still live at the end are killed."""
    started: list[Job] = []

    def start(*arguments: str) -> Job:
        started.append(Job(tmp_path / "exp", *arguments))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.kill()
