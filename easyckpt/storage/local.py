"""``Storage`` in a directory of a local or network file system."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator

from easyckpt import failpoints
from easyckpt.errors import StorageError
from easyckpt.format import layout
from easyckpt.storage.exchanging import exchange_names
from easyckpt.storage.localfile import LocalFileReader, LocalFileWriter, errors_name, open_regular, probe_direct
from easyckpt.storage.walk import DIRECTORY, RootDirectory, logger

CREATED = failpoints.declare("storage.create.after", "a file exists, empty, its name not durable")
MKDIR_AFTER = failpoints.declare("storage.makedirs.made", "a directory exists, its name not durable")
REPLACE_WRITTEN = failpoints.declare("storage.replace.written", "the replacement is written, not synced")
REPLACE_BEFORE = failpoints.declare("storage.replace.before_rename", "the replacement is durable under another name")
REPLACE_AFTER = failpoints.declare("storage.replace.after_rename", "the replacement has its name, not durably")
APPEND_BEFORE = failpoints.declare("storage.append.before", "a log is open, its new lines are not written")
RENAME_BEFORE = failpoints.declare("storage.rename.before", "a file or directory still has its old name")
RENAME_AFTER = failpoints.declare("storage.rename.after", "a file or directory has its new name, not durably")
SYNC_DIR_BEFORE = failpoints.declare("storage.sync_dir.before", "names in a directory changed, not durably")
SYNC_DIR_AFTER = failpoints.declare("storage.sync_dir.after", "names in a directory are durable")
REMOVE_BEFORE = failpoints.declare("storage.remove.before", "a file is about to be removed")
REMOVE_AFTER = failpoints.declare("storage.remove.after", "a file is removed, not durably")
LINK_BEFORE = failpoints.declare("storage.link.before", "a file is durable under a temporary name only")
LINK_AFTER = failpoints.declare("storage.link.after", "a file has its name, exclusively, and its temporary one")

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
#: What file systems without hard links answer (FUSE, SMB, exFAT).
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalStorage(RootDirectory):
    """Storage below the directory `root`. `direct_io` None means: find out at the first file."""

    def __init__(self, root: str | os.PathLike[str], *, direct_io: bool | None = None) -> None:
        super().__init__(root)
        self._direct_io = direct_io
        self._probed: dict[int, bool] = {}  # by device: a mount may lie below the root

    # -- directories

    def makedirs(self, path: str) -> None:
        """Create the directory and its missing parents, durably."""
        parts = self._split(path)
        self._make_root()
        for depth in range(len(parts)):
            name = parts[depth]
            with self._named("/".join(parts[: depth + 1])), self._opened(parts[:depth]) as directory:
                try:
                    self._os.mkdir(name, dir_fd=directory)
                except FileExistsError:
                    continue
                failpoints.hit(MKDIR_AFTER)
                self._sync_descriptor(directory)
        if parts:
            with self._named(path), self._opened(parts):
                pass  # what already has the name must be a directory, too

    def listdir(self, path: str) -> list[str]:
        """Names in the directory, sorted."""
        with self._named(path), self._opened(self._split(path)) as directory:
            return sorted(self._os.listdir(directory))

    def sync_dir(self, path: str) -> None:
        """Make the names in this directory durable."""
        with self._named(path), self._opened(self._split(path)) as directory:
            failpoints.hit(SYNC_DIR_BEFORE)
            self._sync_descriptor(directory)
            failpoints.hit(SYNC_DIR_AFTER)

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it."""
        with self._at(path) as (directory, name):
            self._remove_tree_at(directory, name)

    def remove_empty_root(self) -> None:
        """Remove the root itself, if nothing is in it."""
        with contextlib.suppress(OSError):
            self._os.rmdir(self.root)

    # -- whole files

    def stat_size(self, path: str) -> int:
        """Length of the regular file."""
        with self._at(path) as (directory, name):
            status = self._os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise StorageError(f"{self._full(path)} is not a regular file")
            return int(status.st_size)

    def exists(self, path: str) -> bool:
        """Whether something has that name."""
        try:
            with self._at(path) as (directory, name):
                self._os.stat(name, dir_fd=directory, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def read(self, path: str) -> bytes:
        """All bytes of a small file."""
        with self._at(path) as (directory, name):
            descriptor = open_regular(self._os, name, directory)
            with os.fdopen(descriptor, "rb") as file:
                return file.read()

    def replace(self, path: str, data: bytes) -> None:
        """Put `data` under `path`, atomically and durably."""
        with self._at(path) as (directory, name), self._temporary(directory, name, data) as temporary:
            failpoints.hit(REPLACE_BEFORE)
            self._os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            failpoints.hit(REPLACE_AFTER)
            self._sync_descriptor(directory)

    def link_exclusive(self, path: str, data: bytes) -> bool:
        """Create `path` with `data`, durably, only if the name is free."""
        with self._at(path) as (directory, name), self._temporary(directory, name, data) as temporary:
            failpoints.hit(LINK_BEFORE)
            created = self._link(directory, temporary, name, data)
            failpoints.hit(LINK_AFTER)
            if created:
                self._os.unlink(temporary, dir_fd=directory)
                self._sync_descriptor(directory)
            return created

    def append(self, path: str, data: bytes) -> None:
        """Append to a log, all or nothing."""
        with self._at(path) as (directory, name):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = self._os.open(name, flags, 0o666, dir_fd=directory)
            try:
                size = self._os.fstat(descriptor).st_size
                try:
                    failpoints.hit(APPEND_BEFORE)
                    self._write_all(descriptor, data)
                except OSError:
                    # Half a line would join with the next one into garbage.
                    with contextlib.suppress(OSError):
                        self._os.ftruncate(descriptor, size)
                    raise
            finally:
                self._os.close(descriptor)

    def truncate(self, path: str, size: int) -> None:
        """Cut an existing file, durably."""
        with self._at(path) as (directory, name):
            descriptor = self._os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
            try:
                self._os.ftruncate(descriptor, size)
                self._os.fsync(descriptor)
            finally:
                self._os.close(descriptor)

    def rename(self, src: str, dst: str) -> None:
        """Rename, atomically."""
        with self._at(src) as (src_directory, src_name), self._at(dst) as (dst_directory, dst_name):
            failpoints.hit(RENAME_BEFORE)
            self._os.rename(src_name, dst_name, src_dir_fd=src_directory, dst_dir_fd=dst_directory)
            failpoints.hit(RENAME_AFTER)

    def exchange(self, one: str, other: str) -> bool:
        """Have two directories change names."""
        with self._at(one) as (directory, name), self._at(other) as (other_directory, other_name):
            failpoints.hit(RENAME_BEFORE)
            if not exchange_names(name, directory, other_name, other_directory):
                return False
            failpoints.hit(RENAME_AFTER)
            return True

    def remove(self, path: str) -> None:
        """Remove one file."""
        with self._at(path) as (directory, name):
            failpoints.hit(REMOVE_BEFORE)
            self._os.unlink(name, dir_fd=directory)
            failpoints.hit(REMOVE_AFTER)

    def drop_cache(self, path: str) -> None:
        """Ask the system to forget the file's pages."""
        with self._at(path) as (directory, name):
            descriptor = open_regular(self._os, name, directory)
            try:
                with contextlib.suppress(OSError):  # a read-only mount: nothing is dirty
                    os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                self._os.close(descriptor)

    def free_bytes(self) -> int:
        """Bytes that an unprivileged process can still write."""
        with errors_name(self._root):
            status = self._os.statvfs(self._root)
            return int(status.f_bavail * status.f_frsize)

    # -- open files

    def create(self, path: str) -> LocalFileWriter:
        """Open a new file for writing."""
        with self._at(path) as (directory, name):
            direct = self._takes_direct(directory)
            flags = _NEW | (os.O_DIRECT if direct else 0)
            descriptor = self._os.open(name, flags, 0o666, dir_fd=directory)
            try:
                failpoints.hit(CREATED)
            except BaseException:
                self._os.close(descriptor)
                raise
            return LocalFileWriter(self._os, descriptor, self._full(path), direct)

    def create_empty(self, path: str) -> bool:
        """Make an empty file, only if the name is free. No bytes are written, not to try out direct I/O either."""
        with self._at(path) as (directory, name):
            try:
                descriptor = self._os.open(name, _NEW, 0o666, dir_fd=directory)
            except FileExistsError:
                return False
            try:
                failpoints.hit(CREATED)
            finally:
                self._os.close(descriptor)
            return True

    def reader(self, path: str) -> LocalFileReader:
        """Open a file for reading."""
        with self._at(path) as (directory, name):
            return LocalFileReader(self._os, name, directory, self._full(path), self._direct_io is not False)

    # -- inside

    def _takes_direct(self, directory: int) -> bool:
        if self._direct_io is False:
            return False
        device = self._os.fstat(directory).st_dev
        if device not in self._probed:
            self._probed[device] = probe_direct(os, directory)
            if self._direct_io and not self._probed[device]:
                logger.warning("direct_io=True, but %s does not take direct writes; writing buffered", self._root)
        return self._probed[device]

    def _write_all(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._os.write(descriptor, view) :]

    @contextlib.contextmanager
    def _temporary(self, directory: int, name: str, data: bytes) -> Iterator[str]:
        """A complete, synced file beside `name`; gone at the end unless it was renamed."""
        temporary = layout.temp_file(name, secrets.token_hex(8))
        try:
            self._write_synced(directory, temporary, data)
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                self._os.unlink(temporary, dir_fd=directory)

    def _write_synced(self, directory: int, name: str, data: bytes) -> None:
        descriptor = self._os.open(name, _NEW, 0o666, dir_fd=directory)
        try:
            self._write_all(descriptor, data)
            failpoints.hit(REPLACE_WRITTEN)
            self._os.fsync(descriptor)
        finally:
            self._os.close(descriptor)

    def _link(self, directory: int, temporary: str, name: str, data: bytes) -> bool:
        try:
            self._os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except FileExistsError:
            # A network file system may have repeated a request that had succeeded: the link count tells.
            return int(self._os.stat(temporary, dir_fd=directory).st_nlink) == 2
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            return True
        try:
            # Still exclusive; only a crash in between can leave it incomplete, which every reader must expect anyway.
            self._write_synced(directory, name, data)
        except FileExistsError:
            return False
        return True

    def _remove_tree_at(self, directory: int, name: str) -> None:
        try:
            inner = self._os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            with contextlib.suppress(FileNotFoundError):
                self._os.unlink(name, dir_fd=directory)
            return
        try:
            for entry in self._os.listdir(inner):
                failpoints.hit(REMOVE_BEFORE)
                self._remove_tree_at(inner, entry)
        finally:
            self._os.close(inner)
        with contextlib.suppress(FileNotFoundError):
            self._os.rmdir(name, dir_fd=directory)
