"""Copying one checkpoint into another root: verified on both sides, bounded in memory, committed like any other.

What is copied keeps its bytes, its manifest too, which names the run that it comes from. The root that it comes to gets
a run of its own, whose parent it is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from easyckpt import catalog
from easyckpt.catalog import Entry
from easyckpt.config import CheckpointConfig
from easyckpt.errors import DamagedCheckpoint, ForeignFormat, LeaseLost, OutOfSpace, UsageError
from easyckpt.format import layout
from easyckpt.format.checksum import CHUNK_BYTES, ChunkHasher, file_digest
from easyckpt.format.image import align
from easyckpt.format.layout import NamingScheme
from easyckpt.format.manifest import FileRecord, Manifest, RootRecord
from easyckpt.saving.commit import CommitContext, commit
from easyckpt.saving.line import new_root
from easyckpt.saving.messages import Flush
from easyckpt.saving.owning import owned_root
from easyckpt.storage.base import FileReader, Storage
from easyckpt.verification import verify

#: The attempts of copies begin with this. No manifest carries such an attempt, so what a kill leaves is no candidate.
_ATTEMPT = "copy"


@dataclass(frozen=True, slots=True)
class Copied:
    """A checkpoint that was copied."""

    step: int
    path: str
    bytes: int
    run: str
    """Of the root that it is in now."""
    parent: str
    """``run/timeline/step`` that this run goes on from: the newest copy in the root."""


def copy_checkpoint(
    source: Storage,
    entry: Entry,
    target: Storage,
    naming: NamingScheme,
    config: CheckpointConfig,
    *,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_wait: Callable[[str], None] | None = None,
) -> Copied:
    """Copy `entry` of `source` into the root of `target`, which is new, empty, or holds copies of the same run only.

    Every byte is compared with what was committed while it is copied, and read back from storage before the copy is
    made real by its rename. `on_bytes` hears of each byte twice. Raises DamagedCheckpoint where bytes are not as they
    were committed, on either side; UsageError, ForeignFormat, OutOfSpace or RootInUse where the target cannot take it.
    No error and no kill leaves a checkpoint that is not whole.
    """
    manifest = _whole(source, entry)
    record = _accepts(target, naming, manifest)
    if record is None:
        record = RootRecord(run=secrets.token_hex(16), created=0.0, timelines=())
    with _made_for_good(target):
        _check_space(target, entry)
        with owned_root(target, record.run, config, on_wait) as check:
            record = _accepts(target, naming, manifest) or record  # nobody else writes there from now on
            _remove_leftovers(target, naming, check)
            context = CommitContext(storage=target, naming=naming, check_lease=check)
            nbytes = _copy(source, entry, manifest, context, on_bytes)
            record = _name_parent(target, naming, record, check)
    assert record.parent is not None
    path = os.path.join(target.root, naming.committed(manifest.step))
    return Copied(manifest.step, path, nbytes, record.run, record.parent)


def _whole(source: Storage, entry: Entry) -> Manifest:
    if entry.manifest is None or not entry.valid:
        raise DamagedCheckpoint(f"{source.root}: {entry.name} is not valid ({entry.problem}); nothing was copied")
    if entry.kind not in ("committed", "stale"):
        raise UsageError(f"{source.root}: {entry.name} is not committed; nothing was copied")
    return entry.manifest


def _accepts(target: Storage, naming: NamingScheme, manifest: Manifest) -> RootRecord | None:
    """The record of the target, None where it has none yet. Raises where the copy would be no candidate there."""
    try:
        names = target.listdir("")
    except FileNotFoundError:
        return None
    record = catalog.read_root(target)
    found = catalog.scan(target, naming)
    others = [name for name in names if name != layout.LEASE and not layout.is_temp_file(name)]
    if record is None and others and not found.entries:
        raise ForeignFormat(f"{target.root} holds other files ({others[0]}): give a new directory, or an empty one")
    there = found.of_kind("committed")
    if any(entry.step == manifest.step for entry in [*there, *found.of_kind("foreign")]):
        raise UsageError(f"{target.root} holds a checkpoint of step {manifest.step} already; nothing was copied")
    copies = {entry.manifest.timeline for entry in there if entry.manifest and entry.manifest.run == manifest.run}
    runs = {entry.manifest.run for entry in there if entry.manifest}
    if runs - {manifest.run} or (record is not None and not _holds_copies_only(record, manifest, copies)):
        raise UsageError(
            f"{target.root} belongs to another line of training, which could not go on from this checkpoint: give a "
            f"new directory, or one that holds only copies of run {manifest.run}"
        )
    return record


def _holds_copies_only(record: RootRecord, manifest: Manifest, copies: set[str]) -> bool:
    """Whether nobody has trained in the root: its run is not that of the copies, and it has no line of its own."""
    return record.run != manifest.run and all(timeline.id in copies for timeline in record.timelines)


@contextlib.contextmanager
def _made_for_good(target: Storage) -> Iterator[None]:
    """Make the root of `target` where it is missing; after an error it is gone again, if nothing is in it."""
    made = not os.path.lexists(target.root)
    target.makedirs("")
    try:
        yield
    except BaseException:
        if made:
            target.remove_empty_root()
        raise


def _check_space(target: Storage, entry: Entry) -> None:
    free = target.free_bytes()
    if free < entry.nbytes:
        raise OutOfSpace(f"{target.root}: {entry.name} has {entry.nbytes} bytes, {free} are free; nothing was copied")


def _remove_leftovers(target: Storage, naming: NamingScheme, check: Callable[[], None]) -> None:
    """What copies that were killed have left."""
    for entry in catalog.scan(target, naming).of_kind("temporary"):
        if (entry.attempt or "").startswith(_ATTEMPT):
            check()
            target.remove_tree(entry.name)


def _copy(
    source: Storage, entry: Entry, manifest: Manifest, context: CommitContext, on_bytes: Callable[[int], None]
) -> int:
    """Write and verify all files under a temporary name, then commit them. Returns the bytes of the copy."""
    target = context.storage
    attempt = f"{_ATTEMPT}{secrets.token_hex(4)}-000001"
    directory = context.naming.temporary(manifest.step, attempt)
    context.check_lease()
    target.makedirs(directory)
    try:
        folders = sorted({name.rpartition("/")[0] for name in manifest.files} - {""})
        for folder in folders:
            target.makedirs(f"{directory}/{folder}")
        for name, file in manifest.files.items():
            _copy_file(source, f"{entry.name}/{name}", target, f"{directory}/{name}", file, on_bytes=on_bytes)
        for folder in ["", *folders]:
            target.sync_dir(f"{directory}/{folder}".rstrip("/"))
        written = Entry(step=manifest.step, name=directory, kind="temporary", manifest=manifest)
        if problems := verify(target, written, on_bytes):
            problem = problems[0]
            raise DamagedCheckpoint(
                f"{target.root}: {problem.file} reads back otherwise than it was written: {problem.message}; nothing "
                "was copied"
            )
        flush = Flush(attempt=attempt, step=manifest.step, due=None, share=None)
        files = {name: (file.size, file.digest) for name, file in manifest.files.items()}
        return commit(context, flush, files, manifest)
    except LeaseLost:
        raise  # the root is somebody else's
    except BaseException:
        if target.exists(directory):
            target.remove_tree(directory)
        raise


def _copy_file(
    source: Storage, path: str, target: Storage, copy: str, expected: FileRecord, *, on_bytes: Callable[[int], None]
) -> None:
    """Copy one file durably, chunk by chunk. Raises DamagedCheckpoint where its bytes are not those of the manifest."""
    hasher = ChunkHasher()
    view = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # page-aligned; not closed by name: an error's frames may hold it
    with _opened(source, path) as reader, target.create(copy) as writer:
        for offset in range(0, expected.size, CHUNK_BYTES):
            count = min(reader.read_into(view, offset), expected.size - offset)
            hasher.update(view[:count])
            writer.write_at(view[: align(count)], offset)
            on_bytes(count)
        writer.truncate(expected.size)
        if file_digest(hasher.size, hasher.finish()) != expected.digest:
            raise DamagedCheckpoint(
                f"{source.root}: {path} is not what was committed: `easyckpt verify {source.root}` says where; "
                "nothing was copied"
            )
        writer.sync()


def _opened(source: Storage, path: str) -> FileReader:
    try:
        return source.reader(path)
    except FileNotFoundError as error:
        raise UsageError(
            f"{error.filename or path} went away while it was copied; nothing was copied. Where a job rotates its "
            "checkpoints there, pin the step first"
        ) from error


def _name_parent(target: Storage, naming: NamingScheme, record: RootRecord, check: Callable[[], None]) -> RootRecord:
    """Have the root's record fit the copies that it holds now. After a crash before this, the next job does it."""
    fresh = new_root(target, naming)
    check()
    made = replace(fresh, run=record.run, created=record.created or fresh.created)
    if not target.link_exclusive(layout.ROOT_FILE, made.to_bytes()):
        there = catalog.read_root(target)  # a job that waits for the lease may have made it, and goes by its run
        assert there is not None
        made = replace(fresh, run=there.run, created=there.created)
        catalog.write_root(target, made)
    newest = catalog.scan(target, naming).committed()[-1]
    target.replace(layout.LATEST, (newest.name + "\n").encode())
    return made
