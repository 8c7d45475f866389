"""How checkpoints that do not stay go; which ones these are is said by `policy`.

A checkpoint leaves in two steps: renamed to the trash, where nothing ever looks for a candidate, and only then
deleted. So a crash in between leaves either a whole checkpoint or something that the next retention removes.

A pin may be set at any moment, by another process. Pins are read for the decision, and once more after the renames: a
step that was pinned in between gets its name back. Whoever pins looks at the step again once the pin is durable, so a
pin that was reported as set was either seen here or belongs to a step that is still there (`pins`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence

from easyckpt import catalog, failpoints
from easyckpt.catalog import Catalog, Entry
from easyckpt.errors import StorageError
from easyckpt.format.layout import NamingScheme
from easyckpt.saving.policy import Policy, decide
from easyckpt.storage.base import Storage

RENAME_BEFORE = failpoints.declare("retention.rename.before", "an old checkpoint is about to be renamed to the trash")
RENAME_AFTER = failpoints.declare("retention.rename.after", "an old checkpoint is in the trash, not durably")
DELETE = failpoints.declare("retention.delete", "the trash is durable, the next directory in it is about to be deleted")


def apply_retention(
    storage: Storage,
    naming: NamingScheme,
    found: Catalog,
    *,
    policy: Policy,
    held: Collection[int] = (),
    check_lease: Callable[[], None] = lambda: None,
) -> list[Entry]:
    """Remove what :func:`decide` says, and all trash. Returns what went. Called after a commit; raises as `remove`."""
    record = catalog.read_root(storage)
    verdicts = decide(record, found, policy, pinned=catalog.pinned_steps(storage), held=held)
    going = [verdict.entry for verdict in verdicts if verdict.goes]
    return remove(storage, naming, going, trash=found.of_kind("trash"), check_lease=check_lease)


def remove(
    storage: Storage,
    naming: NamingScheme,
    going: Sequence[Entry],
    *,
    trash: Sequence[Entry] = (),
    check_lease: Callable[[], None],
) -> list[Entry]:
    """Remove `going`, but for what is pinned meanwhile, and `trash`. Returns those of `going` that went.

    Everything is moved to the trash before anything is deleted, and one directory that cannot be removed keeps no
    other from going; the first such error is raised at the end. `check_lease` is asked before each change: what it
    raises ends this at once.
    """
    nonce = secrets.token_hex(8)
    failures: list[OSError | StorageError] = []
    moved = []
    for entry in going:
        check_lease()
        if _rename(storage, entry.name, naming.trash(entry.name, nonce), failures):
            moved.append(entry)
    removed = _without_pinned(storage, naming, moved, nonce, check_lease) if moved else []
    if moved:
        storage.sync_dir("")
    for name in [*(naming.trash(entry.name, nonce) for entry in removed), *(entry.name for entry in trash)]:
        failpoints.hit(DELETE)
        check_lease()
        try:
            storage.remove_tree(name)
        except (OSError, StorageError) as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return removed


def _rename(storage: Storage, name: str, trash: str, failures: list[OSError | StorageError]) -> bool:
    failpoints.hit(RENAME_BEFORE)
    try:
        storage.rename(name, trash)
    except (OSError, StorageError) as error:
        failures.append(error)
        return False
    failpoints.hit(RENAME_AFTER)
    return True


def _without_pinned(
    storage: Storage, naming: NamingScheme, moved: Sequence[Entry], nonce: str, check_lease: Callable[[], None]
) -> list[Entry]:
    """Give those that were pinned since the decision their names back; returns the others."""
    pinned = catalog.pinned_steps(storage)
    for entry in moved:
        if entry.step in pinned:
            check_lease()
            storage.rename(naming.trash(entry.name, nonce), entry.name)
    return [entry for entry in moved if entry.step not in pinned]
