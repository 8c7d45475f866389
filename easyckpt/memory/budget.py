"""How much memory the memory tier may take: a part of what is really free, divided over the node's ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator

import psutil

from easyckpt.errors import FormatError
from easyckpt.format import memory_names
from easyckpt.memory.files import open_checked

#: The part of the free memory that snapshots may take.
SHARE = 0.8
#: A cgroup v1 without a limit reports the largest page-aligned number.
_NO_LIMIT = 1 << 62

_log = logging.getLogger("easyckpt")
Read = Callable[[str], "str | None"]


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """What is free on this node right now, in bytes."""

    free_memory: int
    cgroup_limit_left: int | None
    """Limit minus usage without page cache, of the tightest group; None without a limit."""
    shm_free: int
    """Free space of the memory directory; 0 when it does not exist."""

    @property
    def private_usable(self) -> int:
        """What snapshots may take as private memory, all ranks of the node together."""
        free = self.free_memory if self.cgroup_limit_left is None else min(self.free_memory, self.cgroup_limit_left)
        return max(0, int(SHARE * free))

    @property
    def usable(self) -> int:
        """What snapshots may take in the memory directory, all ranks of the node together."""
        return min(self.private_usable, int(SHARE * self.shm_free))


def available(directory: str) -> Budget:
    """Measure. Never raises for what cannot be read: it then does not limit."""
    try:
        space = os.statvfs(directory)
        shm_free = space.f_bavail * space.f_frsize
    except OSError:
        shm_free = 0
    left = cgroup_limit_left(_read("/proc/self/cgroup") or "", _read("/proc/self/mountinfo") or "", _read)
    return Budget(psutil.virtual_memory().available, left, shm_free)


def held_bytes(directory: str, user: str, arena_id: str) -> int:
    """The memory that the arenas of all ranks of `arena_id` hold in `directory`."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if memory_names.is_arena_file(entry.name, user, arena_id):
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    total += found.st_blocks * 512 if found.st_uid == os.geteuid() else 0
    return total


@contextlib.contextmanager
def node_lock(directory: str, user: str, timeout: float = 30.0) -> Iterator[bool]:
    """Ranks of one node measure and divide one at a time. Yields whether the lock was got.

    It only keeps the division fair, so a lock that stays held (seconds: `timeout`) or cannot be opened is a warning.
    """
    path = os.path.join(directory, memory_names.node_lock_file(user))
    try:
        fd = _open_lock(path)
    except (OSError, FormatError) as error:
        _log.warning("memory is divided without a lock: %s", error)
        yield False
        return
    try:
        got = _flock(fd, timeout)
        if not got:
            _log.warning("memory is divided without a lock: %s was held for %g s", path, timeout)
        yield got
    finally:
        os.close(fd)


def _open_lock(path: str) -> int:
    with contextlib.suppress(FileExistsError):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return open_checked(path, os.O_RDWR)[0]


def _flock(fd: int, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        else:
            return True


def cgroup_limit_left(cgroups: str, mountinfo: str, read: Read) -> int | None:
    """Bytes left in the tightest memory group of this process; None without a limit.

    `cgroups` is /proc/self/cgroup, `mountinfo` /proc/self/mountinfo, `read` gives a file's text or None.
    """
    left: list[int] = []
    for version, mountpoint, root in _memory_mounts(mountinfo):
        group = _group(cgroups, version)
        if group is None:
            continue
        for directory in _ancestors(mountpoint, root, group):
            value = _left_v2(directory, read) if version == 2 else _left_v1(directory, read)
            if value is not None:
                left.append(value)
    return max(0, min(left)) if left else None


def _memory_mounts(mountinfo: str) -> Iterator[tuple[int, str, str]]:
    """(version, mount point, mounted root) of every hierarchy that can limit memory."""
    for line in mountinfo.splitlines():
        mount, separator, filesystem = line.partition(" - ")
        fields, kind = mount.split(), filesystem.split()
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        root, mountpoint = (_unescape(field) for field in fields[3:5])
        if kind[0] == "cgroup2":
            yield 2, mountpoint, root
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield 1, mountpoint, root


def _unescape(field: str) -> str:
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _group(cgroups: str, version: int) -> str | None:
    for line in cgroups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (number == "0" and controllers == "") if version == 2 else ("memory" in controllers.split(",")):
            return path
    return None


def _ancestors(mountpoint: str, root: str, group: str) -> Iterator[str]:
    """The group's directory and those above it. In a container the group may name a path of the host: the mount
    itself is then the container's group, and directories that do not exist limit nothing.
    """
    root = root.rstrip("/")
    inside = group[len(root) :] if group == root or group.startswith(root + "/") else ""
    parts = [part for part in inside.split("/") if part and part != ".."]
    for count in range(len(parts), -1, -1):
        yield "/".join([mountpoint.rstrip("/"), *parts[:count]])


def _left_v2(directory: str, read: Read) -> int | None:
    limits = [_number(read(f"{directory}/{name}")) for name in ("memory.max", "memory.high")]
    used = _number(read(f"{directory}/memory.current"))
    known = [limit for limit in limits if limit is not None]
    if not known or used is None:
        return None
    return min(known) - used + _page_cache(read(f"{directory}/memory.stat"), "")


def _left_v1(directory: str, read: Read) -> int | None:
    limit = _number(read(f"{directory}/memory.limit_in_bytes"))
    used = _number(read(f"{directory}/memory.usage_in_bytes"))
    if limit is None or used is None or limit >= _NO_LIMIT:
        return None
    return limit - used + _page_cache(read(f"{directory}/memory.stat"), "total_")


def _page_cache(stat: str | None, prefix: str) -> int:
    """What the kernel can drop. Not "file" or "cache": those count shared memory, our own slots, too."""
    wanted = (prefix + "active_file", prefix + "inactive_file")
    total = 0
    for line in (stat or "").splitlines():
        name, _, value = line.partition(" ")
        if name in wanted:
            total += _number(value) or 0
    return total


def _number(text: str | None) -> int | None:
    """A number of a cgroup file; None for "max", for nonsense and for a missing file."""
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None
