"""What the machine may do to files in shared memory: who removes them, what they count against."""

from __future__ import annotations

import configparser
import contextlib
import os
from collections.abc import Iterable, Sequence

from easyckpt.memory.place import user_name

#: Where logind reads its settings; a later file, and within a directory a later name, wins.
LOGIND = ("/usr/lib/systemd/logind.conf", "/etc/systemd/logind.conf")
LOGIND_PARTS = ("/usr/lib/systemd/logind.conf.d", "/run/systemd/logind.conf.d", "/etc/systemd/logind.conf.d")
_LINGER = "/var/lib/systemd/linger"
_LOGIND_RUNS = "/run/systemd/seats"
_FIRST_USER = 1000  # logind leaves system users alone
_MARKS = ("/.dockerenv", "/run/.containerenv")
_GROUPS = ("kubepods", "docker", "containerd", "libpod", "lxc")


def removes_ipc() -> bool:
    """Whether logind removes this user's shared memory when the last session ends."""
    if not os.path.isdir(_LOGIND_RUNS) or os.geteuid() < _FIRST_USER:
        return False
    if os.path.exists(os.path.join(_LINGER, user_name())):
        return False
    parts = [os.path.join(place, name) for place in LOGIND_PARTS for name in _names(place) if name.endswith(".conf")]
    return remove_ipc_setting([*LOGIND, *parts])


def remove_ipc_setting(paths: Sequence[str]) -> bool:
    """RemoveIPC of these files, the last one that sets it; logind's default is yes."""
    setting = True
    for path in paths:
        parser = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True)
        with contextlib.suppress(OSError, configparser.Error, ValueError):
            with open(path, encoding="utf-8") as file:
                parser.read_file(file)
            setting = parser.getboolean("Login", "RemoveIPC", fallback=setting)
    return setting


def container() -> str | None:
    """By what it looks as if this process ran in a container whose end takes shared memory along; None: by nothing."""
    for mark in _MARKS:
        if os.path.exists(mark):
            return mark
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "KUBERNETES_SERVICE_HOST"
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
        group = file.read()
        return next((f"cgroup {name}" for name in _GROUPS if name in group), None)
    return None


def _names(directory: str) -> Iterable[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(directory))
    return ()
