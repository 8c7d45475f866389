"""Everything that touches a private name of transformers or accelerate, with the versions that have it.

Supported: transformers from 4.46 to 5, accelerate from 1.0 on. Read, and run by the tests, on 4.57 and 5.24.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import accelerate
import safetensors.torch
import torch
from transformers import PreTrainedModel, Trainer

#: (path, tensors by key, metadata) of each file of tensors that was to be written.
Captured = list[tuple[str, Mapping[str, torch.Tensor], Mapping[str, str] | None]]


class _Capturing(threading.local):
    """What this thread's writes are noted in; None: they are made."""

    into: Captured | None = None


_capturing = _Capturing()


def _noting(save_file: Any, torch_save: Any) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What stands in for these two, of which no other name is kept here: it would be replaced too."""

    @functools.wraps(save_file)
    def note_file(tensors: Any, filename: Any, metadata: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _capturing.into is None:
            return save_file(tensors, filename, metadata, *args, **kwargs)
        _capturing.into.append((str(filename), dict(tensors), metadata))
        return None

    @functools.wraps(torch_save)
    def note_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if _capturing.into is None or not isinstance(f, (str, os.PathLike)) or not _is_state_dict(obj):
            return torch_save(obj, f, *args, **kwargs)
        _capturing.into.append((os.fspath(f), dict(obj), None))
        return None

    return {save_file: note_file, torch_save: note_save}


#: One pair for the whole process: a module that is imported while they stand in keeps them for good.
_NOTING = _noting(safetensors.torch.save_file, torch.save)


@contextlib.contextmanager
def writes_captured() -> Iterator[Captured]:
    """Within it, this thread's writes of weights are noted in place of being made; all else is written."""
    captured: Captured = []
    with _replaced(_NOTING):
        _capturing.into = captured
        try:
            yield captured
        finally:
            _capturing.into = None


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(item, torch.Tensor) for item in value.values())


@contextlib.contextmanager
def _replaced(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Every name that any module has for one of `functions` stands for another: programs import them by name."""
    changed = [(inside, name, inside[name]) for inside, name in _names_of(tuple(functions)) if name in inside]
    try:
        for inside, name, old in changed:
            if old in functions:
                inside[name] = functions[old]
        yield
    finally:
        for inside, name, old in changed:
            inside[name] = old


@functools.lru_cache(maxsize=4)
def _names_among(modules: int, functions: tuple[Callable[..., Any], ...]) -> list[tuple[dict[str, Any], str]]:
    """The names; to be looked for anew where there are more `modules` than there were."""
    wanted = set(map(id, functions))
    insides = [vars(module) for module in list(sys.modules.values()) if type(module) is ModuleType]
    return [(inside, name) for inside in insides for name, value in list(inside.items()) if id(value) in wanted]


def _names_of(functions: tuple[Callable[..., Any], ...]) -> list[tuple[dict[str, Any], str]]:
    return _names_among(len(sys.modules), functions)


#: accelerate's function (1.0 on), before anything is put in its place.
_SKIPPING = (accelerate.skip_first_batches,)


def leave_skipping(to: Callable[[Any, int], bool]) -> None:
    """Have the Trainer leave the batches that a resumed epoch skips to loaders for which `to` says that it is done.

    ``skip_first_batches`` has a name in the Trainer's module (4.46 to 5.24), and in those of programs that have a loop
    of their own, which are loaded at any time.
    """
    (original,) = _SKIPPING

    def skip(loader: Any, num_batches: int = 0) -> Any:
        if to(loader, num_batches):
            return loader
        return original(loader, num_batches)

    for inside, name in _names_of(_SKIPPING):
        if inside.get(name) is original:
            inside[name] = skip


def is_stock(kind: type, method: str, ours: tuple[type, ...]) -> bool:
    """Whether a Trainer's class has `method` from transformers itself; `ours` do not count."""
    for base in kind.__mro__:
        if base not in ours and method in vars(base):
            return base is Trainer
    return True


class ResumedAt(int):
    """The global step of a resumed run, which knows the pass over the data and the updates in it.

    The Trainer computes both by dividing the step (inline, up to 5.0): wrong where a pass ends when the data do.
    And it trains one step more where nothing is left to train: then this names a pass that never comes.
    """

    epoch: int
    updates: int
    asked: tuple[int, float]
    """``max_steps`` and ``num_train_epochs`` of the arguments."""

    def __floordiv__(self, other: int) -> int:
        steps, epochs = self.asked
        last = steps if steps > 0 else math.ceil(epochs * other)
        return sys.maxsize if int(self) >= last else self.epoch

    def __mod__(self, other: int) -> int:
        return self.updates


def running_loss(trainer: Any) -> torch.Tensor | None:
    """The loss since the last log, where the Trainer keeps it (from 5.8; before, in a variable of its loop)."""
    return getattr(trainer, "_tr_loss", None)


def is_new_best(args: Any, state: Any, metrics: Mapping[str, float]) -> bool:
    """Take the metric that ``metric_for_best_model`` names; whether it is the best so far (up to 4.46)."""
    name = args.metric_for_best_model
    if name is None:
        return False
    value = metrics[name if name.startswith("eval_") else f"eval_{name}"]
    known = state.best_metric if state.best_model_checkpoint is not None else None
    if known is not None and not (value > known if args.greater_is_better else value < known):
        return False
    state.best_metric = value
    return True


def loss_in_all(trainer: Any) -> float:
    """The loss of all logged steps, where the mean over the whole training is made of it (to 5.7; else of one call)."""
    return float(trainer._total_loss_scalar) if running_loss(trainer) is None else 0.0


def saves_as_ever(trainer: Any, ours: tuple[type, ...]) -> bool:
    """Whether transformers, or peft, alone saves the model, so that its files depend on nothing of the program's."""
    stock = all(is_stock(type(trainer), method, ours) for method in ("save_model", "_save"))
    saving = getattr(type(trainer.model), "save_pretrained", None)
    known = saving is PreTrainedModel.save_pretrained or getattr(saving, "__module__", "").startswith("peft.")
    return stock and known


@contextlib.contextmanager
def weights_on_each_node(model: Any) -> Iterator[None]:
    """Within it, whoever is a main process writes the weights of `model`; 5.x leaves them to the first rank of all."""
    if not hasattr(model, "should_save_on_this_rank"):
        yield
        return
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del model.should_save_on_this_rank
