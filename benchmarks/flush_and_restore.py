"""How close are flush and restore to what disk and memory can do?

2 GB of state, idle trainer. "By hand" is the same bytes, fsyncs and rename with O_DIRECT and no checksums, out of the
same memory. Reads drop the files' page cache first. Memory restore is compared with a memcpy out of a freshly mapped
segment. All of it takes turns within one process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import easyckpt
from benchmarks import common
from easyckpt.loading.reader import open_storage
from easyckpt.saving.worker import Worker
from easyckpt.storage.local import LocalStorage

GIGABYTES, ROUNDS = 2, 8
PIECE = 16 << 20


def build() -> nn.ParameterList:
    count, size = 64, (GIGABYTES << 30) // 64 // 4
    return nn.ParameterList(nn.Parameter(torch.randn(size)) for _ in range(count))


def by_hand(root: str, image: mmap.mmap) -> None:
    """The writes of one checkpoint: data file, two small files, directory, rename, parent."""
    temporary, final = os.path.join(root, "by-hand.tmp"), os.path.join(root, "by-hand")
    os.mkdir(temporary)
    fd = os.open(os.path.join(temporary, "data"), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    view = memoryview(image)
    for offset in range(0, len(image), PIECE):
        os.pwrite(fd, view[offset : offset + PIECE], offset)
    os.fsync(fd)
    os.close(fd)
    for name in ("index", "manifest"):
        fd = os.open(os.path.join(temporary, name), os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"x" * 20_000)
        os.fsync(fd)
        os.close(fd)
    _sync_directory(temporary)
    os.rename(temporary, final)
    _sync_directory(root)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def raw_read(path: str, image: mmap.mmap) -> None:
    """The plain read of a file into memory that is there already."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    view = memoryview(image)
    offset = 0
    while offset < os.fstat(fd).st_size:
        offset += os.preadv(fd, [view[offset : offset + PIECE]], offset)
    os.close(fd)


def drop_cache(path: str) -> None:
    """Take a file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def warm(nbytes: int) -> mmap.mmap:
    """Private memory, touched."""
    memory = mmap.mmap(-1, nbytes)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, nbytes)
    return memory


def freshly_mapped_copy(path: str, model: nn.ParameterList) -> float:
    """Memcpy out of a new mapping of a shared-memory file into the parameters, one after the other."""
    fd = os.open(path, os.O_RDWR)

    def copy() -> None:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        view = ctypes.c_char.from_buffer(memory)
        address, offset = ctypes.addressof(view), 0
        for parameter in model:
            nbytes = parameter.numel() * 4
            ctypes.memmove(parameter.data_ptr(), address + offset, nbytes)
            offset += nbytes
        del view

    seconds = common.timed(copy)
    os.close(fd)
    return seconds


def storage_round(
    root: str, checkpointer: Any, model: nn.ParameterList, step: int, scratch: mmap.mmap
) -> dict[str, float]:
    """One turn of writing and reading. Who comes first changes from round to round."""
    figures: dict[str, float] = {}

    def write_by_hand() -> None:
        figures["by hand"] = common.timed(lambda: by_hand(root, scratch))
        shutil.rmtree(os.path.join(root, "by-hand"))

    def flush() -> None:
        figures["flush"] = checkpointer_flush(checkpointer, step)

    in_turn(step, write_by_hand, flush)
    directory = f"step-{step:08d}"
    shard = os.path.join(root, directory, "rank-00000.safetensors")
    worker = Worker("bench-hash")
    storage = LocalStorage(root)
    snapshots = []

    def read_raw() -> None:
        drop_cache(shard)
        figures["raw read"] = common.timed(lambda: raw_read(shard, scratch))

    def read() -> None:
        view = memoryview(scratch)
        snapshots.append(open_storage(storage, directory, rank=0, world_size=1, image=view, submit=worker.submit))

    def read_verified() -> None:
        drop_cache(shard)
        figures["read + verify"] = common.timed(read)

    read_raw()  # the disk's own cache: whoever came first would pay for the second
    in_turn(step, read_raw, read_verified)
    read()  # the raw read may have come last, and knows nothing of headers
    worker.stop(None)
    snapshot = snapshots[-1]

    def apply_verified() -> None:
        figures["apply"] = common.timed(lambda: apply(snapshot, model))

    def copy() -> None:
        figures["memcpy"] = common.timed(lambda: memcpy(scratch, model))

    in_turn(step, apply_verified, copy)
    return figures


def in_turn(number: int, *actions: Callable[[], None]) -> None:
    """Run two actions, in an order that changes with `number`."""
    for action in actions if number % 2 else reversed(actions):
        action()


def checkpointer_flush(checkpointer: Any, step: int) -> float:
    """From the sealed snapshot to the durable checkpoint, as the event says it."""
    checkpointer.save(step, wait=True)
    seconds: float = checkpointer.flush_seconds[-1]
    return seconds


def apply(snapshot: Any, model: nn.ParameterList) -> None:
    """What a load does with verified bytes."""
    from easyckpt.state.apply import apply_all
    from easyckpt.state.capture import StateCapture

    live = StateCapture({"model": model}).components
    layout = snapshot.layout
    apply_all(live, layout, layout.trees, snapshot.objects, snapshot.leaf, components={"model"})


def memcpy(memory: mmap.mmap, model: nn.ParameterList) -> None:
    """The same bytes by plain memmove."""
    view = ctypes.c_char.from_buffer(memory)
    address, offset = ctypes.addressof(view), 0
    for parameter in model:
        nbytes = parameter.numel() * 4
        ctypes.memmove(parameter.data_ptr(), address + offset, nbytes)
        offset += nbytes


class Watching(easyckpt.Checkpointer):
    """Keeps the seconds of each flush."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.flush_seconds: list[float] = []
        emit = self._events.emit

        def watch(event: Any) -> None:
            if type(event).__name__ == "FlushCommitted":
                self.flush_seconds.append(event.seconds)
            emit(event)

        thread = self._parts.coordinator._thread
        thread._parts = dataclasses.replace(thread._parts, emit=watch)


