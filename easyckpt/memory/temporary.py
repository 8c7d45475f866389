"""A memory directory of an audit's own, and what audits that were killed have left of such."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass

from easyckpt.format import memory_names
from easyckpt.memory.owner import OwnerLock
from easyckpt.memory.place import memory_directory


class TemporaryMemory:
    """A new directory of this user alone for arenas, where the memory tier lives (`memory_dir`, or by default).

    A record lock in it, held until `remove` or the death of this process, shows that it is in use.
    """

    def __init__(self, memory_dir: str | None) -> None:
        self.path = tempfile.mkdtemp(prefix=memory_names.AUDIT_MEMORY, dir=memory_directory(memory_dir)[0])
        self._lock = OwnerLock(os.path.join(self.path, memory_names.AUDIT_OWNER))
        self._lock.try_acquire()

    def remove(self) -> None:
        """Remove it with all that is in it. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


@dataclass(frozen=True, slots=True)
class LeftDirectory:
    """A directory of an audit, in use or not."""

    path: str
    nbytes: int
    changed: float
    """Unix time at which its list of files has last changed."""
    in_use: bool | None
    """None: it says nothing of its audit (of an older version, or killed at its very start)."""


def find_directories(directory: str) -> list[LeftDirectory]:
    """Directories that audits of this user keep in the memory directory `directory`, by name."""
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if memory_names.is_audit_memory(name) and _is_ours(status):
                    found.append(LeftDirectory(path, _size(path), status.st_mtime, _in_use(path)))
    return found


def remove_directory(path: str) -> bool:
    """Remove a directory of an audit that has ended, never following a link; False where it is in use again."""
    if not _is_ours(os.lstat(path)) or _in_use(path):
        return False
    shutil.rmtree(path)
    return True


def _is_ours(status: os.stat_result) -> bool:
    private = not stat.S_IMODE(status.st_mode) & 0o077
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and private


def _in_use(path: str) -> bool | None:
    """Whether the audit lives, or a command that it had started and that has outlived it."""
    names = os.listdir(path)
    owners = [name for name in names if name.endswith(memory_names.OWNER) and name != memory_names.AUDIT_OWNER]
    if any(OwnerLock.is_free(os.path.join(path, name)) is False for name in owners):
        return True
    free = OwnerLock.is_free(os.path.join(path, memory_names.AUDIT_OWNER))
    return None if free is None else not free


def _size(path: str) -> int:
    total = 0
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
