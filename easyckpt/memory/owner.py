"""Who owns an arena: an fcntl record lock, held for life.

The kernel drops it when the process dies, however it dies. Forked children do not inherit it (an inherited flock would
outlive the owner in orphaned loader workers), and it means the same in every container (pids do not). Its trap:
closing *any* descriptor of the file drops all locks of the process on it, so nothing but this module opens one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading

from easyckpt.errors import FormatError, StorageError
from easyckpt.memory.files import open_checked

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid

_guard = threading.Lock()  # no descriptor is opened and closed while another thread takes the lock
_held: dict[tuple[int, int], int] = {}  # (device, inode) -> pid of the process that holds it


def _after_fork() -> None:
    global _guard
    _guard = threading.Lock()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
_NOBODY = -1
#: A longer note is not read.
MAX_NOTE = 1 << 16


def _holder(path: str) -> int | None:
    """The process that holds the lock on `path`; 0 where its number cannot be known. With `_guard` held.

    None when there is no such file, or it cannot be told.
    """
    try:
        found = os.lstat(path)
        if _held.get((found.st_dev, found.st_ino)) == os.getpid():
            return os.getpid()
        fd, _ = open_checked(path, os.O_RDONLY)
    except (OSError, FormatError):
        return None
    try:
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, question))
        return _NOBODY if kind == fcntl.F_UNLCK else max(0, pid)
    except OSError:
        return None
    finally:
        os.close(fd)


class OwnerLock:
    """The record lock on the file at `path`, which is made when missing.

    `note` is what the owner leaves in the file for those who find it after its death (None: what is there stays).
    """

    def __init__(self, path: str, note: bytes | None = None) -> None:
        self.path = path
        self._note = note
        self.made = False
        """Whether it was this object that has made the file."""
        self._fd: int | None = None
        self._pid = os.getpid()

    @property
    def held(self) -> bool:
        """Whether this object holds the lock; False in a forked child."""
        return self._fd is not None and os.getpid() == self._pid

    def try_acquire(self) -> bool:
        """Take the lock, at once or not at all; False when any process, this one too, holds it.

        Raises StorageError when something that is not ours lies at `path`.
        """
        with _guard:
            while True:
                if self._held_here():
                    return False
                fd = self._open()
                try:
                    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(fd)
                    return False
                found = os.fstat(fd)
                if self._is_at_path(found):
                    self._fd, self._pid = fd, os.getpid()
                    _held[found.st_dev, found.st_ino] = self._pid
                    self._write_note(fd)
                    return True
                os.close(fd)  # its last owner removed the file meanwhile: take the new one

    def release(self, unlink: bool = False) -> None:
        """Give the lock up, removing the file first if `unlink`. Nothing in a forked child."""
        with _guard:
            if self._fd is None or os.getpid() != self._pid:
                return
            found = os.fstat(self._fd)
            if unlink and self._is_at_path(found):
                os.unlink(self.path)
            _held.pop((found.st_dev, found.st_ino), None)
            os.close(self._fd)
            self._fd = None

    def is_in_place(self) -> bool:
        """Whether this object holds the lock, and its file is still at `path`."""
        with _guard:
            return self.held and self._fd is not None and self._is_at_path(os.fstat(self._fd))

    def take_again(self) -> bool:
        """Own `path` anew after somebody has removed the file; False when another process has been quicker."""
        self.release()
        return self.try_acquire()

    @staticmethod
    def is_free(path: str) -> bool | None:
        """Whether no live process holds the lock on `path`; None when there is no such file or it cannot be told."""
        with _guard:
            holder = _holder(path)
        return None if holder is None else holder == _NOBODY

    @staticmethod
    def note_at(path: str) -> bytes | None:
        """What its last owner has left in the file at `path`; None where that cannot be known, or is our own."""
        with _guard:
            try:
                found = os.lstat(path)
                if (found.st_dev, found.st_ino) in _held:
                    return None  # closing a descriptor of it would drop the lock
                fd, _ = open_checked(path, os.O_RDONLY)
            except (OSError, FormatError):
                return None
            try:
                return os.pread(fd, MAX_NOTE, 0)
            except OSError:
                return None
            finally:
                os.close(fd)

    @staticmethod
    def describe_holder(path: str) -> str:
        """Who holds the lock on `path`, in words, for messages."""
        with _guard:
            holder = _holder(path)
        if holder == os.getpid():
            return "another Checkpointer of this process"
        # (a process of another container has no number here)
        return f"the live process {holder}" if holder is not None and holder > 0 else "another live process"

    def _write_note(self, fd: int) -> None:
        if self._note is not None:
            with contextlib.suppress(OSError):  # full: whoever finds the file then knows less
                os.ftruncate(fd, 0)
                os.pwrite(fd, self._note, 0)

    def _held_here(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(self.path)
            return _held.get((found.st_dev, found.st_ino)) == os.getpid()
        return False

    def _open(self) -> int:
        while True:
            self.made = False
            try:
                return open_checked(self.path, os.O_RDWR)[0]
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                    fd = os.open(self.path, flags, 0o600)
                    self.made = True
                    return fd
            except FormatError as error:
                raise StorageError(
                    f"the memory tier cannot be owned: {error}. Remove it, or set memory_dir to another directory"
                ) from error

    def _is_at_path(self, found: os.stat_result) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.lstat(self.path), found)
        return False
