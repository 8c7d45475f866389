"""What makes a checkpoint of files that the Trainer has written: durable, named in a manifest, and looked at again.

A directory that is being written has a mark beside it until its manifest is there, so one that a kill has left half-way
is told from one that the Trainer wrote without easyckpt. What lies past the step at which a training goes on is set
aside before it saves for the first time: the highest number is that of the newest state.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Iterator

from easyckpt import catalog
from easyckpt.catalog import Entry
from easyckpt.errors import DamagedCheckpoint
from easyckpt.format import layout
from easyckpt.format.checksum import ChunkHasher, file_digest
from easyckpt.format.manifest import FileRecord, Manifest
from easyckpt.format.trainer_names import TrainerNaming
from easyckpt.storage.local import LocalStorage
from easyckpt.verification import verify

_log = logging.getLogger("easyckpt")
_NAMING = TrainerNaming()
_PIECE = 8 << 20
_GENERATORS = re.compile(r"(.*/)?rng_state(_\d+)?\.pth")


def begin(storage: LocalStorage, step: int) -> None:
    """``checkpoint-<step>`` is about to be written: until it is committed it is none."""
    storage.makedirs(_NAMING.temporary(step, f"{secrets.token_hex(4)}-000001"))
    storage.sync_dir("")


def commit(storage: LocalStorage, step: int, *, world_size: int) -> None:
    """Make every file of ``checkpoint-<step>`` durable, and say in a manifest what they are."""
    name = _NAMING.committed(step)
    manifest = Manifest(
        run=secrets.token_hex(16),
        timeline=layout.FOREIGN_LINE,
        step=step,
        world_size=world_size,
        attempt=f"{secrets.token_hex(4)}-000001",
        created=time.time(),
        files={path: _durable(storage, f"{name}/{path}") for path in _files(storage, name)},
    )
    for folder in sorted({name, *(f"{name}/{path}".rpartition("/")[0] for path in manifest.files)}, reverse=True):
        storage.sync_dir(folder)
    storage.replace(f"{name}/{layout.MANIFEST}", manifest.to_bytes())
    storage.sync_dir("")
    for mark in catalog.scan(storage, _NAMING).of_kind("temporary"):
        if mark.step == step:
            storage.remove_tree(mark.name)


def set_aside(storage: LocalStorage, step: int) -> None:
    """Rename what lies past `step`, where training goes on, and remove what was never written to its end."""
    found = catalog.scan(storage, _NAMING)
    marks = found.of_kind("temporary")
    unfinished, word = {mark.step for mark in marks}, secrets.token_hex(4)
    for entry in _checkpoints(found):
        if entry.step in unfinished and not _has_manifest(storage, entry):
            _remove(storage, entry.name)
        elif entry.step > step:
            storage.rename(entry.name, _NAMING.stale(entry.step, word))
    storage.sync_dir("")
    for leftover in [*marks, *found.of_kind("trash")]:
        storage.remove_tree(leftover.name)


def rotate(storage: LocalStorage, limit: int | None, best: str | None) -> None:
    """Remove the oldest of the committed ones beyond `limit`; the newest and the `best` stay."""
    if not limit or limit < 1:
        return
    kept = os.path.basename(best or "")
    found = [entry for entry in _checkpoints(catalog.scan(storage, _NAMING)) if entry.valid]
    found.sort(key=lambda entry: (entry.name == kept, entry.step))
    newest = max((entry.step for entry in found), default=-1)
    for entry in found[: max(0, len(found) - limit)]:
        if entry.step != newest and entry.name != kept:
            _remove(storage, entry.name)


def newest_whole(storage: LocalStorage, *, below: int | None = None) -> int | None:
    """The step of the newest checkpoint whose bytes are as committed; where none has a manifest, the newest as it is.

    With `below`, the newest before that step. Raises DamagedCheckpoint where there are some, and none is whole.
    """
    damaged = []
    for entry, problem in _judged(storage):
        if problem is not None:
            _log.warning("%s cannot be resumed from and is passed over: %s", entry.name, problem)
            damaged.append(f"{entry.name}: {problem}")
        elif below is None or entry.step < below:
            return entry.step
    if damaged:
        raise DamagedCheckpoint(
            f"{storage.root}: no checkpoint is whole, and training is not started from nothing by itself: "
            f"{'; '.join(damaged)}"
        )
    return None


def _judged(storage: LocalStorage) -> Iterator[tuple[Entry, str | None]]:
    """The checkpoints, the newest first, and what keeps a job from going on from each."""
    found = catalog.scan(storage, _NAMING)
    unfinished = {mark.step for mark in found.of_kind("temporary")}
    checkpoints = _checkpoints(found)
    committed = [entry for entry in checkpoints if _has_manifest(storage, entry)]
    for entry in reversed(checkpoints):
        if entry in committed:
            yield entry, _problem(storage, entry)
        elif entry.step in unfinished:
            _log.warning("%s is passed over: the job died while it was written", entry.name)
        elif committed:
            _log.warning("%s is passed over: it has no manifest, and others have one", entry.name)
        else:
            _log.warning("%s has no manifest: nothing tells whether it is whole", entry.name)
            yield entry, None


def _problem(storage: LocalStorage, entry: Entry) -> str | None:
    if entry.problem is not None or entry.manifest is None:
        return str(entry.problem)
    if not any(map(_GENERATORS.fullmatch, entry.manifest.files)):
        return "it holds a model only, no state of the training (save_only_model)"
    return next((problem.message for problem in verify(storage, entry)), None)


def _checkpoints(found: catalog.Catalog) -> list[Entry]:
    """What has the name of a checkpoint, whoever committed it."""
    return [entry for entry in found.entries if _NAMING.parse_committed(entry.name) is not None]


def _has_manifest(storage: LocalStorage, entry: Entry) -> bool:
    return storage.exists(f"{entry.name}/{layout.MANIFEST}")


def _remove(storage: LocalStorage, name: str) -> None:
    trash = _NAMING.trash(name, secrets.token_hex(4))
    storage.rename(name, trash)
    storage.sync_dir("")
    storage.remove_tree(trash)


def _files(storage: LocalStorage, name: str) -> list[str]:
    root = os.path.join(storage.root, name)
    found = []
    for folder, _, names in os.walk(root):
        found += [os.path.relpath(os.path.join(folder, each), root) for each in names if each != layout.MANIFEST]
    return sorted(found)


def _durable(storage: LocalStorage, path: str) -> FileRecord:
    """Sync a file, and read it as it is on storage then."""
    storage.drop_cache(path)
    hasher, memory = ChunkHasher(), memoryview(bytearray(_PIECE))
    with storage.reader(path) as reader:
        for begin_at in range(0, reader.size, _PIECE):
            hasher.update(memory[: reader.read_into(memory, begin_at)])
        size = reader.size
    return FileRecord(size, file_digest(size, hasher.finish()))
