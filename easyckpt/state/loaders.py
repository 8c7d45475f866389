"""What easyckpt has to know about torch's data loaders: their parts, skipping batches, seeding workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from easyckpt.state.generators import seed_host_generators
from easyckpt.state.sampler import SkipBatchSampler

_END = object()


def is_map_style(loader: Any) -> bool:
    """Whether batches are named by indices, so that they can be skipped without being read."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _parts(loader: Any) -> Iterator[tuple[str, Any]]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    yield "loader", loader
    yield "dataset", getattr(loader, "dataset", None)
    yield "sampler", getattr(loader, "sampler", None)
    yield "batch_sampler", batch_sampler
    yield "batch_sampler.sampler", getattr(batch_sampler, "sampler", None)


def own_generators(loader: Any) -> dict[str, torch.Generator]:
    """The generators that belong to the loader and its parts, by the part's name."""
    found: dict[str, torch.Generator] = {}
    for part, value in _parts(loader):
        generator = getattr(value, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is known for known in found.values()):
            found[part] = generator
    return found


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to every part that wants to know it."""
    done: list[Any] = []
    for _, value in _parts(loader):
        setter = getattr(value, "set_epoch", None)
        if callable(setter) and not any(value is other for other in done):
            setter(epoch)
            done.append(value)


def skip_sampler(loader: Any) -> SkipBatchSampler | None:
    """The loader's sampler where it is one of ours."""
    for part in ("batch_sampler", "sampler"):
        if isinstance(sampler := getattr(loader, part, None), SkipBatchSampler):
            return sampler
    return None


class IndexBatches:
    """Yields what `sampler` yields from number `skip` on.

    `at_start` is called before the first index is drawn, `behind` after the skipped ones were. With `seeds` each
    element carries the seed for its batch to the worker process that fetches it.
    """

    def __init__(
        self,
        sampler: Any,
        skip: int,
        at_start: Callable[[], None],
        behind: Callable[[], None],
        seeds: Callable[[int], int] | None,
    ) -> None:
        self.sampler, self.skip = sampler, skip
        self.at_start, self.behind, self.seeds = at_start, behind, seeds

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        # A generator function: a loader with workers makes two iterators of its sampler and uses the second only.
        self.at_start()
        if isinstance(self.sampler, SkipBatchSampler):
            elements = self.sampler.iterate_from(self.skip)
        else:
            elements = iter(self.sampler)
            for _ in range(self.skip):
                if next(elements, _END) is _END:
                    break
        self.behind()
        for number, element in enumerate(elements, start=self.skip):
            yield element if self.seeds is None else _Seeded(element, self.seeds(number))


class _Seeded:
    """Indices on their way to a worker. Unpickling them there seeds its generators and leaves the bare indices.

    So neither the data set nor the collate function sees anything new, and nothing happens in the main process. The
    worker unpickles a batch's indices immediately before it fetches that batch.
    """

    def __init__(self, indices: Any, seed: int) -> None:
        self.indices, self.seed = indices, seed

    def __reduce__(self) -> tuple[Callable[[Any, int], Any], tuple[Any, int]]:
        return _arrive, (self.indices, self.seed)


def _arrive(indices: Any, seed: int) -> Any:
    if get_worker_info() is not None:
        seed_host_generators(seed)
    return indices


def open_iterator(loader: DataLoader[Any], batches: IndexBatches) -> Iterator[Any]:
    """``iter(loader)``, with `batches` as its sampler; the loader itself is as before when this returns."""
    persistent = getattr(loader, "_iterator", None)
    if persistent is not None:  # persistent workers: the iterator is used again and keeps the sampler that it has
        plain, persistent._index_sampler = persistent._index_sampler, batches
        try:
            return iter(loader)
        finally:
            persistent._index_sampler = plain
    # DataLoader refuses to have its samplers assigned, hence through its __dict__.
    part = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    plain = loader.__dict__[part]
    loader.__dict__[part] = batches
    try:
        iterator: Any = iter(loader)
    finally:
        loader.__dict__[part] = plain
    iterator._index_sampler = plain
    return iterator  # type: ignore[no-any-return]
