"""Where the memory tier lives on this machine, and whose it is."""

from __future__ import annotations

import os
import pwd
import tempfile

DEFAULT_DIRECTORY = "/dev/shm"  # noqa: S108 - files in it are 0600, checked for their owner, and opened without links


def memory_directory(wanted: str | None) -> tuple[str, bool]:
    """The directory for arenas (`wanted`, or the default), and whether its files live in memory.

    Where it cannot be used, a directory for the owner's lock alone: snapshots then go to private memory.
    """
    directory = os.path.abspath(wanted or DEFAULT_DIRECTORY)  # the program may change its working directory
    if os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK):
        return directory, True
    return tempfile.gettempdir(), False


def user_name() -> str:
    """The user in the arenas' names: by the kernel's number, not by $USER.

    Two jobs of one user whose environments differ would each lock an owner file of its own, and share the slots.
    """
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user without a name
        return str(os.geteuid())
