"""Which batches were trained on, and the randomness of those to come: the position in data that are read ahead.

accelerate's loaders read one batch ahead, so at the end of a step the next batch has been made already, with numbers
that the global generators gave for it. A resumed job makes that batch anew: with the generators as they were right
before, and afterwards it goes on with them as they were at the snapshot. So nothing that is drawn differs from a run
that never stopped, nor from one that is not wrapped.

One thing differs from the unwrapped Trainer, since it could not be resumed exactly else: worker processes are seeded
anew for each batch of a data set with indices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from easyckpt.state.generators import host_generators, set_host_generators, try_host_states
from easyckpt.state.loaders import IndexBatches, is_map_style, open_iterator, own_generators

_END = object()


@dataclass(slots=True)
class Place:
    """Where training is in its data."""

    epoch: int = 0
    """The pass over the data, counted as the Trainer does."""
    consumed: int = 0
    """Batches of it that this rank has read and that were trained on."""
    updates: int = 0
    """Optimizer steps in it; the same on all ranks."""
    finished: bool = False
    """The pass is over."""
    start: dict[str, Any] = field(default_factory=dict)
    """The host's generators when the first index of the pass was about to be drawn."""
    own_start: dict[str, torch.Tensor] = field(default_factory=dict)
    """Those that belong to the loader and its parts, by part."""
    ahead: dict[str, Any] = field(default_factory=dict)
    """The host's generators when the batch that was read ahead was about to be made."""
    own_ahead: dict[str, torch.Tensor] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    """The loader's own generators now."""


def require_place(state: Any) -> None:
    """Raise for what is no value of a place."""
    counts = [state[name] for name in ("epoch", "consumed", "updates")]
    if not all(type(count) is int and -1 <= count < 1 << 63 for count in counts) or min(counts[1:]) < 0:
        raise ValueError("a count is none")
    if type(state["finished"]) is not bool:
        raise ValueError("whether the pass is over is not said")
    for name in ("start", "ahead"):
        if state[name] or state["consumed"]:  # else nothing was read yet
            try_host_states(state[name])
    for name in ("own_start", "own_ahead", "own"):
        if not isinstance(state[name], dict):
            raise ValueError("the states of the loader's generators are malformed")
        for own in state[name].values():
            if own.numel() == torch.Generator().get_state().numel():
                torch.Generator().set_state(own)
            elif own.dtype != torch.uint8 or own.dim() != 1:
                raise ValueError("the state of a loader's generator is malformed")


@dataclass(frozen=True, slots=True)
class Reading:
    """How the batches come from the loader to the program."""

    outer: Any = None
    """The loader of accelerate's that iterates; None: the program does."""
    group: int = 0
    """Batches that are read ahead together."""
    fetches: bool = True
    """This rank reads; else another one reads for it."""
    dispatches: bool = False
    """One rank reads for all. The last batch, if it is too small, is filled up from the first that was read."""


