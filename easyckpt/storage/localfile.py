"""Open files of ``LocalStorage``: writing and reading past the page cache where the file system really does that.

All system calls go through a module handed in (normally ``os``), so that a test can record what is really called.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from types import ModuleType, TracebackType

from easyckpt import failpoints
from easyckpt.errors import OutOfSpace, StorageError
from easyckpt.format import layout
from easyckpt.storage.base import ALIGNMENT, Buffer, WritableBuffer

WRITE_BEFORE = failpoints.declare("storage.write.before", "a file is open, the next piece of it is not yet written")
WRITE_AFTER = failpoints.declare("storage.write.after", "a piece of a file is written, nothing of it is synced")
SYNC_BEFORE = failpoints.declare("storage.sync.before", "a file is written, its fsync has not begun")
SYNC_AFTER = failpoints.declare("storage.sync.after", "a file's bytes are durable, perhaps not its name")

#: One system call writes at most this much, so that a process can die, or be stopped, within a large buffer.
PIECE_BYTES = 16 << 20
_O_DIRECT = getattr(os, "O_DIRECT", 0)


@contextlib.contextmanager
def errors_name(path: str) -> Iterator[None]:
    """Turn a full disk into OutOfSpace and make every other OSError carry the full path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(
                f"no space left for {path} ({error.strerror}). Free space or raise the quota; "
                "a lower max_ckpt_num keeps fewer checkpoints."
            ) from error
        if error.errno is None or error.filename == path:
            raise
        raise OSError(error.errno, error.strerror, path) from error


def is_aligned(view: memoryview, offset: int) -> bool:
    """Whether offset and length allow direct I/O; the memory's address is for the kernel to judge."""
    return offset % ALIGNMENT == 0 and view.nbytes % ALIGNMENT == 0


