"""Starting trainings of the table from a test, or from the table's printer, in the environment of either transformers.

What starts them needs no transformers. A job is a fork of a process that has imported everything and run nothing, or,
where it says so, a new interpreter, under torchrun where it has ranks.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.jobs import free_port
from tests.support.zygote import Child, Zygote

REPOSITORY = Path(__file__).resolve().parents[2]
VERSIONS = ("4", "5")
JOB = "tests.trainers.job"

_zygotes: dict[str, Zygote] = {}


def python_of(version: str) -> Path:
    """The interpreter that has this major version of transformers."""
    python = REPOSITORY / f".venv-transformers{version}" / "bin" / "python"
    assert python.exists(), f"{python} is missing: 'make setup' makes it"
    return python


@functools.cache
def has(version: str, package: str) -> bool:
    """Whether the environment of that version has `package`."""
    ask = f"import importlib.util as i; raise SystemExit(i.find_spec({package!r}) is None)"
    return subprocess.run([python_of(version), "-c", ask], check=False).returncode == 0


@dataclass(frozen=True)
class Ended:
    """How a job has ended: the exit code of each process, and what they said."""

    codes: list[int]
    said: str

    @property
    def complaint(self) -> str:
        """The last line that names an error; without one, the exit codes."""
        lines = [line.strip() for line in self.said.splitlines() if re.match(r"[\w.\[\]: ]*(Error|Exception)\b", line)]
        return lines[-1] if lines else f"exit codes {self.codes}"


def run(
    version: str, arguments: Sequence[object], *, ranks: int, beside: Path, fresh: bool = False, job: str = JOB
) -> Ended:
    """Run `job` with `arguments` to its end; what it says goes to files that begin with `beside`."""
    words = [str(argument) for argument in arguments]
    return (in_new_interpreters if fresh else in_forks)(version, job, words, surroundings(), ranks, beside)


def surroundings() -> dict[str, str]:
    """The environment of a job."""
    return {**os.environ, **quiet(), "PYTHONPATH": str(REPOSITORY)}


def quiet() -> dict[str, str]:
    """Settings of the environment with which nothing is looked for outside this machine."""
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }


def in_forks(version: str, job: str, words: list[str], environment: dict[str, str], ranks: int, beside: Path) -> Ended:
    children = started(version, job, words, environment, ranks, beside)
    texts = [child.communicate()[1] for child in children]
    return Ended([int(child.returncode or 0) for child in children], "\n".join(texts))


def started(
    version: str, job: str, words: list[str], environment: dict[str, str], ranks: int, beside: Path
) -> list[Child]:
    """The ranks of a job, in one process group: that of the first."""
    if version not in _zygotes:
        _zygotes[version] = Zygote(python_of(version), ["tests.trainers.warm"])
    zygote = _zygotes[version]
    if ranks > 1:
        environment |= {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
        }
    program = f"from {job} import main; main()"
    children: list[Child] = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        stderr = Path(f"{beside}.stderr.{rank}")
        children.append(zygote.fork(words, environment | own, stderr, children[0].pid if children else 0, program))
    return children


def in_new_interpreters(
    version: str, job: str, words: list[str], environment: dict[str, str], ranks: int, beside: Path
) -> Ended:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    stderr = Path(f"{beside}.stderr")
    with stderr.open("wb") as said:
        ended = subprocess.run(
            [python_of(version), *torchrun, "-m", job, *words],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            check=False,
        )
    return Ended([ended.returncode], stderr.read_text(errors="replace"))
