"""Where every data loader of the job stands, and how it gets there again.

What comes back exactly (order, the data's own randomness, and every later draw from a global generator):

- map-style loaders, shuffled by torch or by `SkipBatchSampler`, read in the main process or by workers, with or
  without ``persistent_workers``. Consumed batches are skipped as indices; the data set is not touched. A sampler
  may draw from a global generator when its iteration starts (torch's do), not in between batches.
- randomness in worker processes: Python's, NumPy's and torch's global generators are seeded anew before each batch,
  from the state at the epoch's start, the epoch, the batch's number and the rank.
- iterables: consumed batches are read again and dropped. Exact as long as what is read follows from the generators'
  state at the start of the pass; an iterator that can be iterated once only counts as one pass.

What does not: ``in_order=False``; iterable data sets in persistent workers that draw random numbers; generators
that a data set keeps to itself (of worker processes; in the main process a torch generator called
``dataset.generator`` is looked after); one ``generator=`` shared by loaders with workers whose loops are nested;
batches that a loader's subclass fetches ahead in the main process.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from easyckpt.errors import ConfigError, StateMismatch, UsageError
from easyckpt.state.components import Saved
from easyckpt.state.generators import host_generators, set_host_generators
from easyckpt.state.loaders import IndexBatches, is_map_style, open_iterator, own_generators, set_epoch, skip_sampler
from easyckpt.state.objects import ForeignComponent
from easyckpt.state.positions import Position, parse_positions
from easyckpt.state.sampler import place_in_group

_log = logging.getLogger("easyckpt")
_END = object()


class DataPosition:
    """The batches consumed per loader name; ``ckpt.batches`` is its `batches`, and it is a component of the state."""

    def __init__(self) -> None:
        self._positions: dict[str, Position] = {}
        self._moved = True
        """A batch was handed out since the last load: from then on the job is where the snapshot was, and past it."""
        self.on_batch: Callable[[str, Any], None] | None = None
        """Hears of each batch, with its loader's name, before it is handed out."""
        self._settled: list[torch.Generator] = []
        """Loaders' own generators that were put where the snapshot had them (loaders may share one)."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors; cheap enough for every step."""
        return {name: position.state() for name, position in self._positions.items()}

    def generators(self) -> Iterator[tuple[str, torch.Generator]]:
        """The loaders' own generators, which are part of the state, by name."""
        for name, position in self._positions.items():
            for part, generator in position.live.items():
                yield f"{part} of the loader {name}", generator

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `state`; loops that are running end with an error when they are advanced."""
        try:
            loaded = parse_positions(state)
        except ValueError as error:
            raise StateMismatch(f"this is not the state of a data position: {error}") from error
        self._positions, self._moved, self._settled = loaded, False, []

    def batches(
        self,
        loader: Any,
        epoch: int,
        name: str = "train",
        restore_generators: Callable[[], None] | None = None,
    ) -> Iterator[Any]:
        """Iterate `loader`'s batches of `epoch` that were not consumed yet; one is consumed when it is handed out.

        Nothing is yielded for an epoch that was finished, or given up for a later one. Each pass over the data needs
        a higher epoch number than the one before, each loader a name of its own. `restore_generators` puts all global
        generators where the loaded snapshot had them; it is called at the place in the program where the snapshot
        was taken: behind the skipped batches and before the next one's data is fetched.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ConfigError(f"epoch: must be an integer from 0 on, not {epoch!r}")
        position = self._positions.setdefault(name, Position())
        fresh, own = position.fresh, own_generators(loader)
        if epoch >= position.epoch:
            position.fresh = False
        if epoch == position.epoch and fresh:
            self._settle(own, position.own)
        if epoch < position.epoch or (epoch == position.epoch and position.finished):
            self._pass_over(position, epoch, name, restore_generators)
            return
        resumed = epoch == position.epoch and position.consumed > 0
        total = _check(loader, name, position if resumed else None)
        position.live, position.loops = own, position.loops + 1
        if not resumed:
            position.epoch, position.consumed, position.finished, position.total = epoch, 0, False, total
            position.own = {}
        set_epoch(loader, epoch)
        opening = _Opening(self, position, loader, own, resumed, restore_generators)
        yield from self._hand_out(opening.iterator(name, fresh), position, name, loader)

    def _hand_out(self, iterator: Iterator[Any], position: Position, name: str, loader: Any) -> Iterator[Any]:
        loop, sampler = position.loops, skip_sampler(loader)
        for batch in iterator:
            position.consumed += 1
            if sampler is not None:
                sampler.consumed = position.consumed  # it has counted the batches prefetched as well
            self._moved = True
            if self.on_batch is not None:
                self.on_batch(name, batch)
            yield batch
            if position is not self._positions.get(name):
                raise UsageError(f"a checkpoint was loaded inside a loop over batches({name!r}): leave the loop first")
            if position.loops != loop:
                raise UsageError(
                    f"another loop over batches(…, name={name!r}) was begun inside this one: give each loader a name "
                    'of its own, for instance ckpt.batches(eval_loader, epoch, name="eval")'
                )
        position.finished = True

    def _pass_over(
        self, position: Position, epoch: int, name: str, restore_generators: Callable[[], None] | None
    ) -> None:
        if position.loops > 0:
            _log.warning(
                "batches(%r): epoch %d is over, nothing is iterated; each pass over the data needs a higher epoch "
                "number than the one before, and each loader a name of its own",
                name, epoch,
            )  # fmt: skip
        if epoch == position.epoch and not self._moved and restore_generators is not None:
            restore_generators()  # what the program drew on its way here was drawn before the snapshot already

    def _settle(self, own: Mapping[str, torch.Generator], states: Mapping[str, torch.Tensor]) -> None:
        for part, generator in own.items():
            if part in states and not any(generator is settled for settled in self._settled):
                generator.set_state(states[part])
                self._settled.append(generator)