def memory_round(root: str, model: nn.ParameterList, directory: str, number: int) -> dict[str, float]:
    """A job that left with an exception, and one that goes on from its memory."""
    job = easyckpt.Checkpointer(root, {"model": model}, save_storage_interval=10**9, slots=2)
    job.load()
    job.save_if_needed(10**6)
    job.wait()
    job.abandon()
    (slot,) = [os.path.join(directory, name) for name in os.listdir(directory) if name.endswith(".0")]
    figures: dict[str, float] = {}

    def copy() -> None:
        figures["memcpy of a fresh mapping"] = freshly_mapped_copy(slot, model)

    def restore() -> None:
        again = easyckpt.Checkpointer(root, {"model": model}, save_storage_interval=10**9, slots=2)
        figures["restore from memory"] = common.timed(again.load)
        again.abandon()

    in_turn(number, copy, restore)
    for name in os.listdir(directory):
        os.unlink(os.path.join(directory, name))
    return figures


def summarise(rounds: list[dict[str, float]], pairs: dict[str, str]) -> dict[str, dict[str, float]]:
    """Median seconds, and the median of the ratios within rounds."""
    summary = {}
    for name, base in pairs.items():
        summary[name] = {
            "seconds": common.median(one[name] for one in rounds),
            "base_seconds": common.median(one[base] for one in rounds),
            "speed_against_base": common.median(one[base] / one[name] for one in rounds),
        }
    return summary


def main() -> None:
    model = build()
    nbytes = sum(parameter.numel() * 4 for parameter in model)
    scratch = warm(nbytes + (1 << 20))
    storage_rounds, memory_rounds = [], []
    root = tempfile.mkdtemp(prefix="easyckpt-bench-", dir=os.environ.get("EASYCKPT_BENCH_DIR"))
    try:
        with Watching(root, {"model": model}, save_storage_interval=10**9, max_ckpt_num=1, slots=2) as checkpointer:
            checkpointer.load()
            checkpointer.save(1, wait=True)
            for step in range(2, 2 + ROUNDS):
                storage_rounds.append(storage_round(root, checkpointer, model, step, scratch))
    finally:
        shutil.rmtree(root)
    memory = tempfile.mkdtemp(prefix="easyckpt-bench-", dir="/dev/shm")
    os.environ["EASYCKPT_MEMORY_DIR"] = memory
    try:
        for number in range(ROUNDS):
            root = tempfile.mkdtemp(prefix="easyckpt-bench-", dir=os.environ.get("EASYCKPT_BENCH_DIR"))
            memory_rounds.append(memory_round(root, model, memory, number))
            shutil.rmtree(root)
    finally:
        shutil.rmtree(memory)
    pairs = {"flush": "by hand", "read + verify": "raw read", "apply": "memcpy"}
    summary = summarise(storage_rounds, pairs)
    summary |= summarise(memory_rounds, {"restore from memory": "memcpy of a fresh mapping"})
    pairs["restore from memory"] = "memcpy of a fresh mapping"
    rows = [
        [
            name,
            f"{figures['seconds']:.2f} s, {nbytes / figures['seconds'] / 1e9:.2f} GB/s",
            f"{pairs[name]}: {figures['base_seconds']:.2f} s",
            f"{figures['speed_against_base']:.2f}x",
        ]
        for name, figures in summary.items()
    ]
    question = f"{nbytes / 1e9:.2f} GB of state, idle trainer, medians of {ROUNDS} rounds; ratios within a round."
    common.write("flush_and_restore", question, {"summary": summary}, ["", "easyckpt", "the limit", "speed"], rows)


if __name__ == "__main__":
    main()
