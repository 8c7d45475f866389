"""Whether training can go on from what the Trainer wrote: to the byte where a manifest of ours has its checksums."""

from __future__ import annotations

import os
from collections.abc import Callable

from easyckpt import catalog
from easyckpt.format.trainer_names import TrainerNaming
from easyckpt.integrations.transformers import stock
from easyckpt.storage.base import Storage
from easyckpt.verification import verify

_NAMING = TrainerNaming()


def problem(storage: Storage, name: str, *, world_size: int, busy: Callable[[], None] = lambda: None) -> str | None:
    """What keeps a job of `world_size` processes from going on from the checkpoint `name`; None: nothing.

    The Trainer's files are as they are without sharding (see `stock`). `busy` is called as reading gets on.
    """
    return committed_problem(storage, name, busy=busy) or stock.problem(
        os.path.join(storage.root, name), world_size=world_size, busy=busy
    )


def committed_problem(storage: Storage, name: str, *, busy: Callable[[], None] = lambda: None) -> str | None:
    """What of the checkpoint `name` is not as its manifest says; None also where it has none."""
    entry = catalog.inspect(storage, name, _NAMING)
    if entry.manifest is None:
        return None if entry.kind == "foreign" else entry.problem
    if entry.problem is not None:
        return entry.problem
    return next((f"{one.file}: {one.message}" for one in verify(storage, entry, lambda _: busy())), None)
