"""Whether a process that has told who it is still lives, told without a file that it holds.

A number says which process is meant only within one kernel and one of its namespaces of processes, and only together
with the moment when the process was started: numbers are used again. Where any of these differs or cannot be known,
nothing is said.
"""

from __future__ import annotations

import os
import re

_NAMESPACE = re.compile(r"[a-z]+:\[[0-9]+\]")


def boot() -> str | None:
    """The kernel that runs here, since it was started; None where it does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def identity() -> str:
    """Who this process is: the kernel, the namespace that its number counts in, its start; '' where it cannot tell."""
    here, started = _here(), _started(os.getpid())
    return f"{here}/{started}" if here is not None and started is not None else ""


def is_dead(number: int, told: str) -> bool:
    """Whether the process that had this `number` and :func:`identity` has certainly ended."""
    started = told.rpartition("/")[2]
    if number <= 0 or not is_near(told):
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # there is one, of another user
    now = _started(number)
    return now is not None and now != started


def is_near(told: str) -> bool:
    """Whether the process that told this counts in the same place as this one, so that its end can be seen."""
    return told != "" and told.rpartition("/")[0] == _here()


def _here() -> str | None:
    """Where numbers of processes mean the same as here; None where /proc does not show them as this process sees them.

    A container may see the /proc of its host, in which the same number is another process.
    """
    kernel = boot()
    try:
        names = [os.readlink("/proc/self/ns/pid")]
        if os.path.lexists("/proc/self/ns/time"):  # starts of processes are shown by its clock
            names.append(os.readlink("/proc/self/ns/time"))
        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            numbers = next((line.split()[1:] for line in file if line.startswith("NSpid:")), [])
    except OSError:
        return None
    if kernel is None or numbers != [str(os.getpid())] or not all(map(_NAMESPACE.fullmatch, names)):
        return None
    return "/".join([kernel, *names])


def _started(number: int) -> str | None:
    """When the process was started, in ticks since the kernel was; None where that is not shown."""
    try:
        with open(f"/proc/{number}/stat", encoding="utf-8", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()  # a program's name may hold anything
    except OSError:
        return None
    return words[19] if len(words) > 19 and words[19].isdecimal() else None