def probe_direct(system: ModuleType, directory: int) -> bool:
    """Find out in this very directory whether O_DIRECT writes work and leave nothing in the page cache.

    The open alone proves nothing: some file systems refuse only the write, others take it and buffer it all the same.
    """
    if not _O_DIRECT:
        return False
    name = layout.temp_file("probe", secrets.token_hex(8))
    block = mmap.mmap(-1, ALIGNMENT)
    descriptor = None
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = system.open(name, flags | _O_DIRECT, 0o600, dir_fd=directory)
        return system.pwrite(descriptor, block, 0) == ALIGNMENT and not _is_cached(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
            raise
        return False
    finally:
        if descriptor is not None:
            system.close(descriptor)
        with contextlib.suppress(OSError):
            system.unlink(name, dir_fd=directory)
        block.close()


def _is_cached(descriptor: int) -> bool:
    """Whether the file's first block lies in the page cache; False where that cannot be asked."""
    library = ctypes.CDLL(None)
    resident = ctypes.c_ubyte(0)
    with mmap.mmap(descriptor, ALIGNMENT) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = library.mincore(address, ctypes.c_size_t(ALIGNMENT), ctypes.byref(resident))
        del first, address  # the mapping cannot be closed while something points into it
    return not failed and bool(resident.value & 1)


class LocalFileWriter:
    """``FileWriter`` on one descriptor, whose O_DIRECT flag is dropped at the first write that does not fit it."""

    alignment = ALIGNMENT

    def __init__(self, system: ModuleType, descriptor: int, path: str, direct: bool) -> None:
        self._os = system
        self._descriptor: int | None = descriptor
        self._path = path
        self._direct = direct
        self._failure: BaseException | None = None
        self._bounce: mmap.mmap | None = None
        self._bounce_lock = threading.Lock()

    @property
    def direct(self) -> bool:
        """Whether writes really go past the page cache."""
        return self._direct

    def write_at(self, buffer: Buffer, offset: int) -> None:
        """Write all of `buffer` at `offset`."""
        view = memoryview(buffer)
        if view.nbytes == 0:
            return
        view = view.cast("B")
        with self._fatal_errors() as descriptor:
            for start in range(0, view.nbytes, PIECE_BYTES):
                failpoints.hit(WRITE_BEFORE)
                self._write_piece(descriptor, view[start : start + PIECE_BYTES], offset + start)
                failpoints.hit(WRITE_AFTER)

    def sync(self) -> None:
        """Fsync."""
        with self._fatal_errors() as descriptor:
            failpoints.hit(SYNC_BEFORE)
            self._os.fsync(descriptor)
            failpoints.hit(SYNC_AFTER)

    def truncate(self, size: int) -> None:
        """Set the exact length."""
        with self._fatal_errors() as descriptor:
            self._os.ftruncate(descriptor, size)

    def close(self) -> None:
        """Close the descriptor."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with errors_name(self._path):
                self._os.close(descriptor)
        if self._bounce is not None:
            self._bounce.close()
            self._bounce = None

    def __enter__(self) -> LocalFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(OSError, OutOfSpace):  # the first error is the one to see
            self.close()

    @contextlib.contextmanager
    def _fatal_errors(self) -> Iterator[int]:
        if self._failure is not None:
            raise StorageError(
                f"{self._path} cannot be used any more after an earlier error ({self._failure}): "
                "what reached the storage is unknown. Write a new file."
            ) from self._failure
        if self._descriptor is None:
            raise ValueError(f"{self._path} is closed")
        try:
            with errors_name(self._path):
                yield self._descriptor
        except BaseException as error:
            self._failure = error
            raise

    def _write_piece(self, descriptor: int, view: memoryview, offset: int) -> None:
        while view.nbytes:
            written = self._write_some(descriptor, view, offset)
            if written <= 0:
                raise OSError(errno.EIO, "the file system wrote nothing", self._path)
            view = view[written:]
            offset += written

    def _write_some(self, descriptor: int, view: memoryview, offset: int) -> int:
        if self._direct and is_aligned(view, offset):
            for write in (self._os.pwrite, self._write_bounced):
                try:
                    return int(write(descriptor, view, offset))
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
        if self._direct:
            self._direct = False
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_O_DIRECT)
        return int(self._os.pwrite(descriptor, view, offset))

    def _write_bounced(self, descriptor: int, view: memoryview, offset: int) -> int:
        """Copy to aligned memory first: the kernel did not like the address."""
        with self._bounce_lock:
            if self._bounce is None:
                self._bounce = mmap.mmap(-1, PIECE_BYTES)
            self._bounce[: view.nbytes] = view
            with memoryview(self._bounce) as whole, whole[: view.nbytes] as part:
                return int(self._os.pwrite(descriptor, part, offset))


class LocalFileReader:
    """``FileReader`` with a second descriptor for reads past the page cache."""

    def __init__(self, system: ModuleType, name: str, directory: int, path: str, direct: bool) -> None:
        self._os = system
        self._path = path
        self._plain: int | None = open_regular(system, name, directory)
        self._direct: int | None = None
        self._size = int(system.fstat(self._plain).st_size)
        if direct and _O_DIRECT:
            with contextlib.suppress(OSError, StorageError):
                self._direct = open_regular(system, name, directory, _O_DIRECT)

    @property
    def size(self) -> int:
        """The file's length when it was opened."""
        return self._size

    def read_into(self, buffer: WritableBuffer, offset: int) -> int:
        """Fill `buffer` from `offset` on."""
        if self._plain is None:
            raise ValueError(f"{self._path} is closed")
        view = memoryview(buffer)
        if view.nbytes == 0:
            return 0
        view = view.cast("B")
        total = 0
        with errors_name(self._path):
            while total < view.nbytes:
                count = self._read_some(self._plain, view[total:], offset + total)
                if count == 0:
                    break
                total += count
        return total

    def _read_some(self, plain: int, view: memoryview, offset: int) -> int:
        view = view[:PIECE_BYTES]
        if self._direct is not None and is_aligned(view, offset):
            try:
                return int(self._os.preadv(self._direct, [view], offset))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return int(self._os.preadv(plain, [view], offset))

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self._plain, self._direct):
            if descriptor is not None:
                self._os.close(descriptor)
        self._plain = self._direct = None

    def __enter__(self) -> LocalFileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_regular(system: ModuleType, name: str, directory: int, flags: int = 0) -> int:
    """Open an existing regular file; a link, a pipe or a device in its place is refused instead of waited for."""
    try:
        descriptor = int(system.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags, dir_fd=directory))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StorageError(f"{name} is a symbolic link; links below the root are not followed") from error
        raise
    mode = system.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    system.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    raise StorageError(f"{name} is not a regular file")
