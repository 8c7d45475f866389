"""What a place for checkpoints must be able to do: small, shaped like system calls.

Paths are relative to the storage's root, joined by ``/``; the empty path is the root itself. No implementation
follows a path out of the root: absolute paths, ``..`` and symbolic links below the root are refused with
``StorageError``. A full disk (or quota) is ``OutOfSpace`` with the system's error as its cause; any other refusal is
the plain ``OSError`` with the full path in it.

Nothing is durable before it was synced: a file's bytes by ``FileWriter.sync``, a name (created, renamed, removed) by
``sync_dir`` of its directory. Methods that sync by themselves say so.
"""

from __future__ import annotations

import mmap
from types import TracebackType
from typing import Protocol

#: Memory that can be written to a file. (collections.abc.Buffer needs Python 3.12.)
Buffer = bytes | bytearray | memoryview | mmap.mmap
#: Memory that a file can be read into.
WritableBuffer = bytearray | memoryview | mmap.mmap

#: Offsets, lengths and memory addresses that are multiples of this can go past the page cache.
ALIGNMENT = 4096


class FileWriter(Protocol):
    """A file that is being written. Calls of ``write_at`` may come from several threads.

    After any error the file is dead: every later call but ``close`` raises ``StorageError``. That matters most for
    ``sync``: after a failed fsync the kernel may have dropped the bytes, and a second fsync would report success.
    """

    alignment: int

    @property
    def direct(self) -> bool:
        """Whether writes really go past the page cache. Turns False for good at the first unaligned write."""
        ...

    def write_at(self, buffer: Buffer, offset: int) -> None:
        """Write all of `buffer`. Past the page cache where `direct` holds and offset and length are aligned.

        Memory that is not page-aligned costs a copy. The last block of a file is best written whole and then cut by
        ``truncate``.
        """
        ...

    def sync(self) -> None:
        """Make all bytes written so far, and the size, durable."""
        ...

    def truncate(self, size: int) -> None:
        """Set the exact length. Not durable before the next ``sync``."""
        ...

    def close(self) -> None:
        """Close the descriptor; does not sync. A second call does nothing."""
        ...

    def __enter__(self) -> FileWriter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class FileReader(Protocol):
    """A file that is being read. Calls of ``read_into`` may come from several threads."""

    @property
    def size(self) -> int:
        """The file's length when it was opened."""
        ...

    def read_into(self, buffer: WritableBuffer, offset: int) -> int:
        """Fill `buffer` from `offset` on; returns fewer bytes than its length only at the end of the file.

        Comes from the storage, not from the page cache, when address, length and offset are aligned and the file
        system takes it.
        """
        ...

    def close(self) -> None:
        """Close the descriptors. A second call does nothing."""
        ...

    def __enter__(self) -> FileReader: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Storage(Protocol):
    """A root directory and the calls that the engine makes on it. Safe to call from several threads."""

    @property
    def root(self) -> str:
        """The root's absolute path, as messages name it."""
        ...

    def makedirs(self, path: str) -> None:
        """Create the directory and its missing parents (the root too), durably. Existing ones are fine."""
        ...

    def listdir(self, path: str) -> list[str]:
        """Names in the directory, sorted. FileNotFoundError when it does not exist."""
        ...

    def stat_size(self, path: str) -> int:
        """Length of the regular file `path`."""
        ...

    def exists(self, path: str) -> bool:
        """Whether something has that name; a dangling link counts."""
        ...

    def read(self, path: str) -> bytes:
        """All bytes of a small file."""
        ...

    def create(self, path: str) -> FileWriter:
        """Open a new file for writing. FileExistsError when the name is taken: nothing is ever overwritten."""
        ...

    def create_empty(self, path: str) -> bool:
        """Make an empty file, which takes no space, only if the name is free; False when it is not.

        Of several callers one gets True. `sync_dir` makes it durable.
        """
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Put `data` under `path`, atomically and durably: readers and crashes see the old bytes or the new."""
        ...

    def append(self, path: str, data: bytes) -> None:
        """Append to a log, creating it when missing. Not durable. One writer a file; all or nothing on an error."""
        ...

    def rename(self, src: str, dst: str) -> None:
        """Rename, atomically. Not durable before ``sync_dir`` of both parents. A non-empty directory is in the way."""
        ...

    def exchange(self, one: str, other: str) -> bool:
        """Have two directories change names, atomically: at no moment a name is free. False: that cannot be done here.

        Not durable before ``sync_dir`` of both parents.
        """
        ...

    def sync_dir(self, path: str) -> None:
        """Make the names in this directory durable."""
        ...

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it, never following links. Not durable. A missing one is fine."""
        ...

    def remove_empty_root(self) -> None:
        """Remove the root itself, if nothing is in it. Not durable. One that is in use, or missing, is fine."""
        ...

    def remove(self, path: str) -> None:
        """Remove one file. Not durable. FileNotFoundError when it is missing."""
        ...

    def link_exclusive(self, path: str, data: bytes) -> bool:
        """Create `path` with `data`, durably, only if the name is free; False when it is not.

        Of several callers at the same moment, on any number of hosts, exactly one gets True.
        """
        ...

    def free_bytes(self) -> int:
        """Bytes that an unprivileged process can still write."""
        ...

    def reader(self, path: str) -> FileReader:
        """Open a file for reading."""
        ...

    def drop_cache(self, path: str) -> None:
        """Write the file's dirty pages out and ask the system to forget its pages, so that reads are real."""
        ...

    def truncate(self, path: str, size: int) -> None:
        """Cut an existing file, durably."""
        ...
