"""A batch sampler whose order follows from seed and epoch, so that any place in it can be found again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch.utils.data import Sampler

from easyckpt.errors import ConfigError, StateMismatch


class SkipBatchSampler(Sampler[list[int]]):
    """Batches of indices in an order that seed and epoch alone decide; consumed batches are skipped unread.

    Give it to a loader as ``batch_sampler=`` and iterate with ``ckpt.batches(loader, epoch)``, which sets the epoch
    and starts behind the batches that were consumed before the checkpoint. No global generator is drawn from.

    **Ranks.** Batch ``b`` of rank ``r`` of ``W`` takes every ``W``-th index of the order from ``r`` on, so all ranks
    together read one stretch of the order per step, whatever ``W`` is, as long as ``batch_size * W`` stays. Every
    rank yields batches of equal number and size. With ``drop_last=False`` the order is padded to a multiple of ``W``
    by repeating it from its own beginning; with ``drop_last=True`` nothing is repeated and the tail that does not
    fill a batch on every rank is left out. ``rank`` and ``world_size`` come from the initialised process group,
    else from the environment (RANK, WORLD_SIZE), else they are 0 and 1.

    **Without ckpt.batches** it can be a component of the state by itself: ``state_dict`` counts the batches handed
    out since ``set_epoch``, and after ``load_state_dict`` the next iteration of the same epoch begins behind them.
    The order is then exact for loaders with ``num_workers=0``; worker processes are handed batches ahead of time, which
    only ``ckpt.batches`` can tell from consumed ones. What a loader draws from torch's generator when its iterator is
    made, it draws once more after a load.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        default_rank, default_world_size = place_in_group()
        self.length = _at_least(0, "length", length)
        self.batch_size = _at_least(1, "batch_size", batch_size)
        self.shuffle = bool(shuffle)
        self.seed = _at_least(None, "seed", seed)
        self.drop_last = bool(drop_last)
        self.world_size = _at_least(1, "world_size", default_world_size if world_size is None else world_size)
        self.rank = _at_least(0, "rank", default_rank if rank is None else rank)
        if self.rank >= self.world_size:
            raise ConfigError(f"rank: {self.rank} is not below world_size {self.world_size}")
        self.epoch = 0
        self.consumed = 0
        """Batches of this epoch handed out; under ``ckpt.batches`` those that the training loop received."""
        self._start = 0

    def __len__(self) -> int:
        """Batches per epoch on this rank (the same number on every rank)."""
        if self.drop_last:
            return self.length // (self.batch_size * self.world_size)
        return (self._samples() + self.batch_size - 1) // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; another one than the current starts at its first batch."""
        epoch = _at_least(0, "epoch", epoch)
        if epoch != self.epoch:
            self.epoch, self.consumed, self._start = epoch, 0, 0

    def __iter__(self) -> Iterator[list[int]]:
        # The place to start at is taken when the first batch is asked for: a loader with workers makes two
        # iterators and uses the second only.
        yield from self.iterate_from(self._start)

    def iterate_from(self, start: int) -> Iterator[list[int]]:
        """Batches of the current epoch from number `start` on."""
        order = self._order()
        self._start, self.consumed = 0, min(start, len(self))
        for number in range(start, len(self)):
            first = number * self.batch_size
            last = min(first + self.batch_size, self._samples())
            places = torch.arange(first, last, device="cpu") * self.world_size + self.rank
            self.consumed = number + 1
            yield order[places % self.length].tolist()

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches consumed, and the settings that the order follows from."""
        return {"epoch": self.epoch, "consumed": self.consumed, "settings": self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; a sampler that would give another order is refused, nothing changed."""
        theirs, ours = dict(state["settings"]), self._settings()
        differing = [f"{key} {theirs.get(key)!r} -> {ours[key]!r}" for key in ours if theirs.get(key) != ours[key]]
        if differing:
            raise StateMismatch(
                f"SkipBatchSampler was saved with other settings ({', '.join(differing)}), so its place in the epoch "
                "means nothing here: restore the settings, or leave the sampler out of the components that are loaded"
            )
        self.epoch, self.consumed = int(state["epoch"]), int(state["consumed"])
        self._start = self.consumed

    def _settings(self) -> dict[str, Any]:
        names = ("length", "batch_size", "shuffle", "seed", "drop_last", "world_size")
        return {name: getattr(self, name) for name in names}

    def _samples(self) -> int:
        """Indices that one rank reads in an epoch."""
        if self.drop_last:
            return len(self) * self.batch_size
        return (self.length + self.world_size - 1) // self.world_size

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length, device="cpu")
        # Hashed rather than added: else epoch 1 of seed 0 would be epoch 0 of seed 1.
        digest = hashlib.blake2b(f"{self.seed}/{self.epoch}".encode(), digest_size=4).digest()
        generator = torch.Generator()
        generator.manual_seed(int.from_bytes(digest, "little"))
        return torch.randperm(self.length, generator=generator, device="cpu")


def place_in_group() -> tuple[int, int]:
    """(rank, world size) of the initialised process group, else of the environment, else of one process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise ConfigError(f"rank: RANK and WORLD_SIZE in the environment must be numbers ({error})") from None


def _at_least(least: int | None, name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: must be an integer, not {value!r}")
    if least is not None and value < least:
        raise ConfigError(f"{name}: must be at least {least}, not {value}")
    return value