class TrainingData:
    """The position, as a component of the state. One loader at a time reports to it."""

    def __init__(self, *, rank: int = 0) -> None:
        self.rank = rank
        self.place = Place()
        self.resumed: Place | None = None
        """Where the next pass is to begin, after a load; None once it has."""
        self.restore: Callable[[], None] = lambda: None
        """Puts the global generators where the snapshot had them."""
        self.awaits_pass = False
        """The next pass over the loader is the training's; others, such as a look at one batch, are not followed."""
        self.cut = False
        """The program leaves the pass before its data end."""
        self._exhausted = True
        self.counted = False
        """The program reads as many batches as a bare loader has, and asks for one more in a resumed pass alone."""
        self.on_batch: Callable[[str, Any], None] | None = None
        """Hears of each batch that is trained on, for an audit."""
        self._untold: list[Any] = []
        self.reading = Reading()
        self.skip = 0
        """Batches that the next pass is to skip where no load of ours says where it begins."""
        self._begun = False
        self._fetched = self._ahead_from = 0
        self._generators: dict[str, torch.Generator] = {}

    @property
    def at_end(self) -> bool:
        """No batch of the pass is left: what was handed out last is its last."""
        outer = self.reading.outer
        return self._exhausted if outer is None else bool(getattr(outer, "end_of_dataloader", False))

    def next_update(self) -> tuple[int, int]:
        """(pass, optimizer steps in it) that training goes on behind after a load."""
        return (self.place.epoch + 1, 0) if self.place.finished else (self.place.epoch, self.place.updates)

    def forget(self) -> None:
        """Training begins anew."""
        self.place, self.resumed, self._begun = Place(), None, False

    def begin_epoch(self) -> None:
        """A pass begins, or is gone on with. Behind one that was finished before a load, with its generators."""
        if self.resumed is None or self.resumed.finished:
            self.place = Place(epoch=self.place.epoch + 1 if self._begun else 0)
        if self.resumed is not None and self.resumed.finished:
            self.restore()
        self._begun, self.awaits_pass, self.cut = True, True, False

    def state_dict(self) -> dict[str, Any]:
        """The position at the end of a step: what was read ahead is not consumed."""
        place = self.place
        if self.resumed is not None:  # nothing was read since the load
            return {name: getattr(place, name) for name in Place.__slots__}
        if not self._begun:  # training goes on with the next pass, which is the first
            return {name: getattr(Place(epoch=-1, finished=True), name) for name in Place.__slots__}
        place.finished = self.at_end or self.cut
        place.consumed = self._fetched if place.finished or not self.reading.group else self._ahead_from
        for part, generator in self._generators.items():
            place.own[part] = generator.get_state()
        return {name: getattr(place, name) for name in Place.__slots__}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there."""
        place = Place(**{name: state[name] for name in Place.__slots__})
        self.place, self.resumed = place, place if place.finished or place.updates else None
        self._fetched = self._ahead_from = place.consumed
        self._begun = True

    def begin_pass(self, loader: Any, epoch: int) -> Iterator[Any]:
        """The batches of the pass `epoch` over `loader`, a torch DataLoader, that were not consumed yet."""
        self.awaits_pass = False
        resumed, self.resumed = self.resumed, None
        own = self._generators = _all_generators(loader)
        goes_on = self.skip > 0 or (resumed is not None and not resumed.finished)
        continues = resumed is not None and resumed.finished
        if resumed is not None and continues:
            _set_all(own, resumed.own)
            resumed = None
        if resumed is None:
            self.place.epoch, self.place.consumed = epoch, self.skip
        self.skip = 0
        self._fetched = self._ahead_from = self.place.consumed
        self._exhausted = False
        self._untold = []
        behind = None if resumed is None else dataclasses.replace(resumed)
        if self.reading.dispatches:
            self.reading.outer.skip_batches = int(goes_on)  # the first, which is read again
        a_pass = _Pass(self, loader, own, behind, continues)
        # Now, not at the first batch: where another rank reads for this one, its generators must come to the same.
        return self._hand_out(a_pass, a_pass.open())

    def _hand_out(self, a_pass: _Pass, batches: Iterator[Any]) -> Iterator[Any]:
        place, group = self.place, self.reading.group
        yield from a_pass.first
        for number in itertools.count():
            if a_pass.resumed is not None and number == group > 0:
                a_pass.set_now()
            if number % max(1, group) == 0:
                place.ahead, place.own_ahead = host_generators(), _states(a_pass.own)
                self._tell()
            batch = next(batches, _END)
            if batch is _END:
                if a_pass.resumed is not None and number < group:  # what was read ahead was the incomplete end
                    a_pass.set_now()
                if a_pass.resumed is not None and not group and self.counted:
                    set_host_generators(place.ahead)
                    _set_all(a_pass.own, place.own_ahead)
                break
            if number % max(1, group) == 0:
                self._ahead_from = self._fetched
            self._fetched += 1
            if self.on_batch is not None:
                self._untold.append(batch)
                if not group:
                    self._tell()
            yield batch
        self._tell()
        self._exhausted = True

    def _tell(self) -> None:
        """Tell of batches that training is about to get: one that was only read ahead is read again after a stop."""
        untold, self._untold = self._untold, []
        for batch in untold:
            assert self.on_batch is not None
            self.on_batch("train", batch)


@dataclass(slots=True)
class _Pass:
    """One pass: the loader's iterator, behind what was consumed."""

    data: TrainingData
    loader: Any
    own: dict[str, torch.Generator]
    resumed: Place | None
    continues: bool
    """It follows a pass that was finished before the load."""
    before: dict[str, Any] = field(default_factory=host_generators)
    own_before: dict[str, torch.Tensor] = field(default_factory=dict)
    first: list[Any] = field(default_factory=list)
    """The first batches of a pass that is gone on with, where they are wanted."""
    seed_base: bytes = b""

    def __post_init__(self) -> None:
        self.own_before = _states(self.own)

    def open(self) -> Iterator[Any]:
        """An iterator that gives the first batch that was not consumed next."""
        if is_map_style(self.loader) and not self.data.reading.dispatches:
            sampler = self.loader.batch_sampler if self.loader.batch_sampler is not None else self.loader.sampler
            seeds = self._seed if self.loader.num_workers > 0 else None
            return open_iterator(self.loader, IndexBatches(sampler, self._skip(), self._at_start, self._behind, seeds))
        self._at_start()
        iterator: Iterator[Any] = iter(self.loader)
        if self.data.reading.dispatches:
            self.first = list(itertools.islice(iterator, min(self.data.reading.group, self._skip())))
        for _ in range(self._skip() - len(self.first)):
            if next(iterator, _END) is _END:
                break
        self._behind()
        return iterator

    def _behind(self) -> None:
        """When what was consumed is skipped, and the first batch that was not is about to be made."""
        if self.resumed is None:
            return
        if self.data.reading.group and self.data.reading.fetches:  # it was made before the snapshot
            set_host_generators(self.resumed.ahead)
            self._set_own(self.resumed.own_ahead)
        else:
            self.set_now()

    def set_now(self) -> None:
        """The generators as the snapshot has them."""
        assert self.resumed is not None
        self.data.restore()
        self._set_own(self.resumed.own)

    def _skip(self) -> int:
        return self.data.place.consumed if self.data.reading.fetches else 0

    def _at_start(self) -> None:
        """When the first index of the pass is about to be drawn."""
        place = self.data.place
        if self.resumed is not None:
            set_host_generators(place.start)
            _set_all(self.own, place.own_start)
            return
        if self.continues and getattr(self.loader, "persistent_workers", False):
            # Making workers draws a number. The run that never stopped made them in its first pass.
            set_host_generators(self.before)
            _set_all(self.own, self.own_before)
        place.start, place.own_start = host_generators(), _states(self.own)

    def _set_own(self, states: Mapping[str, torch.Tensor]) -> None:
        # What a sampler draws ahead for workers is drawn again by skipping: there it stays as that has left it.
        if not (is_map_style(self.loader) and self.loader.num_workers > 0):
            _set_all(self.own, states)

    def _seed(self, number: int) -> int:
        """The seed of a worker for batch `number`."""
        place = self.data.place
        if not self.seed_base:
            states = (place.start["torch"], *place.own_start.values())
            self.seed_base = b"".join(hashlib.blake2b(bytes(state.tolist())).digest() for state in states)
        text = f"train/{place.epoch}/{number}/{self.data.rank}".encode()
        return int.from_bytes(hashlib.blake2b(self.seed_base + text, digest_size=8).digest(), "little") >> 1


def _all_generators(loader: Any) -> dict[str, torch.Generator]:
    """Those of the loader and of all samplers that are in one another.

    accelerate's sampler seeds its own for each pass, and makes it in its first one only: it is no state.
    """
    found: dict[str, torch.Generator] = {}
    level, name, seeded = loader, "loader", None
    for _ in range(5):
        if type(level).__name__ == "SeedableRandomSampler":
            seeded = level.generator
        for part, generator in own_generators(level).items():
            if not any(generator is known for known in found.values()):
                found[f"{name}.{part}"] = generator
        inside = getattr(level, "batch_sampler", None)
        level = getattr(level, "sampler", None) if inside is None else inside
        if level is None:
            break
        name = f"{name}.sampler"
    return {part: one for part, one in found.items() if one is not seeded or one is getattr(loader, "generator", None)}


def _states(generators: Mapping[str, torch.Generator]) -> dict[str, torch.Tensor]:
    return {part: generator.get_state() for part, generator in generators.items()}


def _set_all(generators: Mapping[str, torch.Generator], states: Mapping[str, torch.Tensor]) -> None:
    for part, generator in generators.items():
        if part in states:
            generator.set_state(states[part])
