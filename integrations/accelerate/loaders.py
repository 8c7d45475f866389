"""The passes over loaders that accelerate has prepared.

These read ahead, and where one rank reads for all the others have nothing to count: so what counts here is which
batches were handed out, while a `TrainingData` below the loader looks after what was read, and its randomness.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from accelerate.data_loader import SeedableRandomSampler

from easyckpt.errors import ConfigError, StateMismatch, UsageError
from easyckpt.integrations.tracked_loader import OF_ACCELERATE, TrackedLoader, is_tracked, reading_of
from easyckpt.integrations.training_data import Place, TrainingData
from easyckpt.state.data_position import DataPosition
from easyckpt.state.generators import host_generators, set_host_generators

_log = logging.getLogger("easyckpt")


def is_prepared(loader: Any) -> bool:
    """Whether `loader` is one of accelerate's."""
    return bool(getattr(loader, "_is_accelerate_prepared", False))


class Loader(TrainingData):
    """Where training is in one prepared loader. `Place.updates` counts the batches that were handed out."""

    def __init__(self, *, rank: int) -> None:
        super().__init__(rank=rank)
        self._begun = True  # it is made when its first pass begins
        self.length: int | None = None
        """Batches of a pass, where that is certain."""
        self.seed: int | None = None
        """What the order of each pass is made of, where the sampler has drawn a seed once for all."""
        self.loops = 0
        """Loops begun in this process; the newest is the only one that may go on."""
        self._over = False

    @property
    def at_end(self) -> bool:
        """The pass is over, or what was handed out last is its last batch."""
        return self._over or super().at_end

    def state_dict(self) -> dict[str, Any]:
        """The position at the end of a step."""
        if self.resumed is None:
            place = super().state_dict()
        else:  # not gone on with yet
            place = {name: getattr(self.resumed, name) for name in Place.__slots__}
        return {**place, "length": self.length, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there."""
        super().load_state_dict(state)
        self.length, self.seed = state["length"], state["seed"]

    def is_behind(self, epoch: int) -> bool:
        """Whether nothing is left of the pass `epoch`."""
        place = self.place
        return bool(epoch < place.epoch or (epoch == place.epoch and place.updates and self._finished()))

    def _finished(self) -> bool:
        return self.resumed.finished if self.resumed is not None else self.at_end

    def iterate(self, loader: Any, epoch: int) -> Iterator[Any]:
        """The batches of the pass `epoch` that were not handed out yet."""
        base = loader.base_dataloader
        self._meet(loader, epoch)
        self.reading = reading_of(loader)
        loader.base_dataloader = TrackedLoader(base, self, lambda: epoch)
        self.awaits_pass = True
        try:
            loader.set_epoch(epoch)
            for batch in loader:
                self.place.updates += 1
                yield batch
            self._over = True
        finally:
            loader.base_dataloader = base

    def _meet(self, loader: Any, epoch: int) -> None:
        """See that `loader` is the one that was loaded, and prepare for its pass."""
        length, resumed = _length(loader), self.resumed
        if resumed is not None and not resumed.finished and resumed.epoch != epoch:
            resumed = self.resumed = None  # given up for a later one
        if resumed is None or resumed.finished:
            self.place = Place(epoch=epoch)
        elif length != self.length:
            raise StateMismatch(
                f"the loader has {length} batches per epoch, but had {self.length} when the checkpoint was made in the "
                f"middle of epoch {epoch}: the {resumed.updates} batches that were trained on cannot be told from the "
                "rest. Use the same data, batch size and number of ranks, or another name= to start the epoch anew"
            )
        self.length, self._over = length, False
        sampler = loader.get_sampler()
        if isinstance(sampler, SeedableRandomSampler):
            if self.seed is not None:
                sampler.initial_seed = self.seed
            self.seed = int(sampler.initial_seed)


class Loaders:
    """All of them, by the names that the program gives them, and the Accelerator's own count: one component."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._by_name: dict[str, Loader] = {}

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors; cheap enough for every step."""
        loaders = {name: loader.state_dict() for name, loader in self._by_name.items()}
        return {"micro_steps": self._accelerator.step, "loaders": loaders}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `state`; loops that are running end with an error when they are advanced."""
        self._accelerator.step = state["micro_steps"]
        self._by_name = {}
        for name, place in state["loaders"].items():
            self._new(name).load_state_dict(place)

    def _new(self, name: str) -> Loader:
        loader = self._by_name[name] = Loader(rank=self._accelerator.process_index)
        return loader

    def batches(
        self, loader: Any, epoch: int, name: str, restore: Callable[[], None], position: DataPosition
    ) -> Iterator[Any]:
        """Iterate `loader`'s batches of `epoch` that were not handed out yet; nothing for an epoch that is over.

        `restore` puts the global generators where the snapshot had them. `position` is the one of plain loaders, which
        knows whether training has moved on since.
        """
        _check(loader, epoch)
        data = self._by_name.get(name) or self._new(name)
        moved = position._moved
        if data.is_behind(epoch):
            if data.loops:
                _log.warning(
                    "batches(%r): epoch %d is over; each pass needs a higher epoch than the one before", name, epoch
                )
            elif epoch == data.place.epoch and not moved:
                restore()  # what the program drew on its way here was drawn before the snapshot already
            return
        data.restore = partial(set_host_generators, host_generators()) if moved else restore
        data.loops += 1
        loop = data.loops
        for batch in data.iterate(loader, epoch):
            position._moved = True
            if position.on_batch is not None:
                position.on_batch(name, batch)
            yield batch
            if self._by_name.get(name) is not data:
                raise UsageError(f"a checkpoint was loaded inside a loop over batches({name!r}): leave the loop first")
            if data.loops != loop:
                raise UsageError(
                    f"another loop over batches(…, name={name!r}) was begun inside this one: give it another name"
                )


def _check(loader: Any, epoch: Any) -> None:
    kind = type(loader).__name__
    if kind not in OF_ACCELERATE or loader.use_stateful_dataloader:
        raise ConfigError(
            f"batches: the position in a {kind} is not known exactly. Prepare a plain torch DataLoader, without "
            "use_stateful_dataloader (which nothing here needs)"
        )
    if is_tracked(loader):
        raise UsageError("batches: this loader is being iterated already: leave that loop first")
    if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
        raise ConfigError(f"epoch: must be an integer from 0 on, not {epoch!r}")


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
