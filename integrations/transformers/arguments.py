"""The Trainer's arguments that decide which batches come, and which of them a resumed training has otherwise.

They are the program's to change, as with the Trainer alone: it is only said what that means.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

_log = logging.getLogger("easyckpt")

#: How many ranks there are is the engine's to look at: of another number nothing is resumed.
_NAMES = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "dataloader_num_workers",
)  # fmt: skip


def kept(args: Any) -> dict[str, Any]:
    """What a checkpoint has of them."""
    return {name: getattr(args, name) for name in _NAMES if hasattr(args, name)}


def warn_of_changes(before: Mapping[str, Any] | None, args: Any) -> None:
    """`before`: what was kept; None in checkpoints of the time when nothing was."""
    now = kept(args)
    changed = [f"{name} {old!r} -> {now[name]!r}" for name, old in (before or {}).items() if now.get(name, old) != old]
    if changed:
        _log.warning(
            "arguments were changed since the checkpoint was made: %s. Training goes on with the new ones, and is not "
            "the training that was stopped: other batches come, or other random numbers are drawn for them",
            ", ".join(changed),
        )
