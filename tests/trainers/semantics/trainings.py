"""Trainings of a small model to ask, and what there is to ask about them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from easyckpt import catalog
from easyckpt.integrations.transformers import TrainerWrapper
from easyckpt.storage.records_apart import open_place
from easyckpt.verification import verify
from tests.trainers.data import Sequences
from tests.trainers.models import gpt2

STEPS = 8
#: What the Trainer itself writes.
STOCK_FILES = {
    "config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt",
    "trainer_state.json", "training_args.bin",
}  # fmt: skip


def make(out: Path, kind: type = Trainer, *, callbacks: Any = (), wrap: bool = True, **arguments: Any) -> Trainer:
    options = arguments.pop("options", {})
    more = {key: arguments.pop(key) for key in ("model_init", "eval_dataset", "compute_metrics") if key in arguments}
    settings: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "save_steps": 2, "save_strategy": "steps",
        "logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-2,
    }  # fmt: skip
    trainer = kind(
        None if "model_init" in more else gpt2(),
        TrainingArguments(str(out), **(settings | arguments)),
        train_dataset=Sequences(12),
        callbacks=list(callbacks),
        **more,
    )
    return TrainerWrapper(trainer, **options) if wrap else trainer


def straight(tmp_path: Path, **arguments: Any) -> dict[str, torch.Tensor]:
    trainer = make(tmp_path / "straight", wrap=False, save_strategy="no", **arguments)
    trainer.train()
    return weights(trainer)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def checkpoints(out: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in out.glob("checkpoint-*"))


def whole(out: Path, step: int) -> bool:
    storage, naming = open_place(out)
    entry = catalog.inspect(storage, f"checkpoint-{step}", naming)
    return entry.valid and verify(storage, entry) == []


def forget_memory() -> None:
    for path in Path(os.environ["EASYCKPT_MEMORY_DIR"]).iterdir():
        path.unlink()


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "flipped":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
    else:
        path.write_bytes(data[: len(data) // 2] if how == "truncated" else b"")


class At(TrainerCallback):
    """Does something when a step has begun."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act(control)


class Stopped(Exception):
    pass


def stop(control):
    raise Stopped
