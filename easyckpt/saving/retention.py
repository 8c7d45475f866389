"""Which committed checkpoints stay, and how the others go.

A checkpoint leaves in two steps: renamed to the trash, where nothing ever looks for a candidate, and only then
deleted. So a crash in between leaves either a whole checkpoint or something that the next retention removes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence

from easyckpt import catalog, failpoints
from easyckpt.catalog import Catalog, Entry
from easyckpt.errors import StorageError
from easyckpt.format import layout
from easyckpt.format.layout import NamingScheme
from easyckpt.format.manifest import RootRecord
from easyckpt.storage.base import Storage

RENAME_BEFORE = failpoints.declare("retention.rename.before", "an old checkpoint is about to be renamed to the trash")
RENAME_AFTER = failpoints.declare("retention.rename.after", "an old checkpoint is in the trash, not durably")
DELETE = failpoints.declare("retention.delete", "the trash is durable, the next directory in it is about to be deleted")


def keep(
    entries: Sequence[Entry],
    *,
    newest: int | None,
    pinned: Collection[int] = (),
    held: Collection[int] = (),
) -> list[Entry]:
    """Return those of `entries` that go, oldest first. Pure.

    Only valid committed entries are looked at; all others stay and count for nothing. Of those, the `newest` ones
    that are not pinned stay (None: all). Pinned steps stay and do not count; held ones (being read) stay as long as
    they are held. Whatever the numbers say, the newest stays. An entry carries its manifest, and that the step's
    metrics: a policy that keeps the best ones belongs here.
    """
    valid = sorted((entry for entry in entries if entry.kind == "committed" and entry.valid), key=_step)
    if newest is None or not valid:
        return []
    countable = [entry for entry in valid if entry.step not in pinned]
    going = countable[: max(0, len(countable) - newest)]
    return [entry for entry in going if entry is not valid[-1] and entry.step not in held]


def apply_retention(
    storage: Storage,
    naming: NamingScheme,
    found: Catalog,
    *,
    newest: int | None,
    held: Collection[int] = (),
    check_lease: Callable[[], None] = lambda: None,
) -> list[Entry]:
    """Remove what :func:`keep` says, what an automatic fallback has set aside, and all trash. Returns what went.

    Called after a commit. Everything is moved to the trash before anything is deleted, and one directory that cannot
    be removed keeps no other from going; the first such error is raised at the end. `check_lease` is asked before each
    change: what it raises ends this at once.
    """
    record = catalog.read_root(storage)
    line = [entry for entry in found.committed() if record is None or _on_line(record, entry)]
    going = keep(line, newest=newest, pinned=pinned_steps(storage), held=held)
    if record is not None:
        going += [entry for entry in found.of_kind("stale") if _is_replaced(record, entry, line)]
    nonce = secrets.token_hex(8)
    failures: list[OSError | StorageError] = []
    removed = []
    for entry in going:
        check_lease()
        if _rename(storage, entry.name, naming.trash(entry.name, nonce), failures):
            removed.append(entry)
    if removed:
        storage.sync_dir("")
    trash = [naming.trash(entry.name, nonce) for entry in removed]
    for name in [*trash, *(entry.name for entry in found.of_kind("trash"))]:
        failpoints.hit(DELETE)
        check_lease()
        try:
            storage.remove_tree(name)
        except (OSError, StorageError) as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return removed


def pinned_steps(storage: Storage) -> set[int]:
    """Steps that somebody has pinned: each has a file in the root's directory of pins."""
    try:
        names = storage.listdir(layout.PINS)
    except FileNotFoundError:
        return set()
    return {step for name in names if (step := layout.parse_pin_file(name)) is not None}


def _step(entry: Entry) -> int:
    return entry.step


def _on_line(record: RootRecord, entry: Entry) -> bool:
    manifest = entry.manifest
    return manifest is not None and record.is_past(manifest.run, manifest.timeline, entry.step)


def _is_replaced(record: RootRecord, stale: Entry, line: Sequence[Entry]) -> bool:
    """Whether `stale` was set aside by an automatic fallback, and training has committed something since then."""
    order = {timeline.id: number for number, timeline in enumerate(record.timelines)}
    if stale.timeline not in order or record.timelines[order[stale.timeline]].explicit:
        return False
    return any(order.get(entry.timeline or "", -1) >= order[stale.timeline] for entry in line)


def _rename(storage: Storage, name: str, trash: str, failures: list[OSError | StorageError]) -> bool:
    failpoints.hit(RENAME_BEFORE)
    try:
        storage.rename(name, trash)
    except (OSError, StorageError) as error:
        failures.append(error)
        return False
    failpoints.hit(RENAME_AFTER)
    return True
