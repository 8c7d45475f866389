"""Loaders whose passes are reported to a `TrainingData`, whoever iterates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from easyckpt.integrations.training_data import Reading, TrainingData

#: Classes of the loaders that accelerate makes, whose reading is known.
OF_ACCELERATE = ("DataLoaderShard", "DataLoaderDispatcher")


class TrackedLoader:
    """In the place of the loader that accelerate's iterates: the passes that a `TrainingData` awaits go through it."""

    def __init__(self, loader: Any, data: TrainingData, epoch: Callable[[], int]) -> None:
        self.__dict__.update(_loader=loader, _data=data, _epoch=epoch)

    def __iter__(self) -> Iterator[Any]:
        data: TrainingData = self._data
        return data.begin_pass(self._loader, self._epoch()) if data.awaits_pass else iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Loaders of accelerate's say that they are of the class of the loader inside."""
        return type(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_loader", "_data", "_epoch"):
            raise AttributeError(name)  # a copy that has nothing in it yet
        return getattr(self._loader, name)


def is_tracked(loader: Any) -> bool:
    """Whether the passes over `loader` go through a `TrainingData`."""
    inside = getattr(loader, "__dict__", {}).get("base_dataloader", loader)
    return type(inside) is TrackedLoader


def skip_batches(loader: Any, count: int) -> bool:
    """Have the next pass over a tracked `loader` skip `count` batches, unless it knows where to begin."""
    if not is_tracked(loader):
        return False
    data: TrainingData = vars(loader).get("base_dataloader", loader)._data
    data.skip = count * max(1, data.reading.group) if data.resumed is None else 0
    return True


def reading_of(loader: Any) -> Reading:
    """How `loader` reads: one of torch's, one of accelerate's, or another that is iterated as a whole."""
    kind = type(loader).__name__
    if kind == "DataLoaderShard":
        return Reading(loader, 1)
    if kind == "DataLoaderDispatcher":
        group = 1 if loader.split_batches else int(loader.state.num_processes)
        return Reading(loader, group, fetches=int(loader.state.process_index) == 0, dispatches=True)
    return Reading() if isinstance(loader, DataLoader) else Reading(loader)


def track(loader: Any, data: TrainingData) -> Any:
    """Have the passes over `loader` go through `data`. Returns what is to be iterated in its place; itself, mostly.

    A loader that is neither torch's nor one of accelerate's is left as it is.
    """
    data.reading = reading_of(loader)
    if data.reading.outer is not None and type(loader).__name__ not in OF_ACCELERATE:
        return loader
    if is_tracked(loader):  # one that the program keeps
        vars(vars(loader).get("base_dataloader", loader))["_data"] = data
    elif data.reading.outer is not None:
        loader.base_dataloader = TrackedLoader(loader.base_dataloader, data, lambda: int(loader.iteration))
    else:
        return TrackedLoader(loader, data, lambda: data.place.epoch)
    return loader
