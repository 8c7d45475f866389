"""Memory mappings that live exactly as long as something looks into them.

The standard library's `mmap` keeps a descriptor for each mapping, refuses to close while a view exists, and cannot
populate without holding the GIL. A `Mapping` keeps no descriptor; it is unmapped when it was closed *and* the last
view of it is gone, so a late reader can neither crash nor block a close. Mappings are not inherited by forked
children (MADV_DONTFORK): an orphaned loader worker keeps no snapshot alive.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import logging
import mmap
import os
import weakref
from collections.abc import Callable

from easyckpt.errors import OutOfSpace, UsageError

PAGE = 4096
_log = logging.getLogger("easyckpt")
#: The kernel holds the lock of the address space for one piece: who allocates much memory meanwhile waits for it.
_POPULATE_PIECE = 8 << 20
_FALLBACK_PIECE = 1 << 20  # pages touched by Python hold the GIL: keep it short

_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap64 if hasattr(_libc, "mmap64") else _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def round_up(nbytes: int) -> int:
    """The number of bytes of the whole pages that `nbytes` need."""
    return -(-nbytes // PAGE) * PAGE


class Mapping:
    """`nbytes` of memory at `address`: a part of a file (shared), or private memory when `fd` is None."""

    def __init__(self, fd: int | None, offset: int, nbytes: int, *, writable: bool = True) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED if fd is not None else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _mmap(None, nbytes, protection, flags, -1 if fd is None else fd, offset)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            if number == errno.ENOMEM:
                raise OutOfSpace(f"cannot map {nbytes} bytes of memory: {os.strerror(number)}")
            raise OSError(number, os.strerror(number), f"mapping {nbytes} bytes")
        _libc.madvise(address, nbytes, _MADV_DONTFORK)
        self.address: int = address
        self.nbytes = nbytes
        self.writable = writable
        self.shared = fd is not None
        self._before_unmap: list[Callable[[], None]] = []
        self._array: ctypes.Array[ctypes.c_ubyte] | None = (ctypes.c_ubyte * nbytes).from_address(address)
        # Every memoryview (and its slices, arrays and tensors) keeps the array alive; it dies with the last of them.
        finalizer = weakref.finalize(self._array, _unmap, os.getpid(), address, nbytes, self._before_unmap)
        finalizer.atexit = False  # handlers that drain at exit may still read; the kernel unmaps in the end

    def view(self) -> memoryview:
        """All bytes as a memoryview; read-only when the mapping is."""
        if self._array is None:
            raise UsageError("this memory is closed")
        view = memoryview(self._array).cast("B")
        return view if self.writable else view.toreadonly()

    def before_unmap(self, call: Callable[[], None]) -> None:
        """Have `call` run just before the memory is unmapped (unpinning)."""
        self._before_unmap.append(call)

    def close(self) -> None:
        """Unmap as soon as no view is left; at once when there is none. May be called again."""
        self._array = None

    def populate(self, *, threads: int = 1, stop: Callable[[], bool] = lambda: False) -> None:
        """Have every page present and mapped, so that a copy meets no page fault. The GIL is released meanwhile.

        Contents stay, also those that somebody writes into a shared mapping meanwhile; a private one must not be in use
        yet. `stop` is asked between pieces. Raises OutOfSpace.
        """
        keep_alive = self.view()
        pieces = range(0, self.nbytes, _POPULATE_PIECE)

        def touch(start: int) -> None:
            if not stop():
                self._touch(start, min(_POPULATE_PIECE, self.nbytes - start), keep_alive)

        if threads <= 1 or len(pieces) == 1:
            for start in pieces:
                touch(start)
            return
        with concurrent.futures.ThreadPoolExecutor(threads, "easyckpt-populate") as pool:
            list(pool.map(touch, pieces))

    def _touch(self, start: int, nbytes: int, view: memoryview) -> None:
        if _libc.madvise(self.address + start, nbytes, _MADV_POPULATE_WRITE) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):
            raise OutOfSpace(f"no memory behind {nbytes} bytes of a snapshot slot: {os.strerror(number)}")
        for at in range(start, start + nbytes, _FALLBACK_PIECE):  # a kernel before 5.14
            pages = slice(at, min(at + _FALLBACK_PIECE, start + nbytes), PAGE)
            present = bytes(view[pages])
            if not self.shared:  # reading private memory maps the page of zeros
                view[pages] = present


def _unmap(pid: int, address: int, nbytes: int, before: list[Callable[[], None]]) -> None:
    if os.getpid() != pid:
        return  # a forked child has no such mapping: something else may lie there by now
    for call in before:
        try:
            call()
        except Exception:  # noqa: BLE001  (a finalizer has no caller to raise to)
            _log.exception("giving back %d bytes of memory", nbytes)
    _libc.munmap(address, nbytes)
