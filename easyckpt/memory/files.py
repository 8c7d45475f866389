"""Opening and allocating the arena's files in a directory that every user may write to."""

from __future__ import annotations

import errno
import os
import stat

from easyckpt.errors import DamagedCheckpoint, OutOfSpace

_ALLOCATION_PIECE = 256 << 20  # tmpfs undoes an interrupted allocation as a whole: keep each one short


def open_checked(path: str, flags: int, *, user_only: bool = True) -> tuple[int, os.stat_result]:
    """Open an existing regular file of this user, mode 0600 or less, under one name; follow no link.

    Raises OSError (FileNotFoundError), or DamagedCheckpoint with the reason for not trusting it. `user_only=False`
    leaves the owner and the mode unchecked (rescue by an administrator).
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR):
            raise
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else os.strerror(error.errno or 0)
        raise DamagedCheckpoint(f"{path}: not opened: {reason}") from error
    try:
        found = os.fstat(fd)
        problem = _problem(found, user_only)
    except BaseException:
        os.close(fd)
        raise
    if problem:
        os.close(fd)
        raise DamagedCheckpoint(f"{path}: not trusted: {problem}")
    return fd, found


def _problem(found: os.stat_result, user_only: bool) -> str | None:
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    if user_only and found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not {os.geteuid()}"
    if user_only and stat.S_IMODE(found.st_mode) & 0o077:
        return f"others may open it (mode {stat.S_IMODE(found.st_mode):04o}, expected 0600)"
    if found.st_nlink > 1:
        return f"it has {found.st_nlink} names"
    return None


def allocate(fd: int, start: int, end: int, path: str) -> None:
    """Have the file system reserve bytes `start` to `end`, so that no later store meets a full one.

    Raises OutOfSpace; the file is then as long as before.
    """
    before = os.fstat(fd).st_size
    try:
        for at in range(start, end, _ALLOCATION_PIECE):
            os.posix_fallocate(fd, at, min(_ALLOCATION_PIECE, end - at))
    except OSError as error:
        os.ftruncate(fd, before)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
            raise
        raise OutOfSpace(
            f"{path}: no room for {end - start} more bytes in {os.path.dirname(path)} ({error.strerror}): "
            "enlarge it (docker: --shm-size), remove what else lies there, or set memory_dir"
        ) from error
