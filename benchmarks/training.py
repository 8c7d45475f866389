"""How much slower does training get, and how long is it blocked at a save?

A model with 30 million parameters and AdamW (about 350 MB of state), steps of about a second on two cores. easyckpt
snapshots at every step and flushes every fifth; all others save every fifth. "memmove" is the floor for anything that
copies at every step: the same training beside a thread that copies the same bytes once a step and does nothing else.
Each run is a fresh process; the variants take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import tempfile
import threading
import time
from typing import Any

import torch
from torch import nn

from benchmarks import common

VARIANTS = ("none", "memmove", "easyckpt", "torch.save + replace", "DCP save", "DCP async_save")
STEPS, WARM_UP, EVERY, ROUNDS = 20, 5, 5, 3
WIDTH, LAYERS, CALIBRATION_BATCH = 1024, 28, 256


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS))
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


class Memmove:
    """Copies as many bytes as the state has, once a step, on a thread of its own."""

    def __init__(self, nbytes: int) -> None:
        self._source = torch.ones(nbytes, dtype=torch.uint8)
        self._target = torch.zeros(nbytes, dtype=torch.uint8)
        self._go = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self._source.numel())

    def save(self, step: int) -> float:
        del step
        return common.timed(self._go.release)

    def close(self) -> None:
        """Nothing."""


class Easyckpt:
    def __init__(self, root: str, state: dict[str, Any]) -> None:
        import easyckpt

        self.first = {"constructor": common.timed(lambda: self._make(easyckpt, root, state))}
        self.first["load"] = common.timed(self.checkpointer.load)

    def _make(self, easyckpt: Any, root: str, state: dict[str, Any]) -> None:
        self.checkpointer = easyckpt.Checkpointer(root, state, save_storage_interval=EVERY)

    def save(self, step: int) -> float:
        self.checkpointer.save_if_needed(step)
        blocked: float = self.checkpointer.stats().blocked_recent[-1]
        return blocked

    def close(self) -> None:
        self.counts = self.checkpointer.stats().counts
        self.checkpointer.close()


class Peer:
    """Saves every fifth step; the time of the call is what it blocks."""

    def __init__(self, variant: str, root: str, state: dict[str, Any]) -> None:
        self._variant, self._root, self._state, self._pending = variant, root, state, None

    def save(self, step: int) -> float:
        return common.timed(lambda: self._save(step)) if step % EVERY == 0 else 0.0

    def _save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        path = os.path.join(self._root, f"step-{step}")
        values = {name: item.state_dict() for name, item in self._state.items()}
        if self._variant == "torch.save + replace":
            torch.save(values, path + ".tmp")
            os.replace(path + ".tmp", path)
        elif self._variant == "DCP save":
            dcp.save(values, checkpoint_id=path, no_dist=True)
        else:
            if self._pending is not None:
                self._pending.result()
            self._pending = dcp.async_save(values, checkpoint_id=path, no_dist=True)

    def close(self) -> None:
        if self._pending is not None:
            self._pending.result()


def run(variant: str, root: str, batch: int) -> dict[str, Any]:
    """One run; prints its figures as JSON."""
    model, optimizer = build()
    state = {"model": model, "optimizer": optimizer}
    inputs = torch.randn(batch, WIDTH)
    nbytes = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    saver: Any = None
    if variant == "memmove":
        saver = Memmove(nbytes)
    elif variant == "easyckpt":
        saver = Easyckpt(root, state)
    elif variant != "none":
        saver = Peer(variant, root, state)
    steps, blocked = [], []
    for step in range(1, STEPS + 1):
        begun = time.perf_counter()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        held = saver.save(step) if saver is not None else 0.0
        steps.append(time.perf_counter() - begun)
        if variant == "easyckpt" or step % EVERY == 0:
            blocked.append(held)
    if saver is not None:
        saver.close()
    result = {"steps": steps, "blocked": blocked, "state_bytes": nbytes}
    if variant == "easyckpt":
        result |= {"first": saver.first, "counts": saver.counts}
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant")
    parser.add_argument("--root")
    parser.add_argument("--batch", type=int, default=CALIBRATION_BATCH)
    arguments, _ = parser.parse_known_args()
    if arguments.variant is not None:
        print(json.dumps(run(arguments.variant, arguments.root, arguments.batch)))
        return
    calibration = common.child("benchmarks.training", "--variant=none", "--root=")
    batch = round(CALIBRATION_BATCH / common.median(calibration["steps"][WARM_UP:]))  # steps of about a second
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for number in range(ROUNDS):
        for variant in VARIANTS:
            root = tempfile.mkdtemp(prefix="easyckpt-bench-")
            try:
                chosen = (f"--variant={variant}", f"--root={root}", f"--batch={batch}")
                runs[variant].append(common.child("benchmarks.training", *chosen))
            finally:
                shutil.rmtree(root)
        print(f"round {number + 1} of {ROUNDS}", flush=True)
    report(runs)


def report(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Times are sums over the steps after the warm-up; ratios are formed within a round, then the median is taken."""
    totals = {variant: [sum(run["steps"][WARM_UP:]) for run in rounds] for variant, rounds in runs.items()}

    def ratio(variant: str, base: str) -> float:
        return common.median(a / b for a, b in zip(totals[variant], totals[base], strict=True))

    rows, summary = [], {}
    for variant, rounds in runs.items():
        blocked = [value for run in rounds for value in run["blocked"][3 if variant == "easyckpt" else 1 :]]
        summary[variant] = {
            "against_none": ratio(variant, "none"),
            "against_memmove": ratio(variant, "memmove"),
            "blocked_median": common.median(blocked),
            "blocked_p99": common.percentile(blocked, 0.99),
            "seconds": totals[variant],
        }
        figures = summary[variant]
        rows.append(
            [
                variant,
                "-" if variant == "none" else common.milliseconds(figures["blocked_median"]),
                "-" if variant == "none" else common.milliseconds(figures["blocked_p99"]),
                f"{figures['against_none']:.3f}",
                f"{figures['against_memmove']:.3f}",
            ]
        )
    ours = runs["easyckpt"]
    first = {
        "constructor": common.median(run["first"]["constructor"] for run in ours),
        "load": common.median(run["first"]["load"] for run in ours),
        "first_three_saves": common.median(sum(run["blocked"][:3]) for run in ours),
    }
    step = common.median(value for run in runs["none"] for value in run["steps"][WARM_UP:])
    question = (
        f"{ours[0]['state_bytes'] / 1e6:.0f} MB of state, steps of {step:.2f} s, {STEPS - WARM_UP} steps a run after "
        f"{WARM_UP} of warm-up, {ROUNDS} rounds. easyckpt: memory every step, storage every {EVERY}; others: storage "
        f"every {EVERY}. Blocked is per save. easyckpt's constructor, load and first three saves together: "
        f"{common.milliseconds(sum(first.values()))}."
    )
    header = ["", "blocked, median", "p99", "training against none", "against memmove"]
    common.write("training", question, {"summary": summary, "first": first, "counts": ours[-1]["counts"]}, header, rows)


if __name__ == "__main__":
    main()
