"""What a scenario is, what the scenarios have in common, and how a table is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import nn
from torch.utils.data import Dataset

STEPS, BATCH, SAVE = 20, 4, 5
#: Items of a data set that lasts longer than the training; for 8 steps an epoch; for 10.
LONG, EIGHT, TEN = 200, 8 * BATCH, 10 * BATCH
#: The last step of an epoch of ten.
BOUNDARY = 10
WORKERS = {"dataloader_num_workers": 2}
PERSISTENT = {**WORKERS, "dataloader_persistent_workers": True}
NOT_SEEDABLE = {"accelerator_config": {"use_seedable_sampler": False}}
RANDOM_WORKERS = "workers are seeded for each batch"


@dataclass
class Setup:
    """What a Trainer is made of. `arguments` are those of TrainingArguments, on top of the ones all have."""

    arguments: dict[str, Any] = field(default_factory=dict)
    model: nn.Module | None = None
    train: Dataset[Any] | None = None
    evaluation: Dataset[Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    """Other arguments of the Trainer."""
    trainer: Callable[..., Any] | None = None
    """The class, where it is another; it gets no data collator then but one of `more`."""
    asked: Callable[..., Any] | None = None
    """The class of its arguments, where it is another."""


@dataclass(frozen=True)
class Scenario:
    name: str
    build: Callable[[], Setup]
    until: int
    """It is killed when this step has ended, and the next one's update of the weights is done."""
    saved: int | None
    """The newest step in storage by then."""
    steps: int
    """With which it ends."""
    ranks: int
    moment: str
    """The callback in which it is killed."""
    unlike_stock: str
    """Why wrapped training differs from stock training, where it has to."""
    needs: str = ""
    """A package that only some environments have."""

    @property
    def proves(self) -> str:
        return " ".join((self.build.__doc__ or "").split())


def scenario(
    until: int = 12,
    saved: int | None = -1,
    steps: int = STEPS,
    ranks: int = 1,
    moment: str = "on_optimizer_step",
    unlike_stock: str = "",
    needs: str = "",
) -> Callable[[Callable[[], Setup]], Scenario]:
    """Makes a scenario of a function. Of the steps before `until` each fifth is saved, unless `saved` says another."""

    def of(build: Callable[[], Setup]) -> Scenario:
        newest = until // SAVE * SAVE if saved == -1 else saved
        return Scenario(build.__name__, build, until, newest, steps, ranks, moment, unlike_stock, needs)

    return of


def those_of(modules: Iterable[ModuleType]) -> dict[str, Scenario]:
    """The scenarios of these modules by their names, in the order in which they are written."""
    every = (value for module in modules for value in vars(module).values())
    return {found.name: found for found in every if isinstance(found, Scenario)}
