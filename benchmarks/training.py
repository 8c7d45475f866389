"""How much slower does training get, and how long is it blocked at a save?

A model with 30 million parameters and AdamW (about 350 MB of state), steps of about a second on two cores. easyckpt
snapshots at every step and flushes every fifth; the others save every fifth. "memmove" is the floor for anything that
copies at every step: the same training beside a thread that copies the same bytes once a step and does nothing else.

All variants train the same model in one process and take turns in blocks of ten steps, since a machine that is shared
changes its speed from minute to minute: ratios are formed within a round of blocks, then the median is taken. Each
block saves at its third and eighth step, so that what goes on in the background falls into it.
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
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks import common

EVERY, BLOCK, ROUNDS = 5, 10, 8
WIDTH, LAYERS = 1024, 28
KEPT = 2


class Saver(Protocol):
    """One way to save. `due`: the others save now."""

    def save(self, due: bool) -> float:
        """Seconds that the training loop was held."""

    def drain(self) -> None:
        """Wait for what is still going on."""

    def close(self) -> None:
        """The end."""


class Nothing:
    def save(self, due: bool) -> float:
        return 0.0

    def drain(self) -> None: ...

    def close(self) -> None: ...


class Memmove(Nothing):
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

    def save(self, due: bool) -> float:
        return common.timed(self._go.release)


class Easyckpt:
    def __init__(self, root: str, state: dict[str, Any]) -> None:
        import easyckpt

        begun = time.perf_counter()
        self.checkpointer = easyckpt.Checkpointer(root, state, save_storage_interval=EVERY, max_ckpt_num=KEPT)
        self.first = {"constructor": time.perf_counter() - begun}
        self.first["load"] = common.timed(self.checkpointer.load)
        self._step = 0

    def save(self, due: bool) -> float:
        # Numbers are chosen so that a due step is a multiple of the interval.
        self._step += 1
        while (self._step % EVERY == 0) != due:
            self._step += 1
        self.checkpointer.save_if_needed(self._step)
        blocked: float = self.checkpointer.stats().blocked_recent[-1]
        return blocked

    def drain(self) -> None:
        self.checkpointer.wait()

    def close(self) -> None:
        self.counts = self.checkpointer.stats().counts
        self.checkpointer.close()


class Peer:
    """Saves when it is due; the time of the call is what it blocks."""

    def __init__(self, variant: str, root: str, state: dict[str, Any]) -> None:
        self._variant, self._root, self._state, self._pending = variant, root, state, None
        self._paths: list[str] = []

    def save(self, due: bool) -> float:
        return common.timed(self._save) if due else 0.0

    def _save(self) -> None:
        import torch.distributed.checkpoint as dcp

        path = os.path.join(self._root, f"{self._variant}-{time.monotonic_ns()}".replace(" ", "-"))
        self._paths.append(path)
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

    def drain(self) -> None:
        if self._pending is not None:
            self._pending.result()
        for path in self._paths[:-KEPT]:
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        self._paths = self._paths[-KEPT:]

    def close(self) -> None: ...


class Training:
    """The job."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._inputs = torch.randn(batch, WIDTH)

    @property
    def state_bytes(self) -> int:
        return 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())

    def step(self) -> None:
        loss = self.model(self._inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def block(self, saver: Saver) -> dict[str, Any]:
        """Some steps beside `saver`: their seconds, and how long each save held them."""
        held = []
        begun = time.perf_counter()
        for number in range(BLOCK):
            self.step()
            held.append(saver.save(number % EVERY == 2))
        seconds = time.perf_counter() - begun
        saver.drain()
        return {"seconds": seconds, "held": held}


def run(batch: int, root: str) -> dict[str, Any]:
    """All variants in turn; the first round warms up."""
    training = Training(batch)
    state = {"model": training.model, "optimizer": training.optimizer}
    ours = Easyckpt(root, state)
    savers: dict[str, Saver] = {
        "none": Nothing(),
        "memmove": Memmove(training.state_bytes),
        "easyckpt": ours,
        **{name: Peer(name, root, state) for name in ("torch.save + replace", "DCP save", "DCP async_save")},
    }
    rounds = []
    for number in range(ROUNDS + 1):
        order = list(savers) if number % 2 else list(reversed(savers))
        rounds.append({name: training.block(savers[name]) for name in order})
    for saver in savers.values():
        saver.close()
    return {"rounds": rounds, "state_bytes": training.state_bytes, "first": ours.first, "counts": ours.counts}


def calibrate(target: float = 1.0) -> dict[str, Any]:
    """The batch with which a step takes about `target` seconds (the optimizer's part of it does not grow)."""
    batch = 64
    for _ in range(4):
        training = Training(batch)
        seconds = common.median([common.timed(training.step) for _ in range(6)][1:])
        batch = max(1, round(batch * target / seconds))
    return {"batch": batch}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int)
    parser.add_argument("--root")
    arguments, _ = parser.parse_known_args()
    if arguments.root is not None:
        print(json.dumps(run(arguments.batch, arguments.root) if arguments.batch else calibrate()))
        return
    batch = common.child("benchmarks.training", "--root=")["batch"]
    root = tempfile.mkdtemp(prefix="easyckpt-bench-")
    try:
        report(common.child("benchmarks.training", f"--root={root}", f"--batch={batch}"))
    finally:
        shutil.rmtree(root)


def report(result: dict[str, Any]) -> None:
    """Ratios within a round; blocked: every save of easyckpt's, those that the others made."""
    warm_up, *rounds = result["rounds"]
    rows, summary = [], {}
    for name in rounds[0]:
        held = [value for one in rounds for value in one[name]["held"] if value or name == "easyckpt"]
        figures = {
            "against_none": common.median(one[name]["seconds"] / one["none"]["seconds"] for one in rounds),
            "against_memmove": common.median(one[name]["seconds"] / one["memmove"]["seconds"] for one in rounds),
            "blocked_median": common.median(held) if held else 0.0,
            "blocked_p99": common.percentile(held, 0.99) if held else 0.0,
            "seconds": [one[name]["seconds"] for one in rounds],
        }
        summary[name] = figures
        blocked = [common.milliseconds(figures[key]) if held else "-" for key in ("blocked_median", "blocked_p99")]
        rows.append([name, *blocked, f"{figures['against_none']:.3f}", f"{figures['against_memmove']:.3f}"])
    first = result["first"] | {"first_three_saves": sum(warm_up["easyckpt"]["held"][:3])}
    step = common.median(one["none"]["seconds"] for one in rounds) / BLOCK
    question = (
        f"{result['state_bytes'] / 1e6:.0f} MB of state, steps of {step:.2f} s, {ROUNDS} rounds of {BLOCK} steps for "
        f"each variant after one to warm up; ratios within a round. easyckpt: memory every step, storage every "
        f"{EVERY}; others: storage every {EVERY}. Blocked is per save. easyckpt's constructor, load and first three "
        f"saves together: {common.milliseconds(sum(first.values()))}."
    )
    header = ["", "blocked, median", "p99", "training against none", "against memmove"]
    document = {"summary": summary, "first": first, "counts": result["counts"]}
    common.write("training", question, document, header, sorted(rows, key=lambda row: list(ORDER).index(row[0])))


ORDER = ("none", "memmove", "easyckpt", "torch.save + replace", "DCP save", "DCP async_save")


if __name__ == "__main__":
    main()
