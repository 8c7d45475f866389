"""Pins: steps that retention leaves alone. They are set and taken away beside a running job, which needs no lease.

A pin is an empty file, so that it is whole whenever it exists.
"""

from __future__ import annotations

import contextlib

from easyckpt import catalog
from easyckpt.errors import DamagedCheckpoint, UsageError
from easyckpt.format import layout
from easyckpt.format.layout import NamingScheme
from easyckpt.storage.base import Storage


def pin(storage: Storage, naming: NamingScheme, step: int) -> bool:
    """Keep `step` from retention, durably; False where it was pinned already.

    Once this has returned, the checkpoint is there and stays, whatever a job does on the root at the same time. Raises
    UsageError where `step` is not committed, or was rotated away at this very moment, DamagedCheckpoint where it is not
    valid; nothing is pinned then.
    """
    _check(storage, naming, step)
    new = step not in catalog.pinned_steps(storage)
    storage.makedirs(layout.PINS)
    storage.append(layout.pin_file(step), b"")
    storage.sync_dir(layout.PINS)
    try:
        # Retention renames first and reads the pins then: it has seen this one, or the step is gone by now.
        _check(storage, naming, step)
    except (UsageError, DamagedCheckpoint):
        if new:
            unpin(storage, step)
        raise
    return new


def unpin(storage: Storage, step: int) -> bool:
    """Leave `step` to retention again, durably; False where it was not pinned."""
    if step not in catalog.pinned_steps(storage):
        return False
    with contextlib.suppress(FileNotFoundError):
        storage.remove(layout.pin_file(step))
    storage.sync_dir(layout.PINS)
    return True


def _check(storage: Storage, naming: NamingScheme, step: int) -> None:
    name = naming.committed(step)
    if not storage.exists(name):
        raise UsageError(f"{storage.root}: no checkpoint of step {step} is committed in it; nothing is pinned")
    entry = catalog.inspect(storage, name, naming)
    if not entry.valid:
        raise DamagedCheckpoint(f"{storage.root}: {name} is not valid ({entry.problem}); nothing is pinned")
