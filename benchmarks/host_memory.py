"""How much host memory does easyckpt take beyond its slots, and does it stay flat?"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
from typing import Any

import psutil
import torch
from torch import nn

from benchmarks import common

SAVES = 200
SHAPES = {"350 MB": (42, 1024), "20,000 small tensors": (10_000, 4)}


def build(layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ParameterList(nn.Parameter(torch.randn(width, width)) for _ in range(layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer


def run(which: str, with_easyckpt: bool, root: str) -> dict[str, Any]:
    """Trains a little, with or without; prints memory, descriptors and threads along the way."""
    model, optimizer = build(*SHAPES[which])
    checkpointer: Any = None
    samples = []
    if with_easyckpt:
        import easyckpt

        state = {"model": model, "optimizer": optimizer}
        checkpointer = easyckpt.Checkpointer(root, state, save_storage_interval=20, max_ckpt_num=2)
        checkpointer.load()
    for parameter in model.parameters():  # made once: what an allocator does with fresh ones hides what is measured
        parameter.grad = torch.full_like(parameter, 1e-3)
    for step in range(1, SAVES + 1):
        optimizer.step()
        if checkpointer is not None:
            checkpointer.save_if_needed(step)
        if step % 20 == 0:
            if checkpointer is not None:
                checkpointer.wait()
            me = psutil.Process()
            samples.append({"uss": me.memory_full_info().uss, "fds": me.num_fds(), "threads": threading.active_count()})
    result: dict[str, Any] = {"samples": samples}
    if checkpointer is not None:
        memory = os.environ["EASYCKPT_MEMORY_DIR"]
        result["tmpfs"] = sum(os.stat(os.path.join(memory, name)).st_blocks * 512 for name in os.listdir(memory))
        metas = checkpointer._parts.arena.sealed()
        result |= {"image": metas[-1].image_bytes, "slots": checkpointer._parts.arena.count}
        result["tensors"] = len(checkpointer._parts.capture.capture().layout.leaves)
        checkpointer.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--which")
    parser.add_argument("--with-easyckpt", type=int)
    parser.add_argument("--root")
    arguments, _ = parser.parse_known_args()
    if arguments.which is not None:
        print(json.dumps(run(arguments.which, bool(arguments.with_easyckpt), arguments.root)))
        return
    rows, summary = [], {}
    for which in SHAPES:
        root = tempfile.mkdtemp(prefix="easyckpt-bench-")
        memory = tempfile.mkdtemp(prefix="easyckpt-bench-", dir="/dev/shm")
        os.environ["EASYCKPT_MEMORY_DIR"] = memory
        try:
            common_arguments = (f"--which={which}", f"--root={root}")
            without = common.child("benchmarks.host_memory", *common_arguments, "--with-easyckpt=0")
            ours = common.child("benchmarks.host_memory", *common_arguments, "--with-easyckpt=1")
        finally:
            del os.environ["EASYCKPT_MEMORY_DIR"]
            shutil.rmtree(root)
            shutil.rmtree(memory)
        extra = ours["samples"][-1]["uss"] - without["samples"][-1]["uss"]
        # The slots are mapped by this process alone: their pages are part of its USS already.
        beyond = max(extra, ours["tmpfs"]) - ours["slots"] * ours["image"]
        allowed = 64e6 + 2000 * ours["tensors"]
        first, last = ours["samples"][1], ours["samples"][-1]
        summary[which] = {
            "beyond_slots": beyond,
            "allowed": allowed,
            "uss_growth": last["uss"] - first["uss"],
            "fd_growth": last["fds"] - first["fds"],
            "thread_growth": last["threads"] - first["threads"],
            "runs": {"without": without, "with": ours},
        }
        rows.append(
            [
                which,
                f"{ours['slots']} x {ours['image'] / 1e6:.1f} MB",
                f"{beyond / 1e6:.1f} MB",
                f"{allowed / 1e6:.1f} MB",
                f"{(last['uss'] - first['uss']) / 1e6:+.1f} MB",
                f"{last['fds'] - first['fds']:+d} / {last['threads'] - first['threads']:+d}",
            ]
        )
    question = (
        f"{SAVES} snapshots, a flush every 20. Beyond: USS above the same program without easyckpt (the slots' tmpfs "
        "pages are in it), less slots x image. Growth: from save 40 to the last."
    )
    header = ["state", "slots", "beyond", "allowed", "growth", "descriptors / threads"]
    common.write("host_memory", question, {"summary": summary}, header, rows)


if __name__ == "__main__":
    main()