@dataclass(slots=True)
class _Opening:
    """The beginning of one loop: generators to the epoch's start, iterator, skipping, generators back."""

    owner: DataPosition
    position: Position
    loader: Any
    own: dict[str, torch.Generator]
    resumed: bool
    restore: Callable[[], None] | None
    before: dict[str, Any] = field(default_factory=host_generators)
    own_before: dict[str, torch.Tensor] = field(init=False)
    seed_base: bytes = b""

    def __post_init__(self) -> None:
        self.own_before = {part: generator.get_state() for part, generator in self.own.items()}

    def iterator(self, name: str, fresh: bool) -> Iterator[Any]:
        if not is_map_style(self.loader):
            return self._read_and_drop(fresh)
        sampler = self.loader.batch_sampler if self.loader.batch_sampler is not None else self.loader.sampler
        seeds = (lambda number: self._seed(name, number)) if self.loader.num_workers > 0 else None
        skip = self.position.consumed if self.resumed else 0
        return open_iterator(self.loader, IndexBatches(sampler, skip, self._at_start, self._behind, seeds))

    def _read_and_drop(self, fresh: bool) -> Iterator[Any]:
        self._at_start()
        iterator: Iterator[Any] = iter(self.loader)
        if self._persistent() and not self.resumed:
            self._put_back()
        # an iterator given as the loader stands where it was left, unless it was made anew after a load
        skip = self.position.consumed if self.resumed and (fresh or iterator is not self.loader) else 0
        for _ in range(skip):
            if next(iterator, _END) is _END:
                break
        self._behind()
        return iterator

    def _at_start(self) -> None:
        """When the epoch's first index is about to be drawn."""
        if self.resumed:
            set_host_generators(self.position.start)
            self._set_own(self.position.own_start)
            return
        if self._persistent():
            self._put_back()
        self.position.start = host_generators()
        self.position.own_start = {part: generator.get_state() for part, generator in self.own.items()}

    def _behind(self) -> None:
        """When the consumed batches were skipped and the next one's indices are about to be drawn."""
        if not self.resumed:
            return
        if self.owner._moved or self.restore is None:
            set_host_generators(self.before)
        else:
            self.restore()
        # Indices that a sampler drew ahead for workers are about to be drawn again, so there the generator has to
        # stay where skipping left it; elsewhere it goes where it was, for other loaders may draw from it as well.
        if not (is_map_style(self.loader) and self.loader.num_workers > 0):
            self._set_own(self.own_before)

    def _put_back(self) -> None:
        # A loader draws a seed for its workers only when it makes them. With persistent workers that is once in a
        # process, so a resumed process would draw one number more than one that went straight on: undone in both.
        set_host_generators(self.before)
        self._set_own(self.own_before)

    def _set_own(self, states: Mapping[str, torch.Tensor]) -> None:
        for part, generator in self.own.items():
            if part in states:
                generator.set_state(states[part])
                self.owner._settled.append(generator)

    def _persistent(self) -> bool:
        return bool(getattr(self.loader, "persistent_workers", False))

    def _seed(self, name: str, number: int) -> int:
        if not self.seed_base:
            states = (self.position.start["torch"], *self.position.own_start.values())
            self.seed_base = b"".join(hashlib.blake2b(bytes(state.tolist())).digest() for state in states)
        place = f"{name}/{self.position.epoch}/{number}/{place_in_group()[0]}"
        digest = hashlib.blake2b(self.seed_base + place.encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little") >> 1


class DataComponent(ForeignComponent):
    """A `DataPosition`: what cannot be its state is found before anything is applied."""

    @override
    def check(self, saved: Saved, *, strict: bool) -> list[str]:
        try:
            parse_positions(saved.decode(saved.dynamic, saved.stand_in))
        except ValueError as error:
            raise saved.damaged(str(error)) from error
        return []


def _check(loader: Any, name: str, resumed: Position | None) -> int | None:
    """The loader's batches per epoch where that is certain; refuses one that cannot be the loader of `resumed`."""
    if not is_map_style(loader):
        return None
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        _log.warning("batches(%r): the loader has in_order=False, so its batches cannot be resumed exactly", name)
    try:
        total = len(loader)
    except (TypeError, NotImplementedError):
        return None
    if resumed is not None and resumed.total not in (None, total):
        raise StateMismatch(
            f"loader {name!r} has {total} batches per epoch, but had {resumed.total} when the checkpoint was made in "
            f"the middle of epoch {resumed.epoch}: its {resumed.consumed} consumed batches cannot be told from the "
            "rest. Use the same data, batch size and number of ranks, or another name= to start the epoch anew"
        )
    return total
