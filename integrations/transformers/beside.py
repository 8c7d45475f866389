"""What a Trainer's class, or a callback, trains beside the model: a mean of its weights, a reference that follows it.

Optimizers and schedulers are such a thing always, a module only once training has changed it: one that stays as it was
made, like most references, costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from easyckpt.integrations.transformers.unsaved import stamp
from easyckpt.state.modules import TABLES, unwrap

#: Elements of each tensor in host memory that are looked at.
_LOOK = 4


class Beside:
    """A component."""

    def __init__(self, trainer: Any) -> None:
        self._parts = dict(_parts(trainer))
        followed = _followed(trainer)
        self._first = {
            name: _AsMade(part)
            for name, part in self._parts.items()
            if isinstance(part, nn.Module) and id(part) not in followed
        }

    def __bool__(self) -> bool:
        return bool(self._parts)

    def state_dict(self) -> dict[str, Any]:
        """By name, the state of each."""
        self._first = {name: first for name, first in self._first.items() if first.still()}
        return {name: part.state_dict() for name, part in self._parts.items() if name not in self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What is in `state` has been changed by training; of what is not, the program has made it."""
        for name, value in state.items():
            if name not in self._parts:
                raise ValueError(f"the trainer has no {name}, which was trained beside the model")
            self._parts[name].load_state_dict(value)
            self._first.pop(name, None)


class _AsMade:
    """How a module is before training."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [table for each in module.modules() for table in TABLES(vars(each))]
        self._held = self._what_it_holds()
        self._tensors = [each for each in self._held if isinstance(each, torch.Tensor)]
        self._stamps = list(map(stamp, self._tensors))
        self._views = _views(self._tensors)
        self._values = [torch.cat(views) for views in self._views]

    def _what_it_holds(self) -> list[Any]:
        return [each for table in self._tables for each in table.values()]

    def still(self) -> bool:
        """Whether it has the same modules and tensors, none of which was written.

        Of what lies in host memory some content is compared too: who writes through ``.data`` leaves no other trace.
        """
        held = self._what_it_holds()
        return (
            len(held) == len(self._held)
            and all(map(is_, held, self._held))
            and list(map(stamp, self._tensors)) == self._stamps
            and all(map(torch.equal, map(torch.cat, self._views), self._values))
        )


def _views(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """A few elements of each tensor that the host can read at once, by type."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        if plain and tensor.is_cpu and not tensor.is_quantized and tensor.numel():
            row = tensor.detach().reshape(1) if not tensor.dim() else tensor.detach()
            while row.dim() > 1:
                row = row[len(row) // 2]
            found.setdefault(tensor.dtype, []).append(row[len(row) // 2 :][:_LOOK])
    return list(found.values())


def _followed(trainer: Any) -> set[int]:
    """Modules of the trainer's that a callback has too: it does something to them, so they count as changed."""
    held = {id(value) for callback in trainer.callback_handler.callbacks for value in vars(callback).values()}
    return {id(value) for value in vars(trainer).values() if isinstance(value, nn.Module)} & held


def _parts(trainer: Any) -> Iterator[tuple[str, Any]]:
    """By the names of attributes; each once."""
    seen = {id(trainer.optimizer), id(trainer.lr_scheduler), id(getattr(trainer.optimizer, "optimizer", None))}
    seen.add(id(getattr(trainer.lr_scheduler, "scheduler", None)))
    model = {id(parameter) for parameter in unwrap(trainer.model).parameters()}
    for place, owner in _owners(trainer):
        for attribute, value in list(vars(owner).items()):
            if id(value) in seen or not isinstance(value, (nn.Module, Optimizer, LRScheduler)):
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module) and not _is_apart(value, model):
                continue
            yield place + attribute, value


def _owners(trainer: Any) -> Iterator[tuple[str, Any]]:
    """With what their attributes' names begin with; the second callback of one class has its number there."""
    yield "", trainer
    counts: Counter[str] = Counter()
    for callback in trainer.callback_handler.callbacks:
        name = type(callback).__name__
        counts[name] += 1
        yield f"{name}." if counts[name] == 1 else f"{name}-{counts[name]}.", callback


def _is_apart(module: nn.Module, model: set[int]) -> bool:
    """Whether it has tensors, none of which are the model's."""
    return any(True for _ in module.state_dict()) and not any(id(each) in model for each in module.parameters())
