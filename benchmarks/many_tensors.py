"""20,000 tensors of 64 bytes: what do small tensors cost?"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import easyckpt
from benchmarks import common

COUNT, ROUNDS = 20_000, 5


def model() -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(COUNT))


def measure(root: str) -> dict[str, dict[str, float]]:
    """One round of all."""
    net = model()
    tensors = {name: value.detach() for name, value in net.state_dict().items()}
    figures: dict[str, dict[str, float]] = {}

    path = os.path.join(root, "one.safetensors")
    figures["safetensors"] = {
        "save": common.timed(lambda: save_file(tensors, path)),
        "load": common.timed(lambda: net.load_state_dict(load_file(path))),
    }
    path = os.path.join(root, "one.pt")
    figures["torch.save"] = {
        "save": common.timed(lambda: torch.save(tensors, path)),
        "load": common.timed(lambda: net.load_state_dict(torch.load(path, weights_only=True))),
    }
    path = os.path.join(root, "dcp")
    figures["DCP"] = {
        "save": common.timed(lambda: dcp.save({"model": tensors}, checkpoint_id=path, no_dist=True)),
        "load": common.timed(lambda: dcp.load({"model": tensors}, checkpoint_id=path, no_dist=True)),
    }
    figures["easyckpt"] = ours(net, os.path.join(root, "easyckpt"))
    return figures


def ours(net: nn.Module, root: str) -> dict[str, float]:
    """What a job pays; "load" is from storage, with nothing planned before.

    The first save plans; "save" is the median of those after it, durable; "blocked" is what memory snapshots hold.
    """
    with easyckpt.Checkpointer(root, {"model": net}, save_storage_interval=10**9) as checkpointer:
        checkpointer.load()
        first = common.timed(lambda: checkpointer.save(1, wait=True))
        saves = [common.timed(lambda step=step: checkpointer.save(step, wait=True)) for step in range(2, 5)]
        blocked = []
        for step in range(5, 25):
            checkpointer.save_if_needed(step)
            blocked.append(checkpointer.stats().blocked_recent[-1])
        from_memory = common.timed(checkpointer.load)
    load = common.timed(lambda: easyckpt.restore(root, {"model": net}))
    return {
        "save": common.median(saves),
        "load": load,
        "load from memory": from_memory,
        "first save": first,
        "blocked": common.median(blocked),
    }


def main() -> None:
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(ROUNDS):
        root = tempfile.mkdtemp(prefix="easyckpt-bench-")
        try:
            rounds.append(measure(root))
        finally:
            shutil.rmtree(root)
    summary: dict[str, dict[str, Any]] = {}
    rows = []
    for name in rounds[0]:
        summary[name] = {key: common.median(one[name][key] for one in rounds) for key in rounds[0][name]}
        for key in ("save", "load"):
            summary[name][f"{key} against DCP"] = common.median(one[name][key] / one["DCP"][key] for one in rounds)
            of_safetensors = common.median(one[name][key] / one["safetensors"][key] for one in rounds)
            summary[name][f"{key} against safetensors"] = of_safetensors
        figures = summary[name]
        rows.append(
            [
                name,
                common.milliseconds(figures["save"]),
                f"{figures['save against DCP']:.3f} / {figures['save against safetensors']:.2f}",
                common.milliseconds(figures["load"]),
                f"{figures['load against DCP']:.3f} / {figures['load against safetensors']:.2f}",
                common.milliseconds(figures["blocked"]) if "blocked" in figures else "-",
            ]
        )
    question = (
        f"{COUNT} tensors of 64 bytes, medians of {ROUNDS} rounds; ratios against DCP / safetensors. easyckpt's save "
        f"is the durable one (fsync, checksums, commit) after the first, which plans and takes "
        f"{common.milliseconds(summary['easyckpt']['first save'])}; its load is from storage, verifies every byte and "
        f"plans anew (from memory: {common.milliseconds(summary['easyckpt']['load from memory'])})."
    )
    header = ["", "save", "ratios", "load", "ratios", "blocked a memory save"]
    common.write("many_tensors", question, {"summary": summary}, header, rows)


if __name__ == "__main__":
    main()
