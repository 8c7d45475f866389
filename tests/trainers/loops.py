"""The table of training loops with an Accelerator: what each reads, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.trainers.data import DrawnStream, EpochStream, Masking, NoisySequences, Sequences

SAVE = 4
ITEMS, BATCH = 37, 4


@dataclass(frozen=True)
class Loop:
    """One training: 10 batches a pass on one rank, 5 on each of two."""

    train: Callable[[], list[DataLoader[Any]]]
    until: int = 14
    """It is killed when this step has ended."""
    ranks: int = 1
    epochs: int = 3
    accumulate: int = 1
    loading: dict[str, Any] = field(default_factory=dict)
    """For accelerate's DataLoaderConfiguration."""
    like_plain: bool = True
    """Without easyckpt it is the same to the bit."""

    def loaders(self) -> list[DataLoader[Any]]:
        return self.train()

    def validation(self) -> DataLoader[Any]:
        return DataLoader(Sequences(8, seed=1), batch_size=BATCH)

    def accelerator(self) -> dict[str, Any]:
        from accelerate.utils import DataLoaderConfiguration

        return {"dataloader_config": DataLoaderConfiguration(**self.loading)}


def shuffled(data: type = Sequences, items: int = ITEMS, **more: Any) -> Callable[[], list[DataLoader[Any]]]:
    return lambda: [DataLoader(data(items), batch_size=BATCH, shuffle=True, **more)]


def streamed(data: type, items: int = ITEMS, **more: Any) -> Callable[[], list[DataLoader[Any]]]:
    return lambda: [DataLoader(data(items), batch_size=BATCH, **more)]


def own_generator() -> list[DataLoader[Any]]:
    return shuffled(generator=torch.Generator().manual_seed(3), num_workers=2)()


def two() -> list[DataLoader[Any]]:
    return [*shuffled(collate_fn=Masking())(), *shuffled(NoisySequences)()]


SEEDABLE = {"use_seedable_sampler": True}

LOOPS = {
    "base": Loop(shuffled()),
    "mlm": Loop(shuffled(collate_fn=Masking())),
    "mlm_boundary": Loop(shuffled(collate_fn=Masking()), until=21),
    "mlm_first": Loop(shuffled(collate_fn=Masking()), until=5),
    "mlm_last_batch": Loop(shuffled(collate_fn=Masking()), until=29),
    "mlm_accumulated": Loop(shuffled(collate_fn=Masking()), until=7, accumulate=3),
    "mlm_w2": Loop(shuffled(collate_fn=Masking(), num_workers=2), like_plain=False),
    "noise": Loop(shuffled(NoisySequences)),
    "noise_w2": Loop(shuffled(NoisySequences, num_workers=2), like_plain=False),
    "noise_w2_pers": Loop(shuffled(NoisySequences, num_workers=2, persistent_workers=True), like_plain=False),
    "seedable_mlm": Loop(shuffled(collate_fn=Masking()), loading=SEEDABLE),
    "seedable_w2": Loop(shuffled(num_workers=2), loading=SEEDABLE),
    "own_generator": Loop(own_generator),
    "drawn": Loop(streamed(DrawnStream)),
    "drawn_w2": Loop(streamed(DrawnStream, num_workers=2)),
    "drawn_sharded": Loop(streamed(DrawnStream), loading={"dispatch_batches": False}),
    "epoch_stream": Loop(streamed(EpochStream)),
    "dispatched_map": Loop(shuffled(collate_fn=Masking()), loading={"dispatch_batches": True}),
    "two": Loop(two),
    "ddp_mlm": Loop(shuffled(collate_fn=Masking()), ranks=2, until=9),
    "ddp_boundary": Loop(shuffled(collate_fn=Masking()), ranks=2, until=21, epochs=5),
    "ddp_accumulated": Loop(shuffled(collate_fn=Masking()), ranks=2, until=5, accumulate=2),
    "ddp_noise_w2": Loop(shuffled(NoisySequences, num_workers=2), ranks=2, until=9, like_plain=False),
    "ddp_seedable": Loop(shuffled(collate_fn=Masking()), ranks=2, until=9, loading=SEEDABLE),
    "ddp_split": Loop(shuffled(collate_fn=Masking()), ranks=2, until=14, loading={"split_batches": True}),
    "ddp_drawn": Loop(streamed(DrawnStream), ranks=2, until=9),
    "ddp_drawn_w2": Loop(streamed(DrawnStream, num_workers=2), ranks=2, until=9),
    "ddp_drawn_end": Loop(streamed(DrawnStream, items=35), ranks=2, until=6),
    "ddp_drawn_split": Loop(streamed(DrawnStream), ranks=2, until=14, loading={"split_batches": True}),
    "ddp_drawn_sharded": Loop(streamed(DrawnStream), ranks=2, until=9, loading={"dispatch_batches": False}),
    "ddp_epoch_sharded": Loop(streamed(EpochStream), ranks=2, until=9, loading={"dispatch_batches": False}),
    "ddp_dispatched_map": Loop(shuffled(collate_fn=Masking()), ranks=2, until=9, loading={"dispatch_batches": True}),
}
