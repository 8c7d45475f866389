"""Trainers and callbacks as users write them, for scenarios."""

from __future__ import annotations

import copy
import random
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer, TrainerCallback
from transformers import trainer as trainer_module
from transformers.trainer_callback import ExportableState


class Counting(Trainer):
    """Its loss depends on the batches it has seen, and on a mean of their losses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = 0
        self.mean = torch.zeros(())
        self.parts: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.seen += 1
        return super().training_step(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        self.parts["train"]["mean"].append(float(self.mean))
        loss = loss * (1 + 0.01 * self.seen) + 0.1 * self.mean
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        means = {name: sum(values) / len(values) for name, values in self.parts["train"].items()}
        super().log({**logs, **means, "seen": self.seen}, *args, **kwargs)
        self.parts["train"].clear()


class Averaging(Trainer):
    """Beside its model it trains a mean of it, and a scale with an optimizer of its own; it draws by itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.reference = copy.deepcopy(self.model).eval()
        self.scale = nn.Linear(1, 1)
        nn.init.ones_(self.scale.weight)
        nn.init.zeros_(self.scale.bias)
        self.second = torch.optim.Adam(self.scale.parameters(), lr=0.01)
        self.numbers, self.torchs = np.random.default_rng(5), torch.Generator().manual_seed(5)
        self.pythons = random.Random(5)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.second.step()
        self.second.zero_grad()
        self.average.update_parameters(self.model)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, **kwargs)
        pairs = zip(model.parameters(), self.average.module.parameters(), strict=True)
        far = sum(((one - other.detach()) ** 2).mean() for one, other in pairs)
        drawn = self.numbers.random() + self.pythons.random() + float(torch.rand((), generator=self.torchs))
        return self.scale(loss.reshape(1)).squeeze() + drawn * far


class Halves(Sampler[int]):
    """One half of the data after the other, each in an order of its own generator's."""

    def __init__(self, count: int) -> None:
        self.count, self.generator = count, torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        half = self.count // 2
        yield from torch.randperm(half, generator=self.generator).tolist()
        yield from (half + torch.randperm(self.count - half, generator=self.generator)).tolist()


class OwnParts(Trainer):
    """Optimizer, schedule and loader are made otherwise."""

    def get_train_dataloader(self) -> Any:
        args, data = self.args, self.train_dataset
        size, workers = args.train_batch_size, args.dataloader_num_workers
        sampler = Halves(len(data))
        made = DataLoader(data, size, sampler=sampler, collate_fn=self.data_collator, num_workers=workers)
        return self.accelerator.prepare(made)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1, "lr": 2e-3}, {"params": others, "lr": 1e-3}]
        self.optimizer = torch.optim.RMSprop(groups, momentum=0.5)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer or self.optimizer, 3, gamma=0.8)
        self.lr_scheduler = schedule
        return schedule


class BareLoader(Trainer):
    """What it iterates is torch's own."""

    def get_train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        size = self.args.train_batch_size
        return DataLoader(self.train_dataset, size, shuffle=True, generator=generator, collate_fn=self.data_collator)


#: A module that has imported all that the Trainer's has.
_PROGRAM = types.ModuleType("program_with_a_loop")
vars(_PROGRAM).update(vars(trainer_module), __name__=_PROGRAM.__name__)
sys.modules[_PROGRAM.__name__] = _PROGRAM


def copied(method: Any) -> Any:
    """`method` as a copy of it in another module would be: its globals are the names of that module."""
    names = vars(_PROGRAM)
    made = types.FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    made.__kwdefaults__ = method.__kwdefaults__
    return made


class CopiedLoop(Trainer):
    """Has taken over the Trainer's loop."""

    _inner_training_loop = copied(Trainer._inner_training_loop)
    if hasattr(Trainer, "_run_epoch"):  # from 5.0 on it is in parts
        _run_epoch = copied(Trainer._run_epoch)
        _prepare_for_training = copied(Trainer._prepare_for_training)


class Decay(TrainerCallback, ExportableState):
    """The learning rate falls with what it has counted."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 / self.steps


def accuracy(predicted: Any) -> dict[str, float]:
    best = np.argmax(predicted.predictions, axis=-1)
    return {"accuracy": float((best[:, :-1] == predicted.label_ids[:, 1:]).mean())}


class Judge:
    """The mean of what it was given in all batches."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def __call__(self, predicted: Any, compute_result: bool = False) -> dict[str, float]:
        self.sums.append(float(predicted.losses.mean() + predicted.label_ids.sum()))
        if not compute_result:
            return {}
        mean = sum(self.sums) / len(self.sums)
        self.sums.clear()
        return {"judged": mean}
