"""What a Trainer's class, or a callback, trains beside the model: a mean of its weights, a reference that follows it.

Optimizers and schedulers are such a thing always, a module only once training has changed it: one that stays as it was
made, like most references, costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from easyckpt.state.modules import unwrap

#: Elements of each sampled tensor of a module that are looked at.
_LOOK = 64


class Beside:
    """A component."""

    def __init__(self, trainer: Any) -> None:
        self._parts = dict(_parts(trainer))
        self._first = {name: _sample(part) for name, part in self._parts.items() if isinstance(part, nn.Module)}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def state_dict(self) -> dict[str, Any]:
        """By name, the state of each."""
        for name, first in list(self._first.items()):
            if not all(map(torch.equal, first, _sample(self._parts[name]))):
                del self._first[name]
        return {name: part.state_dict() for name, part in self._parts.items() if name not in self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What is in `state` has been changed by training; of what is not, the program has made it."""
        for name, value in state.items():
            if name not in self._parts:
                raise ValueError(f"the trainer has no {name}, which was trained beside the model")
            self._parts[name].load_state_dict(value)
            self._first.pop(name, None)


def _parts(trainer: Any) -> Iterator[tuple[str, Any]]:
    """By the names of attributes; each once."""
    seen = {id(trainer.optimizer), id(trainer.lr_scheduler), id(getattr(trainer.optimizer, "optimizer", None))}
    seen.add(id(getattr(trainer.lr_scheduler, "scheduler", None)))
    model = {id(parameter) for parameter in unwrap(trainer.model).parameters()}
    for owner in (trainer, *trainer.callback_handler.callbacks):
        for attribute, value in list(vars(owner).items()):
            if id(value) in seen or not isinstance(value, (nn.Module, Optimizer, LRScheduler)):
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module) and not _is_apart(value, model):
                continue
            yield attribute if owner is trainer else f"{type(owner).__name__}.{attribute}", value


def _is_apart(module: nn.Module, model: set[int]) -> bool:
    """Whether it has tensors, none of which are the model's."""
    return any(True for _ in module.state_dict()) and not any(id(each) in model for each in module.parameters())


def _sample(module: nn.Module) -> list[torch.Tensor]:
    """Of a few of its tensors, which all change where training changes it, the first elements as they are now."""
    tensors = [each for each in (*module.parameters(), *module.buffers()) if each.numel()]
    few = [*tensors[:2], *tensors[len(tensors) // 2 :][:1], *tensors[-2:]]
    return [each.detach().flatten()[:_LOOK].clone() for each in few]
