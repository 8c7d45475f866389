"""Two names that change places at once, which Python has no function for."""

from __future__ import annotations

import ctypes
import errno
import os

_EXCHANGE = 2
#: What kernels and file systems answer that cannot (networks', most of FUSE).
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)


def exchange_names(one: str, directory: int, other: str, other_directory: int) -> bool:
    """Exchange the name `one` in the open `directory` with `other`, atomically; False where that cannot be done."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if rename(directory, os.fsencode(one), other_directory, os.fsencode(other), ctypes.c_uint(_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), one, None, other)
