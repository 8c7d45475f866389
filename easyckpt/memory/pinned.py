"""Page-locking of host memory for the GPU: copies into pinned memory are asynchronous and several times faster."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Any

from easyckpt.errors import StorageError

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device's context
_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered


def _runtime() -> Any:
    """The CUDA runtime when this process uses CUDA, else None. Never starts CUDA by itself."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda.cudart()


def register(address: int, nbytes: int) -> bool:
    """Page-lock `nbytes` at `address` (both page-aligned). False when this process does not use CUDA.

    Takes seconds for many gigabytes: call it from a background thread; the GIL is released. Raises StorageError.
    """
    runtime = _runtime()
    if runtime is None:
        return False
    code = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
    if code == 0:
        return True
    _forget_last_error()
    if code == _ALREADY_REGISTERED:
        raise StorageError(f"cannot pin {nbytes} bytes at {address:#x}: a part of them is pinned already")
    raise StorageError(
        f"cannot pin {nbytes} bytes of host memory: {_describe(runtime, code)}. Copies from the GPU would be slow: "
        "raise the limit on locked memory (ulimit -l, docker: --ulimit memlock=-1) or leave more memory free"
    )


def unregister(address: int) -> None:
    """Undo `register`; nothing when the memory is not registered. Raises StorageError."""
    runtime = _runtime()
    if runtime is None:
        return
    code = int(runtime.cudaHostUnregister(address))
    if code == 0:
        return
    _forget_last_error()
    if code != _NOT_REGISTERED:
        raise StorageError(f"cannot unpin the memory at {address:#x}: {_describe(runtime, code)}")


def _describe(runtime: Any, code: int) -> str:
    text = f"CUDA error {code}"
    with contextlib.suppress(Exception):
        text += f" ({runtime.cudaGetErrorString(runtime.cudaError(code))})"
    return text


def _forget_last_error() -> None:
    """The runtime keeps a failed call as its "last error", and the next kernel launch of torch would raise it."""
    with contextlib.suppress(OSError, AttributeError):
        _loaded_runtime().cudaGetLastError()


def _loaded_runtime() -> ctypes.CDLL:
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")
            if "libcudart" in path[2]:
                return ctypes.CDLL("/" + path[2])
    raise OSError("no CUDA runtime is loaded")
