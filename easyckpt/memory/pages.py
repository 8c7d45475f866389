"""Pages of mapped files, let go of as soon as they were read: a large file then never fills the process's memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

_MADV_DONTNEED = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedFile:
    """Where this process has the file at `path` mapped at this moment."""

    def __init__(self, path: str) -> None:
        self._ranges: list[range] = []
        wanted = os.fsencode(os.path.realpath(path))
        with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as file:
            for line in file:
                fields = line.rstrip(b"\n").split(None, 5)
                if len(fields) == 6 and fields[5] == wanted:
                    begin, end = fields[0].split(b"-")
                    self._ranges.append(range(int(begin, 16), int(end, 16)))

    def forget(self, address: int, nbytes: int) -> None:
        """Let go of the pages of these bytes; they come from the file again when they are read again.

        Does nothing for memory that is not the file's, which would be lost.
        """
        for mapped in self._ranges:
            begin = max(address // mmap.PAGESIZE * mmap.PAGESIZE, mapped.start)
            end = min(-(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE, mapped.stop)
            if begin < end:
                _libc.madvise(begin, end - begin, _MADV_DONTNEED)
