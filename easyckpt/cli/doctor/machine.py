"""Checks of what is neither memory nor storage: GPUs, versions, threads, how fast names are looked up."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import socket
import time
from collections.abc import Iterator

import torch

from easyckpt.cli import output
from easyckpt.cli.doctor.finding import Finding
from easyckpt.version import VERSION

AREA = "machine"
#: Beyond the caches, and no more than that: it is there twice.
_COPY_BYTES = 64 << 20
_OLDEST_TORCH, _OLDEST_PYTHON, _NEWEST_PYTHON = (2, 6), (3, 10), (3, 13)
_SLOW_LOOKUP_SECONDS = 1.0


def findings() -> Iterator[Finding]:
    """Of this machine and the environment that doctor runs in."""
    yield _versions()
    yield _threads()
    yield _copying()
    yield from _gpus()
    yield _lookup()


def _versions() -> Finding:
    ours = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    python = tuple(map(int, platform.python_version_tuple()[:2]))
    known = ours >= _OLDEST_TORCH and _OLDEST_PYTHON <= python <= _NEWEST_PYTHON
    return Finding(
        AREA, "versions", f"easyckpt {VERSION}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}", "ok" if known else "warning", "exact",
        "supported" if known else "not what easyckpt is made for: torch 2.6 and newer, Python 3.10 to 3.13",
        "" if known else "prove your job with `easyckpt audit`",
    )  # fmt: skip


def _threads() -> Finding:
    cpus, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    asked = os.environ.get("OMP_NUM_THREADS", "not set")
    many = threads > cpus
    return Finding(
        AREA, "threads", f"{threads} of torch on {cpus} CPU(s); OMP_NUM_THREADS {asked}",
        "warning" if many else "ok", "pace",
        "steps are slow by themselves, and snapshots with them" if many else "of one rank; each rank has as many",
        f"OMP_NUM_THREADS={cpus} divided by the ranks of this machine" if many else "",
    )  # fmt: skip


def _copying() -> Finding:
    target, source = (ctypes.c_char.from_buffer(mmap.mmap(-1, _COPY_BYTES)) for _ in range(2))
    seconds = []
    for _ in range(3):  # the first one also makes the pages
        begun = time.perf_counter()
        ctypes.memmove(ctypes.addressof(target), ctypes.addressof(source), _COPY_BYTES)
        seconds.append(time.perf_counter() - begun)
    rate = int(_COPY_BYTES / min(seconds))
    return Finding(
        AREA, "memory copy", f"{output.size(rate)}/s by one thread", "ok", "pace",
        "how fast a snapshot of the CPU is taken",
    )  # fmt: skip


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(AREA, "GPUs", "none", "ok", "pace", "snapshots are copied on the CPU")
        return
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        yield Finding(
            AREA, f"GPU {number}", f"{found.name}, {output.size(found.total_memory)}", "ok", "pace",
            "snapshots are copied out of it beside training",
        )  # fmt: skip
    try:
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
        problem = ""
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
    yield Finding(
        AREA, "pinned memory", problem or "can be had", "warning" if problem else "ok", "pace",
        "copies from a GPU are slow and hold training up" if problem else "copies from a GPU run beside training",
        "raise the limit on locked memory (ulimit -l unlimited; docker: --ulimit memlock=-1)" if problem else "",
    )  # fmt: skip


def _lookup() -> Finding:
    begun = time.perf_counter()
    for name in ("localhost", socket.gethostname()):
        try:
            for *_, address in socket.getaddrinfo(name, 0, proto=socket.IPPROTO_TCP):
                socket.getnameinfo(address, 0)
        except OSError:
            continue
    seconds = time.perf_counter() - begun
    slow = seconds > _SLOW_LOOKUP_SECONDS
    return Finding(
        AREA, "looking up names", f"{seconds:.2f} s for localhost and this host, and back",
        "warning" if slow else "ok", "pace",
        "torch's store, and so the start of a group, waits for it" if slow else "groups start without waiting for it",
        'RES_OPTIONS="timeout:1 attempts:1", or this host in /etc/hosts' if slow else "",
    )  # fmt: skip
