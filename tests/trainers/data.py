"""Data made on the spot: what a training can read, and where the randomness in it comes from."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

TOKENS = 64
LENGTH = 16
IGNORED = -100

Item = dict[str, torch.Tensor]


def sequences(count: int, lengths: tuple[int, int] = (LENGTH, LENGTH), seed: int = 0) -> list[torch.Tensor]:
    """Random sequences of tokens; token 0 is kept for padding and masking."""
    generator = torch.Generator().manual_seed(seed)
    shortest, longest = lengths
    sizes = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(1, TOKENS, (size,), generator=generator) for size in sizes]


class Sequences(Dataset[Item]):
    """The same items at each reading."""

    def __init__(self, count: int, lengths: tuple[int, int] = (LENGTH, LENGTH), seed: int = 0) -> None:
        self.items = sequences(count, lengths, seed)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return {"input_ids": self.items[index], "labels": self.items[index]}


class NoisySequences(Sequences):
    """An item is another one at each reading: all three global generators have a part in it."""

    def __getitem__(self, index: int) -> Item:
        tokens = disturbed(self.items[index])
        return {"input_ids": tokens, "labels": tokens}


def disturbed(tokens: torch.Tensor) -> torch.Tensor:
    """A copy with three tokens drawn anew, one by each of the global generators."""
    tokens = tokens.clone()
    tokens[int(torch.randint(len(tokens), ()))] = int(torch.randint(1, TOKENS, ()))
    tokens[random.randrange(len(tokens))] = random.randrange(1, TOKENS)
    tokens[np.random.randint(len(tokens))] = np.random.randint(1, TOKENS)
    return tokens


class Stream(IterableDataset[Item]):
    """Yields the same items in each pass; workers share them."""

    def __init__(self, count: int) -> None:
        self.items = sequences(count)

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        order = self.order()
        for index in order if worker is None else order[worker.id :: worker.num_workers]:
            yield {"input_ids": self.items[index], "labels": self.items[index]}

    def order(self) -> list[int]:
        return list(range(len(self.items)))


class EpochStream(Stream):
    """Its order is decided by the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return torch.randperm(len(self.items), generator=torch.Generator().manual_seed(self.epoch)).tolist()


class DrawnStream(Stream):
    """Draws its order from torch's generator at the beginning of each pass, and noise on the way."""

    def __iter__(self) -> Iterator[Item]:
        for item in super().__iter__():
            tokens = disturbed(item["input_ids"])
            yield {"input_ids": tokens, "labels": tokens}

    def order(self) -> list[int]:
        return torch.randperm(len(self.items)).tolist()


class Padding:
    """Batches of sequences of different lengths."""

    def __call__(self, items: list[Item]) -> Item:
        longest = max(len(item["input_ids"]) for item in items)
        ids = torch.zeros(len(items), longest, dtype=torch.long)
        labels = torch.full((len(items), longest), IGNORED)
        for row, item in enumerate(items):
            ids[row, : len(item["input_ids"])] = item["input_ids"]
            labels[row, : len(item["labels"])] = item["labels"]
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


class Masking:
    """Masked language modelling: torch draws what is masked, Python and NumPy what stands there instead."""

    def __call__(self, items: list[Item]) -> Item:
        ids = torch.stack([item["input_ids"] for item in items])
        labels = ids.clone()
        masked = torch.rand(ids.shape) < 0.4
        masked[:, 1] = True  # a batch without a label has no loss
        labels[~masked] = IGNORED
        ids[masked] = 0
        for row in range(len(ids)):
            ids[row, random.randrange(LENGTH)] = random.randrange(1, TOKENS)
            ids[row, np.random.randint(LENGTH)] = np.random.randint(1, TOKENS)
        return {"input_ids": ids, "labels": labels}
