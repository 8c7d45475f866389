"""How checkpoints that do not stay go; which ones these are is said by `policy`.

A checkpoint leaves in two steps: renamed to the trash, where nothing ever looks for a candidate, and only then
deleted. So a crash in between leaves either a whole checkpoint or something that the next retention removes.

A pin may be set at any moment, by another process. Pins are read for the decision, and once more after the renames: a
step that was pinned in between gets its name back. Whoever pins looks at the step again once the pin is durable, so a
pin that was reported as set was either seen here or belongs to a step that is still there (`pins`). A crash may come
before the name is given back: whoever empties the trash later does it then.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from easyckpt import catalog, failpoints
from easyckpt.catalog import Catalog, Entry
from easyckpt.errors import EasyckptError, FormatError, StorageError
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
    """Remove what :func:`decide` says, and the trash. Returns what went. Called after a commit; raises as `remove`."""
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
    """Remove `going` and `trash`, but for what is pinned meanwhile. Returns those of `going` that went.

    Everything is moved to the trash before anything is deleted, and one directory that cannot be removed keeps no
    other from going; the first such error is raised at the end. `check_lease` is asked before each change: what it
    raises ends this at once.
    """
    nonce = secrets.token_hex(8)
    failures: list[OSError | EasyckptError] = []
    moved: dict[str, Entry] = {}
    for entry in going:
        check_lease()
        name = naming.trash(entry.name, nonce)
        if _rename(storage, entry.name, name, failures):
            moved[name] = replace(entry, name=name, kind="trash")
    kept = (
        _empty(storage, naming, [*moved.values(), *trash], failures, check_lease=check_lease) if moved or trash else []
    )
    if failures:
        raise failures[0]
    return [entry for entry in going if naming.trash(entry.name, nonce) in moved.keys() - set(kept)]


def empty_trash(
    storage: Storage,
    naming: NamingScheme,
    trash: Sequence[Entry],
    *,
    check_lease: Callable[[], None],
    busy: Callable[[], None] = lambda: None,
) -> None:
    """Delete `trash`; a pinned step in it gets its name back instead. Errors are raised as by `remove`.

    `busy` is called as this gets on.
    """
    failures: list[OSError | EasyckptError] = []
    _empty(storage, naming, trash, failures, check_lease=check_lease, busy=busy)
    if failures:
        raise failures[0]


def _rename(storage: Storage, name: str, trash: str, failures: list[OSError | EasyckptError]) -> bool:
    failpoints.hit(RENAME_BEFORE)
    try:
        storage.rename(name, trash)
    except (OSError, StorageError) as error:
        failures.append(error)
        return False
    failpoints.hit(RENAME_AFTER)
    return True


def _empty(
    storage: Storage,
    naming: NamingScheme,
    trash: Sequence[Entry],
    failures: list[OSError | EasyckptError],
    *,
    check_lease: Callable[[], None],
    busy: Callable[[], None] = lambda: None,
) -> list[str]:
    """Returns the names in the trash of what is pinned, and so was not deleted."""
    pinned = catalog.pinned_steps(storage)
    kept = []
    for entry in trash:
        if entry.step in pinned and (name := naming.parse_trash(entry.name)) is not None:
            check_lease()
            try:
                if not storage.exists(name) and _is_complete(storage, entry.name):
                    kept.append(entry.name)
                    storage.rename(entry.name, name)
            except (OSError, StorageError) as error:
                kept.append(entry.name)  # the next one tries again
                failures.append(error)
    storage.sync_dir("")  # nothing is deleted that could be back under its name after a power cut
    for entry in trash:
        if entry.name not in kept:
            failpoints.hit(DELETE)
            check_lease()
            try:
                storage.remove_tree(entry.name)
            except (OSError, StorageError) as error:
                failures.append(error)
            busy()
    return kept


def _is_complete(storage: Storage, name: str) -> bool:
    """Whether the deletion of `name` has not begun: a pin whose setting was cut short may be younger than that."""
    try:
        manifest = catalog.read_manifest(storage, name)
    except FileNotFoundError:
        return False
    except FormatError:
        return True  # damaged, and pinned: that is for people to look at
    return all(storage.exists(f"{name}/{file}") for file in manifest.files)
