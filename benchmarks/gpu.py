"""What a GPU alone can show: page-locked slots, overlap, memory, exactness. Run by gpu.sh; writes one JSON file."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import easyckpt
from benchmarks import common
from easyckpt.memory import pinned
from easyckpt.memory.slot import Slot

GIB = 1 << 30


def pinned_slots(memory: str) -> dict[str, float]:
    """Registering a slot as page-locked memory, and copying into it against torch's own pinned memory."""
    nbytes = 4 * GIB
    slot = Slot.create(os.path.join(memory, "bench.0"), nbytes, 4096)
    slot.populate(threads=8)
    seconds = common.timed(lambda: pinned.register(slot.address, nbytes))
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    ours = torch.frombuffer((ctypes.c_char * nbytes).from_address(slot.address), dtype=torch.uint8)
    plain = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def speed(target: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        copy()
        return nbytes / common.median(common.timed(copy) for _ in range(5)) / 1e9

    result = {"register_seconds_per_gib": seconds / 4, "slot_gb_per_s": speed(ours), "pinned_gb_per_s": speed(plain)}
    result["slot_against_pinned"] = result["slot_gb_per_s"] / result["pinned_gb_per_s"]
    pinned.unregister(slot.address)
    del ours
    slot.close(unlink=True)
    return result


def build(width: int, layers: int, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    stack = [nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.GELU()) for _ in range(layers)]
    model = nn.Sequential(*stack).to("cuda", dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def overlap(root: str) -> dict[str, Any]:
    """Steps of about 300 ms with 10 GB of state, snapshotted at every step, against the same without."""
    width, layers = 8192, 13  # 13 x 64 M parameters, fp32 with two states each: 10.5 GB
    model, optimizer = build(width, layers, torch.float32)
    inputs = torch.randn(4096, width, device="cuda")

    def step(repeats: int) -> None:
        for _ in range(repeats):
            model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def timed_steps(count: int, repeats: int, after: Any) -> list[float]:
        seconds = []
        for number in range(count):
            begun = time.perf_counter()
            step(repeats)
            after(number + 1)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        return seconds

    step(1)
    one = common.median(timed_steps(5, 1, lambda number: None))
    repeats = max(1, round(0.3 / one))
    none = common.median(timed_steps(15, repeats, lambda number: None)[5:])
    checkpointer = easyckpt.Checkpointer(root, {"model": model, "optimizer": optimizer}, save_storage_interval=10**9)
    checkpointer.load()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    peak_before = torch.cuda.max_memory_allocated()
    ours = common.median(timed_steps(15, repeats, checkpointer.save_if_needed)[5:])
    blocked = checkpointer.stats().blocked_recent[5:]
    result = {
        "state_bytes": checkpointer._parts.arena.sealed()[-1].image_bytes,
        "step_seconds": none,
        "against_none": ours / none,
        "blocked_median": common.median(blocked),
        "counts": checkpointer.stats().counts,
        "allocated_by_saves": torch.cuda.memory_allocated() - base,
        "peak_before": peak_before,
    }
    checkpointer.abandon()
    return result


JOB = """
import hashlib, os, signal, sys, torch, easyckpt
from benchmarks.gpu import build, digest
root, total, kill = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model, optimizer = build(512, 4, torch.bfloat16)
data = torch.Generator("cuda").manual_seed(3)
state = {"model": model, "optimizer": optimizer, "data": data}
with easyckpt.Checkpointer(root, state, save_storage_interval=10) as checkpointer:
    start = checkpointer.load()
    for step in range(start.step + 1, total + 1):
        x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16, generator=data)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        checkpointer.save_if_needed(step)
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)
    print(start.tier, start.step, digest(model, optimizer, data))
"""


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Generator) -> str:
    """Over all state and all generators."""
    total = hashlib.sha256()
    tensors = [*model.state_dict().values(), data.get_state(), torch.cuda.get_rng_state(), torch.get_rng_state()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def exactness(base: str) -> dict[str, Any]:
    """Kill -9 with the GPU busy, restored from shared memory, against an uninterrupted run."""

    def job(root: str, kill: int) -> tuple[int, list[str]]:
        command = [sys.executable, "-c", JOB, os.path.join(base, root), "40", str(kill)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError(done.stderr[-3000:])
        return done.returncode, done.stdout.split()

    _, straight = job("straight", 0)
    job("killed", 23)
    _, resumed = job("killed", 0)
    return {"resumed_from": resumed[:2], "equal_to_the_bit": straight[2] == resumed[2]}


def main() -> None:
    output = Path(sys.argv[1])
    memory = tempfile.mkdtemp(prefix="easyckpt-bench-", dir="/dev/shm")
    base = tempfile.mkdtemp(prefix="easyckpt-bench-")
    os.environ["EASYCKPT_MEMORY_DIR"] = memory
    result: dict[str, Any] = {"machine": common.machine() | {"gpu": torch.cuda.get_device_name()}}
    try:
        torch.cuda.init()
        for name, measure in (
            ("pinned_slots", lambda: pinned_slots(memory)),
            ("exactness", lambda: exactness(base)),
            ("overlap", lambda: overlap(os.path.join(base, "overlap"))),
        ):
            try:
                result[name] = measure()
            except Exception as error:  # noqa: BLE001 - one figure that fails must not hide the others
                result[name] = {"failed": f"{type(error).__name__}: {error}"}
            print(name, json.dumps(result[name]), flush=True)
    finally:
        shutil.rmtree(memory)
        shutil.rmtree(base)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
