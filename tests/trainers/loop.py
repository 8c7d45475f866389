"""A training loop of its own with an Accelerator, in a process of its own: straight through, killed, or resumed.

What came of it goes to ``--record`` when it has come to its end, as with `job.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from tests.trainers.job import digest, until
from tests.trainers.loops import LOOPS, SAVE, Loop
from tests.trainers.models import Plain


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=sorted(LOOPS))
    parser.add_argument("--root", required=True)
    parser.add_argument("--record", required=True, help="path; the rank is appended")
    parser.add_argument("--mode", choices=["ours", "plain", "stock"], default="ours")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--until", type=int, help="be killed when this step has ended")
    parser.add_argument("--began", type=int, default=0, help="of stock: the step that was saved")
    parser.add_argument("--committed", type=int, help="but only when this step is in storage")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    Training(given, LOOPS[given.loop]).run()
    sys.stdout.flush()


class Counted:
    """Registered for checkpointing: what a program has of its own."""

    def __init__(self) -> None:
        self.tokens = 0

    def state_dict(self) -> dict[str, int]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.tokens = state["tokens"]


class Training:
    def __init__(self, given: argparse.Namespace, loop: Loop) -> None:
        self.given, self.loop = given, loop
        self.path = Path(f"{given.record}.{os.environ.get('RANK', '0')}")
        random.seed()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=loop.accumulate, **loop.accelerator())
        model = Plain(tied=False)  # which seeds torch's generator
        set_seed(given.seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.loaders = self.accelerator.prepare(*loop.loaders(), self.accelerator.prepare(loop.validation()))
        self.counted, self.progress = Counted(), {"epoch": 0}
        self.accelerator.register_for_checkpointing(self.counted)
        self.batches: list[list[Any]] = []
        self.losses: list[list[Any]] = []
        self.step = 0

    def run(self) -> None:
        if self.given.mode == "plain":
            self.train(lambda loader, epoch, name: loader, lambda step: None)
            self.write(0, None)
            return
        if self.given.mode == "stock":
            self.run_stock()
            return
        from easyckpt.integrations.accelerate import AccelerateCheckpointer

        with AccelerateCheckpointer(
            self.given.root,
            self.accelerator,
            {"progress": self.progress},
            save_storage_interval=SAVE,
            max_ckpt_num=1,
            back_pressure="wait",
        ) as checkpointer:
            restored = checkpointer.load()
            self.step = restored.step
            self.train(checkpointer.batches, lambda step: self.save(checkpointer, step))
            self.write(restored.step, restored.tier)

    def run_stock(self) -> None:
        """What accelerate itself offers, as its documentation has it; on one rank, without accumulation."""
        where = Path(self.given.root)
        began = self.given.began
        if began:
            self.accelerator.load_state(str(where))
            self.step = began
            self.progress["epoch"] = began // len(self.loaders[0])

        def batches(loader: Any, epoch: int, name: str) -> Any:
            skip = max(0, began - epoch * len(loader))
            return self.accelerator.skip_first_batches(loader, skip) if skip else loader

        def save(step: int) -> None:
            if step == self.given.until:
                self.accelerator.save_state(str(where))
                os.kill(os.getpid(), signal.SIGKILL)

        self.train(batches, save)
        self.write(began, None)

    def train(self, batches: Any, save: Any) -> None:
        random.random()
        torch.rand(3)  # a resumed program draws here as well
        *loaders, validation = self.loaders
        for epoch in range(self.progress["epoch"], self.loop.epochs):
            self.progress["epoch"] = epoch
            for group in zip(*(batches(loader, epoch, f"train{n}") for n, loader in enumerate(loaders)), strict=True):
                for batch in group:
                    self.micro_step(batch)
                if self.accelerator.sync_gradients:
                    self.step += 1
                    self.losses.append([self.step, *self.last])
                save(self.step)
            self.validate(validation)

    def micro_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.batches.append([self.step + 1, digest(batch)])
        self.counted.tokens += batch["input_ids"].numel()
        with self.accelerator.accumulate(self.model):
            loss = self.model(**batch)["loss"]
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.last = [loss.item().hex(), self.scheduler.get_last_lr()[0].hex()]

    def validate(self, loader: Any) -> None:
        """The epoch's own work; dropout stays on, so that it draws numbers."""
        with torch.no_grad():
            losses = [self.model(**batch)["loss"].item().hex() for batch in loader]
        self.losses.append([self.step + 1, losses])

    def save(self, checkpointer: Any, step: int) -> None:
        given = self.given
        if given.until is not None and given.until - step < SAVE:
            checkpointer.wait()  # so that no slot is taken by a flush, and none of the last snapshots skipped
        checkpointer.save_if_needed(step)
        if step != given.until or not self.accelerator.sync_gradients:
            return
        manifest = Path(given.root, f"step-{given.committed:08d}", "manifest.json")
        until(manifest.exists)
        mark = Path(f"{self.path}.here")
        mark.touch()
        ranks = self.accelerator.num_processes
        until(lambda: len(list(mark.parent.glob(f"{mark.stem.rpartition('.')[0]}.*.here"))) == ranks)
        os.kill(os.getpid(), signal.SIGKILL)

    def write(self, began: int, tier: str | None) -> None:
        """Everything that must be as in a straight run, and where this one has begun."""
        unwrapped = self.accelerator.unwrap_model(self.model)
        self.path.write_text(json.dumps(dict(self.outcome(unwrapped)) | {"began": began, "tier": tier}, indent=1))

    def outcome(self, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        yield "steps", self.step
        yield "weights", digest(model.state_dict())
        yield "optimizer", digest(self.optimizer.state_dict())
        yield "scheduler", digest(self.scheduler.state_dict())
        yield "python", digest(random.getstate())
        yield "numpy", digest(np.random.get_state())
        yield "torch", digest(torch.get_rng_state())
        yield "tokens", self.counted.tokens
        yield "batches", self.batches
        yield "losses", self.losses


if __name__ == "__main__":
    main()
