"""Named places where a test can make the program die, fail, pause or wait.

In production nothing is armed and ``hit`` returns at once. Tests arm them through the environment,
so that they also work in child processes::

    EASYCKPT_FAILPOINTS="commit.rename.before=kill;writer.shard.chunk@3=error:ENOSPC"

Each entry is ``name[@n]=action``: the action happens at the n-th hit (default 1), once. ``@*`` means at every hit.
Actions: ``kill`` (SIGKILL to this process), ``error:<ERRNO NAME>`` (an OSError), ``pause:<seconds>``, and
``hold:<path>`` (creates ``<path>``, then waits until ``<path>.go`` exists).
``EASYCKPT_FAILPOINTS_RANK`` limits all of them to one rank (the value of ``RANK``).
"""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import threading
import time
from dataclasses import dataclass

ENVIRONMENT_VARIABLE = "EASYCKPT_FAILPOINTS"
RANK_VARIABLE = "EASYCKPT_FAILPOINTS_RANK"

#: Every failpoint of the program with what has just happened there; crash tests iterate over it.
NAMES: dict[str, str] = {}


@dataclass(slots=True)
class _Armed:
    countdown: int | None  # None: at every hit
    action: str


def declare(name: str, moment: str) -> str:
    """Register failpoint `name`; `moment` says in words when it is hit. Returns `name`."""
    assert name not in NAMES, f"failpoint {name} is declared twice"
    NAMES[name] = moment
    return name


def parse(text: str) -> dict[str, _Armed]:
    """Parse the value of EASYCKPT_FAILPOINTS. Raises ValueError for a malformed entry."""
    armed = {}
    for entry in filter(None, text.split(";")):
        place, separator, action = entry.partition("=")
        name, _, count = place.partition("@")
        if not separator or action.partition(":")[0] not in ("kill", "error", "pause", "hold"):
            raise ValueError(f"{ENVIRONMENT_VARIABLE}: cannot understand {entry!r}")
        armed[name] = _Armed(None if count == "*" else int(count or 1), action)
    return armed


def _from_environment() -> dict[str, _Armed]:
    only_rank = os.environ.get(RANK_VARIABLE)
    if only_rank is not None and only_rank != os.environ.get("RANK", "0"):
        return {}
    return parse(os.environ.get(ENVIRONMENT_VARIABLE, ""))


_lock = threading.Lock()
_armed = _from_environment()


def arm(text: str) -> None:
    """Replace what is armed in this process (for tests that need no child process)."""
    global _armed
    _armed = parse(text)


def hit(name: str) -> None:
    """Do what is armed at `name`; nothing otherwise."""
    if _armed:
        _hit(name)


def _hit(name: str) -> None:
    assert name in NAMES, f"failpoint {name} was never declared"
    with _lock:
        entry = _armed.get(name)
        if entry is None:
            return
        if entry.countdown is not None:
            entry.countdown -= 1
            if entry.countdown != 0:
                return
    _act(name, entry.action)


def _act(name: str, action: str) -> None:
    kind, _, value = action.partition(":")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "error":
        number = getattr(errno, value)
        raise OSError(number, os.strerror(number), f"failpoint {name}")
    elif kind == "pause":
        time.sleep(float(value))
    else:
        pathlib.Path(value).touch()
        while not os.path.exists(value + ".go"):
            time.sleep(0.001)
