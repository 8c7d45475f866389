"""What to do about a damaged checkpoint, in words, for the commands that find one."""

from __future__ import annotations

from collections.abc import Sequence

from easyckpt import catalog
from easyckpt.catalog import Entry
from easyckpt.cli.target import Target

_SHOWN = 5


def instead_of(target: Target, entry: Entry) -> str:
    """Which checkpoints could take the place of `entry`, whose bytes nobody has read yet."""
    older = [other for other in catalog.scan(target.storage, target.naming).committed() if other.step < entry.step]
    if not older:
        return f"`easyckpt verify {target.root}` tells what is damaged; there is no older checkpoint"
    return f"older ones: {steps(older)}; `easyckpt verify {target.root}` tells which are whole"


def steps(entries: Sequence[Entry]) -> str:
    """The steps of `entries`, the newest first, shortened where there are many."""
    numbers = sorted((entry.step for entry in entries), reverse=True)
    text = ("step " if len(numbers) == 1 else "steps ") + ", ".join(map(str, numbers[:_SHOWN]))
    return text if len(numbers) <= _SHOWN else f"{text} and {len(numbers) - _SHOWN} more down to {numbers[-1]}"
