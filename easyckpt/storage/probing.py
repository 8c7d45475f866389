"""Trying out what a file system really does, in a private directory that is removed at the end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from easyckpt.errors import EasyckptError
from easyckpt.format import layout
from easyckpt.storage.local import LocalStorage
from easyckpt.storage.localfile import probe_direct

#: A directory of an earlier try is a leftover after so many seconds: none takes as long.
LEFT_AFTER = 3600.0
#: Writing and reading for the speed end after so many seconds each.
SPEED_SECONDS = 10.0
_PIECE = 8 << 20
_FLOCK = struct.Struct("hhqqi4x")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system under a path."""

    kind: str
    point: str
    source: str

    @property
    def where(self) -> str:
        """``local``, ``network``, ``memory``, ``container`` (its own layer) or ``unknown``."""
        if self.kind in ("tmpfs", "ramfs"):
            return "memory"
        if self.kind in ("overlay", "aufs"):
            return "container"
        if self.kind in _NETWORK or self.kind.startswith("fuse"):
            return "network"
        return "unknown" if self.kind == "unknown" else "local"


_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "virtiofs", "afs"}
    | {"wekafs", "pvfs2", "orangefs", "ocfs2", "gfs2"}
)


def mount_of(path: str, mountinfo: str | None = None) -> Mount:
    """The file system that `path` lies on, as /proc/self/mountinfo (or the text given) says."""
    if mountinfo is None:
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
                mountinfo = file.read()
        except OSError:
            mountinfo = ""
    real, found = os.path.realpath(path), Mount("unknown", "", "")
    for line in mountinfo.splitlines():
        mount, separator, filesystem = line.partition(" - ")
        fields, kind = mount.split(), filesystem.split()
        if not separator or len(fields) < 5 or len(kind) < 2:
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found.point):  # a later mount hides an earlier one
            found = Mount(kind[0], point, kind[1])
    return found


