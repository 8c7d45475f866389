"""Running the command line in the test's own process, and seeing what it has changed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from easyckpt.cli import app
from tests.support.zygote import fork_program


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs the command line in the test's own process."""

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app([str(argument) for argument in arguments])
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, *capsys.readouterr())

    return call


def everything_in(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Time of change and content of all that is there."""
    return {
        str(path): (path.stat().st_mtime_ns, b"" if path.is_dir() else path.read_bytes())
        for path in [directory, *sorted(directory.rglob("*"))]
    }


#: Before a program: has it write down each failpoint that it comes to.
COUNTING = """
failpoints._armed = {"": None}
def noted(name):
    hits.write(name + chr(10))
    hits.flush()
failpoints._hit = noted
"""


def hits_of(program: str, *arguments: object, directory: Path) -> Counter[str]:
    """How often the program comes to each failpoint."""
    counts = directory / "count"
    code = f"from easyckpt import failpoints\nhits = open({str(counts)!r}, 'a')\n" + COUNTING + program
    child = fork_program(code, *arguments, directory=directory)
    said = child.communicate(60)
    assert child.returncode == 0, said
    return Counter(counts.read_text().split())
