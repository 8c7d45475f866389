"""What makes a checkpoint of files that the Trainer has written: durable, named in a manifest, and looked at again.

A directory that is being written has a mark beside it until its manifest is there, so one that a kill has left half-way
is told from one that the Trainer wrote without easyckpt. A checkpoint that is there already is its own mark: it waits
beside for the one that takes its place, and is put back where that does not come to be. What lies past the step at
which a training goes on is set aside once its first checkpoint is committed: from then on the highest number is that of
the newest state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable

from easyckpt import catalog, failpoints
from easyckpt.format import layout
from easyckpt.format.checksum import ChunkHasher, file_digest
from easyckpt.format.manifest import FileRecord, Manifest
from easyckpt.format.trainer_names import TrainerNaming
from easyckpt.integrations.transformers import judging, stock
from easyckpt.saving.retention import RENAME_BEFORE
from easyckpt.storage.base import Storage
from easyckpt.storage.local import LocalStorage

_log = logging.getLogger("easyckpt")
_NAMING = TrainerNaming()
_PIECE = 8 << 20
#: How the marks begin that are the checkpoint before.
_KEPT = "kept-"


def begin(storage: LocalStorage, step: int) -> None:
    """``checkpoint-<step>`` is about to be written: until it is committed it is none.

    One that is there is never written into: what the Trainer changes of it would not fit the manifest any more.
    """
    name, word = _NAMING.committed(step), secrets.token_hex(4)
    marked = any(mark.step == step for mark in catalog.scan(storage, _NAMING).of_kind("temporary"))
    if _is_there(storage, name, marked=marked):
        kept = _NAMING.temporary(step, f"{_KEPT}{word}")
        storage.rename(name, kept)
        with contextlib.suppress(FileNotFoundError):  # of the save that begins
            storage.remove(f"{kept}/{stock.UNFINISHED}")
    else:
        storage.makedirs(_NAMING.temporary(step, f"{word}-000001"))
    storage.sync_dir("")


def _is_there(storage: LocalStorage, name: str, *, marked: bool) -> bool:
    """Whether a checkpoint has the `name`: none that was never written to its end, nor one that only begins."""
    if storage.exists(f"{name}/{layout.MANIFEST}"):
        return True
    if marked or not storage.exists(name):
        return False
    return not set(os.listdir(os.path.join(storage.root, name))) <= {stock.UNFINISHED}


def put_back(storage: Storage) -> None:
    """Checkpoints whose place another was to take get their names back where that has not come to be."""
    for mark in catalog.scan(storage, _NAMING).of_kind("temporary"):
        name = _NAMING.committed(mark.step)
        if not (mark.attempt or "").startswith(_KEPT) or storage.exists(f"{name}/{layout.MANIFEST}"):
            continue
        if storage.exists(name):
            _remove(storage, name)
        storage.rename(mark.name, name)
        storage.sync_dir("")
        _log.warning("%s was being saved once more, to no end: it is again what it was", name)


def commit(storage: LocalStorage, step: int, *, world_size: int, busy: Callable[[], None] = lambda: None) -> None:
    """Make every file of ``checkpoint-<step>`` durable, and say in a manifest what they are.

    `busy` is called as that gets on.
    """
    name = _NAMING.committed(step)
    manifest = Manifest(
        run=secrets.token_hex(16),
        timeline=layout.FOREIGN_LINE,
        step=step,
        world_size=world_size,
        attempt=f"{secrets.token_hex(4)}-000001",
        created=time.time(),
        files={path: _durable(storage, f"{name}/{path}", busy) for path in _files(storage, name)},
    )
    for folder in sorted({name, *(f"{name}/{path}".rpartition("/")[0] for path in manifest.files)}, reverse=True):
        storage.sync_dir(folder)
    storage.replace(f"{name}/{layout.MANIFEST}", manifest.to_bytes())
    storage.sync_dir("")


def end(storage: LocalStorage, step: int) -> None:
    """``checkpoint-<step>`` is committed, and what was there before it goes."""
    for mark in catalog.scan(storage, _NAMING).of_kind("temporary"):
        if mark.step == step:
            storage.remove_tree(mark.name)


def leave(storage: LocalStorage, step: int) -> None:
    """The Trainer has not written ``checkpoint-<step>``: what was there before stays.

    Where the program has written one by itself, nobody can tell whether that is whole: the one before is set aside.
    """
    if storage.exists(_NAMING.committed(step)):
        for mark in catalog.scan(storage, _NAMING).of_kind("temporary"):
            if mark.step == step and (mark.attempt or "").startswith(_KEPT):
                storage.rename(mark.name, _NAMING.stale(step, secrets.token_hex(4)))
    else:
        put_back(storage)
    end(storage, step)


def make_room(storage: LocalStorage) -> None:
    """A training saves for the first time: what was never written to its end is removed.

    All else stays until that save is committed: before, a kill leaves only what was there.
    """
    found = catalog.scan(storage, _NAMING)
    marks = found.of_kind("temporary")
    unfinished = {mark.step for mark in marks}
    for entry in judging.checkpoints(found):
        if entry.step in unfinished and not judging.has_manifest(storage, entry):
            _remove(storage, entry.name)
    storage.sync_dir("")
    for leftover in [*marks, *found.of_kind("trash")]:
        storage.remove_tree(leftover.name)


def set_aside(storage: LocalStorage, begun: int, committed: int) -> None:
    """Rename what lies past the step at which this training has `begun`, but for what it has `committed`."""
    word, found = secrets.token_hex(4), catalog.scan(storage, _NAMING)
    for entry in judging.checkpoints(found):
        if entry.step > begun and entry.step != committed:
            storage.rename(entry.name, _NAMING.stale(entry.step, word))
    for mark in found.of_kind("temporary"):
        if mark.step > begun and (mark.attempt or "").startswith(_KEPT):  # another training's, of the same number
            storage.rename(mark.name, _NAMING.stale(mark.step, word))
    storage.sync_dir("")


def rotate(storage: LocalStorage, limit: int | None, best: str | None) -> None:
    """Remove the oldest of the committed ones beyond `limit`; the newest and the `best` stay."""
    if not limit or limit < 1:
        return
    kept = os.path.basename(best or "")
    found = [entry for entry in judging.checkpoints(catalog.scan(storage, _NAMING)) if entry.valid]
    found.sort(key=lambda entry: (entry.name == kept, entry.step))
    newest = max((entry.step for entry in found), default=-1)
    for entry in found[: max(0, len(found) - limit)]:
        if entry.step != newest and entry.name != kept:
            _remove(storage, entry.name)


def _remove(storage: Storage, name: str) -> None:
    failpoints.hit(RENAME_BEFORE)
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


def _durable(storage: LocalStorage, path: str, busy: Callable[[], None]) -> FileRecord:
    """Sync a file, and read it as it is on storage then."""
    storage.drop_cache(path)
    hasher, memory = ChunkHasher(), memoryview(bytearray(_PIECE))
    with storage.reader(path) as reader:
        for begin_at in range(0, reader.size, _PIECE):
            hasher.update(memory[: reader.read_into(memory, begin_at)])
            busy()
        size = reader.size
    return FileRecord(size, file_digest(size, hasher.finish()))
