"""Pins: steps that retention leaves alone. They are set and taken away beside a running job, which needs no lease.

A pin is an empty file, so that it is whole whenever it exists. Whoever makes the file has set the pin; others find it
set. It is taken back by who has made it alone, and only once the step is gone for good: until then others may rely on
it, who have looked at the step a moment earlier or later.
"""

from __future__ import annotations

import time

from easyckpt import catalog
from easyckpt.errors import DamagedCheckpoint, UsageError
from easyckpt.format import layout
from easyckpt.format.layout import NamingScheme
from easyckpt.storage.base import Storage

#: How long a retention is waited for that has the step in its hands, and between two looks.
_WAIT_SECONDS, _POLL_SECONDS = 10.0, 0.05


def pin(storage: Storage, naming: NamingScheme, step: int) -> bool:
    """Keep `step` from retention, durably; False where it was pinned already.

    Of several callers at once, one gets True. Once this has returned, the checkpoint is there and stays, whatever a
    job, or another `pin`, does on the root at the same time. Raises UsageError where `step` is not committed, or was
    rotated away at this very moment, DamagedCheckpoint where it is not valid; nothing is pinned then.

    A step that is in the trash is waited for, 10 s at the most; then UsageError is raised as well, and the pin stays,
    for the step may come back.
    """
    _check(storage, naming, step)
    storage.makedirs(layout.PINS)
    new = storage.create_empty(layout.pin_file(step))
    storage.sync_dir(layout.PINS)  # whoever has made it may not have come to this
    # Retention renames first and reads the pins then: it has seen this one and gives the name back, or the step goes.
    if not _stays(storage, naming, step):
        if new:
            unpin(storage, step)
        raise _not_committed(storage, step)
    return new


def _stays(storage: Storage, naming: NamingScheme, step: int) -> bool:
    """Whether `step`, which is pinned now, is there; waits while it is in the trash, where that is not decided."""
    name = naming.committed(step)
    deadline = time.monotonic() + _WAIT_SECONDS
    while not storage.exists(name):
        in_trash = any(naming.parse_trash(there) == name for there in storage.listdir(""))
        if not in_trash:
            return storage.exists(name)  # it may have come back while the names were listed
        if time.monotonic() > deadline:
            raise UsageError(
                f"{storage.root}: step {step} is being removed and is still there in part. It is pinned if it comes "
                "back: `easyckpt ls` tells"
            )
        time.sleep(_POLL_SECONDS)
    return True


def unpin(storage: Storage, step: int) -> bool:
    """Leave `step` to retention again, durably; False where it was not pinned. Of several callers, one gets True."""
    if step not in catalog.pinned_steps(storage):
        return False
    try:
        storage.remove(layout.pin_file(step))
    except FileNotFoundError:
        changed = False
    else:
        changed = True
    storage.sync_dir(layout.PINS)
    return changed


def _check(storage: Storage, naming: NamingScheme, step: int) -> None:
    name = naming.committed(step)
    if not storage.exists(name):
        raise _not_committed(storage, step)
    entry = catalog.inspect(storage, name, naming)
    if not entry.valid:
        if not storage.exists(name):  # renamed while it was looked at
            raise _not_committed(storage, step)
        if entry.kind == "foreign":
            raise UsageError(f"{storage.root}: {name} was written without easyckpt, which never removes it")
        raise DamagedCheckpoint(f"{storage.root}: {name} is not valid ({entry.problem}); nothing is pinned")


def _not_committed(storage: Storage, step: int) -> UsageError:
    return UsageError(f"{storage.root}: no checkpoint of step {step} is committed in it; nothing is pinned")