@contextlib.contextmanager
def private_directory(parent: str) -> Iterator[Probes]:
    """A new directory in `parent`, whose name is no candidate for anything, and what can be tried in it."""
    path = os.path.join(parent, layout.probe_dir(secrets.token_hex(8)))
    os.mkdir(path, 0o700)
    try:
        yield Probes(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def leftovers(parent: str, now: float) -> list[str]:
    """Such directories of this user that a kill has left; `now` is the file system's own clock."""
    found = []
    for name in sorted(os.listdir(parent)):
        path = os.path.join(parent, name)
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if layout.is_probe_dir(name) and status.st_uid == os.geteuid() and now - status.st_mtime > LEFT_AFTER:
                found.append(path)
    return found


def remove_leftover(path: str) -> bool:
    """Remove one of `leftovers`."""
    shutil.rmtree(path)
    return True


@dataclass(frozen=True, slots=True)
class Speed:
    """What was moved, in how long."""

    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / max(self.seconds, 1e-9)


class Probes:
    """Each method tries one thing. What does not hold is False, or the OSError that says why not."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._storage = LocalStorage(path)

    def takes_direct(self) -> bool:
        """Writes really go past the page cache."""
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return probe_direct(os, directory)
        finally:
            os.close(directory)

    def renames_in_place(self) -> bool:
        """A directory is renamed as it is (the same inode, all in it), not copied."""
        self._storage.makedirs("rename/before")
        self._write("rename/before/file", b"content")
        before = os.stat(self._at("rename/before")).st_ino
        self._storage.rename("rename/before", "rename/after")
        self._storage.sync_dir("rename")
        same = os.stat(self._at("rename/after")).st_ino == before
        return same and self._storage.listdir("rename") == ["after"] and self._storage.read("rename/after/file") != b""

    def replaces_files(self) -> bool:
        """A file takes the place of another one by a rename."""
        self._storage.makedirs("replace")
        self._storage.replace("replace/file", b"old")
        self._storage.replace("replace/file", b"new")
        return self._storage.read("replace/file") == b"new" and self._storage.listdir("replace") == ["file"]

    def keeps_directories(self) -> bool:
        """A rename onto a directory that holds something is refused."""
        for name in ("one", "two"):
            self._storage.makedirs(f"keep/{name}")
            self._write(f"keep/{name}/{name}", b"content")
        try:
            self._storage.rename("keep/one", "keep/two")
        except OSError:
            return self._storage.listdir("keep/two") == ["two"]
        return False

    def syncs_files(self) -> bool:
        """Fsync of a file is taken. (Whether the disk keeps what it said cannot be asked.)"""
        self._write("synced", b"content")
        return True

    def syncs_directories(self) -> bool:
        """Fsync of a directory is taken."""
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            return False
        finally:
            os.close(directory)
        return True

    def creates_once(self) -> bool:
        """Of two exclusive creations of one name, one succeeds: what a lease is decided by."""
        self._storage.makedirs("once")
        won = [self._storage.link_exclusive("once/lease", data) for data in (b"first", b"second")]
        return won == [True, False] and self._storage.read("once/lease") == b"first"

    def links(self) -> bool:
        """There are hard links."""
        self._write("linked", b"content")
        try:
            os.link(self._at("linked"), self._at("link"))
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        return os.stat(self._at("linked")).st_nlink == 2

    def locks_records(self) -> bool:
        """A record lock is seen by others."""
        self._write("locked", b"")
        with open(self._at("locked"), "r+b") as one, open(self._at("locked"), "r+b") as two:
            fcntl.lockf(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            # A lock of an open file conflicts with those of processes, that of its own too.
            kind: int = _FLOCK.unpack(fcntl.fcntl(two, fcntl.F_OFD_GETLK, question))[0]
            return kind != fcntl.F_UNLCK

    def clock(self) -> tuple[float, float]:
        """(now by the file system's clock, how many seconds that is ahead of this host's)."""
        before = time.time()
        self._write("clock", b"tick")
        after = time.time()
        stamp = os.stat(self._at("clock")).st_mtime
        return stamp, 0.0 if before - 0.05 <= stamp <= after + 0.05 else stamp - (before + after) / 2

    def speed(self, nbytes: int, count: Callable[[int], None]) -> tuple[Speed, Speed]:
        """(writing and syncing, reading) of a file of `nbytes` at most, as checkpoints are written and read."""
        buffer = mmap.mmap(-1, _PIECE)  # not closed here: an interruption leaves views of it
        for at in range(0, _PIECE, 1 << 20):  # no file system can make less of it
            buffer[at : at + (1 << 20)] = os.urandom(1 << 20)
        written = self._write_for_speed(buffer, nbytes, count)
        self._storage.drop_cache("speed")
        begun, done = time.perf_counter(), 0
        with self._storage.reader("speed") as file:
            while done < written.nbytes and time.perf_counter() - begun < SPEED_SECONDS:
                done += file.read_into(buffer, done)
                count(_PIECE)
        return written, Speed(done, time.perf_counter() - begun)

    def _write_for_speed(self, buffer: mmap.mmap, nbytes: int, count: Callable[[int], None]) -> Speed:
        begun, done = time.perf_counter(), 0
        with self._storage.create("speed") as file:
            while done < nbytes and time.perf_counter() - begun < SPEED_SECONDS:
                file.write_at(buffer, done)
                done += _PIECE
                count(_PIECE)
            file.sync()
        return Speed(done, time.perf_counter() - begun)

    def _write(self, path: str, data: bytes) -> None:
        with self._storage.create(path) as file:
            file.write_at(data, 0)
            file.sync()

    def _at(self, path: str) -> str:
        return os.path.join(self.path, path)


def holds(probe: Callable[[], bool]) -> tuple[bool, str]:
    """(whether it holds, what was met if not)."""
    try:
        return probe(), ""
    except (EasyckptError, OSError) as error:
        return False, str(error)
