"""The parts of a Trainer as components of a Checkpointer's state."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from easyckpt.format.difference import ASIDE
from easyckpt.integrations.training_data import TrainingData
from easyckpt.integrations.transformers import recipe, versions
from easyckpt.integrations.transformers.beside import Beside
from easyckpt.integrations.transformers.names import (
    ARGUMENTS_FILE,
    BESIDE,
    DATA,
    FILES,
    MODEL,
    OPTIMIZER,
    PROGRESS,
    SCALER,
    SCHEDULER,
    WEIGHTS,
)
from easyckpt.integrations.transformers.progress import Progress
from easyckpt.integrations.transformers.sayings import what_is_saved
from easyckpt.state.modules import replicated_parameters, unwrap
from easyckpt.state.objects import ForeignComponent

_log = logging.getLogger("easyckpt")

#: Buffers that training changes in modules whose parameters are frozen.
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class Adapters:
    """The trained part of a model with adapters: the frozen rest is loaded by the program, as without easyckpt."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters that are trained, buffers of modules that hold some, and running statistics, frozen or not."""
        model = unwrap(self.model)
        found: dict[str, torch.Tensor] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        holders = {name.rpartition(".")[0] for name in found}
        for name, buffer in model.named_buffers():
            if name.rpartition(".")[0] in holders or name.rpartition(".")[2] in _RUNNING:
                found[name] = buffer
        return found

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors themselves."""
        return {name: tensor.detach() for name, tensor in self.tensors().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Fill them in place."""
        live = self.tensors()
        if live.keys() != state.keys():
            odd = sorted(live.keys() ^ state.keys())
            raise ValueError(f"the trained parameters are not those of the checkpoint: {', '.join(odd[:5])}")
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(state[name])


class _Trained(ForeignComponent):
    """Adapters are equal on all ranks where DDP keeps them so."""

    @override
    def replicated(self) -> Iterator[torch.Tensor]:
        return replicated_parameters(self.target.model)


class _Kept(ForeignComponent):
    """Something that says which of its tensors are not written while training goes on."""

    @override
    def constant(self) -> Iterable[torch.Tensor]:
        return self.target.constant()  # type: ignore[no-any-return]


class Files:
    """The files that the model is saved as, so that a snapshot alone can become a checkpoint."""

    def __init__(self) -> None:
        self._recipe = recipe.Recipe()
        self._value: dict[str, Any] = _tensors_of(self._recipe)
        self._learnt_at = -1
        self._seen: Any = None
        """What the files were made of, where that says all of them."""
        self.added: dict[str, bytes] = {}
        """Files that the program adds to a step's checkpoint by itself."""
        self._added_at = -1
        self._said = False

    def learn(self, trainer: Any) -> None:
        """Have the Trainer say which they are now. All ranks call it: a program's own saving may wait for all."""
        live = live_tensors(trainer)
        if self._seen is None or _look(trainer, live) != self._seen:
            fresh = recipe.learn(trainer, live, MODEL, FILES)
            self._look_for_weights(trainer, fresh, live)
            if (fresh.weights, fresh.small) != (self._recipe.weights, self._recipe.small) or fresh.copies:
                self._recipe, self._value = fresh, _tensors_of(fresh)
            known = not fresh.copies and versions.saves_as_ever(trainer, ours(trainer))
            self._seen = _look(trainer, live) if known else None  # only now: saving writes into the configuration
        self._learnt_at = int(trainer.state.global_step)

    def added_at(self, step: int) -> dict[str, bytes]:
        """Where files that are added at `step` belong: with those that were added at that step before."""
        if step != self._added_at:
            self.added, self._added_at = {}, step
        return self.added

    def learn_early(self, trainer: Any) -> None:
        """As `learn`, before anything is to be saved: for a checkpoint that nobody asks for. It may fail."""
        try:
            self.learn(trainer)
        except Exception as error:  # noqa: BLE001 - what a model, or a program, does not know how to save is its own
            _log.warning(
                "%s.save_model() has failed before training began (%s: %s). A checkpoint of a job that is ended before "
                "its first save will have no files of the model",
                type(trainer).__name__,
                type(error).__name__,
                error,
            )
        self.let_go()

    def let_go(self) -> None:
        """The snapshot is taken: what belongs to its step alone need not be in those that follow."""
        self.added, self._added_at = {}, -1
        if self._recipe.copies:
            self._recipe.copies = self._value["tensors"] = {}
            self._learnt_at = -1

    def _look_for_weights(self, trainer: Any, fresh: recipe.Recipe, live: Mapping[str, torch.Tensor]) -> None:
        """Say it once where the Trainer saves no weights."""
        some = fresh.weights or any(name.endswith(WEIGHTS) and name != ARGUMENTS_FILE for name in fresh.small)
        if some or self._said or not live or not trainer.args.should_save:
            return
        self._said = True
        _log.warning(
            "%s.save_model() writes no file of weights that easyckpt knows: checkpoints have none either, and only "
            "easyckpt can go on from them",
            type(trainer).__name__,
        )

    def state_dict(self) -> dict[str, Any]:
        """As tensors, which cost a copy at each step and nothing else.

        What holds weights that are in no component is of the step at which it was learnt, and of no other.
        """
        here = self._learnt_at == self._added_at
        added = {name: _bytes(content) for name, content in self.added.items()} if here else {}
        return {ASIDE: {**self._value, "added": added, "learnt_at": self._learnt_at}}

    def constant(self) -> list[torch.Tensor]:
        """Files that were learnt: a tokenizer's may be large."""
        return [self._value["recipe"], *self._value["small"].values()]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing of it is wanted back: the files are made anew of the live objects."""


def _look(trainer: Any, live: Mapping[str, torch.Tensor]) -> Any:
    return what_is_saved(trainer), [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in live.items()]


def _tensors_of(made: recipe.Recipe) -> dict[str, Any]:
    return {
        "recipe": _bytes(made.text()),
        "small": {name: _bytes(content) for name, content in made.small.items()},
        "tensors": made.copies,
    }


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def has_adapters(model: nn.Module) -> bool:
    """Whether only a part of `model` is saved: it is one of peft's."""
    return any(kind.__name__ == "PeftModel" for kind in type(unwrap(model)).__mro__)


def live_tensors(trainer: Any) -> dict[str, torch.Tensor]:
    """The tensors of the component `MODEL`, by name."""
    if has_adapters(trainer.model):
        return Adapters(trainer.model).tensors()
    return dict(_named(unwrap(trainer.model)))


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            yield name, value


def state_of(trainer: Any, progress: Progress, data: TrainingData, files: Files) -> dict[str, Any]:
    """All that a Trainer's run consists of, once model, optimizer and scheduler are made."""
    wrapped = trainer.model_wrapped
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    state: dict[str, Any] = {
        MODEL: _Trained(MODEL, Adapters(wrapped)) if has_adapters(wrapped) else wrapped,
        OPTIMIZER: getattr(optimizer, "optimizer", optimizer),
        SCHEDULER: getattr(scheduler, "scheduler", scheduler),
        PROGRESS: _Kept(PROGRESS, progress),
        DATA: data,
        FILES: _Kept(FILES, files),
    }
    scaler = getattr(trainer.accelerator, "scaler", None)
    if scaler is not None:
        state[SCALER] = scaler
    beside = Beside(trainer)
    if beside:
        state[BESIDE] = beside
    return state


def ours(trainer: Any) -> tuple[type, ...]:
    """The classes of ours that extend the Trainer's."""
    return tuple(kind for kind in type(trainer).__mro__ if kind.__module__.startswith("easyckpt."))
