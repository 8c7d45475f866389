"""Checks of the memory tier: where it lies, what may take it away, how many snapshots fit."""

from __future__ import annotations

import os
from collections.abc import Iterator

from easyckpt.cli import output
from easyckpt.cli.doctor.finding import Finding, State
from easyckpt.cli.doctor.place import Place
from easyckpt.memory import budget, surroundings
from easyckpt.memory.place import user_name
from easyckpt.storage import probing

AREA = "memory"
#: What docker gives a container.
_SMALL = 64 << 20
_LOST = "snapshots go to private memory: a killed job goes on from storage"


def findings(directory: str, in_memory: bool, place: Place, wanted_slots: int) -> Iterator[Finding]:
    """Of the memory directory `directory`."""
    if not in_memory:
        yield Finding(
            AREA, "directory", "cannot be written, or is none", "warning", "memory", _LOST,
            "mount a tmpfs at the default place, or set memory_dir",
        )  # fmt: skip
        return
    yield _kind(directory)
    yield _size(directory)
    yield _privacy(directory)
    yield _locks(directory)
    yield _logind(directory)
    yield _container()
    yield from _budget(directory, place, wanted_slots)


def _kind(directory: str) -> Finding:
    mount = probing.mount_of(directory)
    memory = mount.where == "memory"
    return Finding(
        AREA, "file system", f"{mount.kind} at {mount.point} ({directory})", "ok" if memory else "warning", "memory",
        "survives processes, not a reboot" if memory else "not memory: snapshots are written to a disk at every step",
        "" if memory else "set memory_dir to a directory of a tmpfs",
    )  # fmt: skip


def _size(directory: str) -> Finding:
    space = os.statvfs(directory)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    small = 0 < total <= _SMALL
    return Finding(
        AREA, "size", f"{output.size(free)} free of {output.size(total)}", "warning" if small else "ok", "memory",
        _LOST if small else "snapshots of all ranks of this machine lie here",
        "give the container more (docker: --shm-size; Kubernetes: an emptyDir of medium Memory)" if small else "",
    )  # fmt: skip


def _privacy(directory: str) -> Finding:
    mode = os.stat(directory).st_mode
    open_to_all = bool(mode & 0o022) and not mode & 0o1000
    return Finding(
        AREA, "private to the owner", f"files 0600, checked at each opening; directory {mode & 0o7777:04o}",
        "warning" if open_to_all else "ok", "memory",
        "other users may remove snapshots" if open_to_all else "others can neither read nor remove snapshots",
        f"chmod +t {directory}" if open_to_all else "",
    )  # fmt: skip


def _locks(directory: str) -> Finding:
    with probing.private_directory(directory) as probes:
        works, why = probing.holds(probes.locks_records)
    return Finding(
        AREA, "record locks", "yes" if works else f"no {why}", "ok" if works else "bad", "owner",
        "a dead owner is told from a living one" if works else "two jobs may write the same memory",
        "" if works else "set memory_dir to a directory of a tmpfs",
    )  # fmt: skip


def _logind(directory: str) -> Finding:
    removes = surroundings.removes_ipc() and probing.mount_of(directory).where == "memory"
    return Finding(
        AREA, "logind RemoveIPC", "removes shared memory at logout" if removes else "does not remove it",
        "warning" if removes else "ok", "memory",
        "when the last session of this user ends, snapshots go" if removes else "logging out takes nothing away",
        f"loginctl enable-linger {user_name()}, or RemoveIPC=no in logind.conf" if removes else "",
    )  # fmt: skip


def _container() -> Finding:
    sign = surroundings.container()
    if sign is None:
        return Finding(AREA, "container", "none seen", "ok", "memory", "a restart on this machine finds the snapshots")
    return Finding(
        AREA, "container", f"yes, by {sign}", "warning", "memory",
        "a restart in the same container finds the snapshots; the end of the container or pod takes them",
        "restart inside of it (torchrun --max-restarts), or mount a memory directory of the host",
    )  # fmt: skip


def _budget(directory: str, place: Place, wanted: int) -> Iterator[Finding]:
    now = budget.available(directory)
    limit = now.cgroup_limit_left
    left = "no limit" if limit is None else f"{output.size(limit)} left"
    tight = limit is not None and limit < now.free_memory
    yield Finding(
        AREA, "cgroup memory limit", left, "ok", "memory",
        "it counts snapshots, too" if tight else "it is not what limits snapshots",
    )  # fmt: skip
    usable = now.usable
    if place.arena_id is not None:  # what this run's ranks hold is theirs already
        usable += budget.held_bytes(directory, user_name(), place.arena_id)
    text = f"{output.size(usable)} ({output.size(now.free_memory)} of memory free)"
    if not place.image_bytes or place.newest is None or place.newest.manifest is None:
        yield Finding(AREA, "for snapshots", text, "ok", "memory", f"a rank takes {wanted} times its state, if it fits")
        return
    ranks = place.newest.manifest.world_size
    slots = min(wanted, usable // (place.image_bytes * ranks))
    state: State = "ok" if slots >= wanted else "warning"
    fits = f"; {slots} of {wanted} slots of {output.size(place.image_bytes)} fit, if all {ranks} rank(s) run here"
    meaning = "all slots fit" if state == "ok" else "more snapshots are skipped" if slots > 1 else _LOST
    advice = "" if state == "ok" else "leave more memory free, or enlarge the memory directory"
    yield Finding(AREA, "for snapshots", text + fits, state, "memory", meaning, advice)
