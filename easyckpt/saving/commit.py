"""The commit protocol, from the reports of all ranks to a checkpoint that is real."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from easyckpt import catalog, failpoints
from easyckpt.errors import NotShared, OutcomeUnknown, SaveFailed, StorageError
from easyckpt.format import layout
from easyckpt.format.manifest import FileRecord, Manifest
from easyckpt.saving.messages import Flush
from easyckpt.storage.base import Storage

logger = logging.getLogger("easyckpt")

REPORTED = failpoints.declare("commit.reported", "all ranks have reported, nothing of the commit has begun")
MANIFEST_WRITTEN = failpoints.declare("commit.manifest.written", "manifest written and fsynced, its directory not")
RENAME_BEFORE = failpoints.declare("commit.rename.before", "all durable under the temporary name")
RENAME_AFTER = failpoints.declare("commit.rename.after", "renamed, the parent directory not fsynced")
DURABLE = failpoints.declare("commit.durable", "committed, `latest` still names the one before")
LATEST_AFTER = failpoints.declare("commit.latest.after", "committed, `latest` rewritten, retention not yet run")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitContext:
    """What a commit needs to know beside the reports."""

    storage: Storage
    naming: layout.NamingScheme
    check_lease: Callable[[], None]
    """Raises LeaseLost when this job does not own the root any more."""
    keeps_other_lines: bool = False
    """A new line that begins from nothing leaves older ones where they are, until it needs a number itself."""


def commit(
    context: CommitContext,
    flush: Flush,
    files: Mapping[str, tuple[int, str]],
    manifest: Manifest,
    parts: Sequence[bytes] = (),
) -> int:
    """Make `flush` real; `parts` go into the manifest. Returns the bytes of all ranks' files: the checkpoint's size.

    Raises SaveFailed, NotShared, LeaseLost or OSError when it certainly is not, OutcomeUnknown when it may be.
    """
    storage, naming = context.storage, context.naming
    temporary, final = naming.temporary(flush.step, flush.attempt), naming.committed(flush.step)
    size = sum(size for size, _ in files.values())
    failpoints.hit(REPORTED)
    check_files(storage, temporary, files)
    context.check_lease()
    if _is_committed(context, final, manifest):
        storage.sync_dir("")  # an earlier attempt was renamed, and may not have come to this
        storage.remove_tree(temporary)
        return size
    text = manifest.to_bytes(parts)
    if len(text) > catalog.MAX_RECORD_BYTES:
        raise SaveFailed(f"step {flush.step}: its manifest would have {len(text)} bytes, more than any reader takes")
    with storage.create(f"{temporary}/{layout.MANIFEST}") as file:
        file.write_at(memoryview(text), 0)
        file.sync()
    failpoints.hit(MANIFEST_WRITTEN)
    storage.sync_dir(temporary)
    failpoints.hit(RENAME_BEFORE)
    # Not before: what has the name may be the only whole checkpoint there is.
    if not (_is_saved_again(context, final) and _take_its_place(context, temporary, final, flush)):
        _make_way(context, final, manifest)
        context.check_lease()
        _make_real(storage, temporary, final, flush)
    _point_to(context, final)
    return size


def build_manifest(
    flush: Flush,
    files: Mapping[str, tuple[int, str]],
    *,
    run: str,
    timeline: str,
    world_size: int,
    parent: str | None,
    metrics: Mapping[str, float],
) -> Manifest:
    """The commit record of `flush`."""
    return Manifest(
        run=run,
        timeline=timeline,
        step=flush.step,
        world_size=world_size,
        attempt=flush.attempt,
        created=time.time(),
        parent=parent,
        files={name: FileRecord(size=size, digest=digest) for name, (size, digest) in files.items()},
        metrics=dict(metrics),
    )


def check_files(storage: Storage, temporary: str, files: Mapping[str, tuple[int, str]]) -> None:
    """Rank 0 sees what all ranks have written. Raises NotShared or SaveFailed."""
    for name, (size, _) in files.items():
        try:
            found = storage.stat_size(f"{temporary}/{name}")
        except FileNotFoundError:
            raise NotShared(
                f"{name} was written by its rank but is not in {os.path.join(storage.root, temporary)} as seen by "
                "rank 0: is the checkpoint root on a file system that all nodes share?"
            ) from None
        if found != size:
            raise SaveFailed(f"{temporary}/{name} has {found} bytes, its rank has written {size}")


def _is_committed(context: CommitContext, final: str, manifest: Manifest) -> bool:
    """Whether this step of this line of training is a valid checkpoint already: then that is the commit."""
    if not context.storage.exists(final):
        return False
    entry = catalog.inspect(context.storage, final, context.naming)
    found = entry.manifest
    return (
        entry.problem is None and found is not None and (found.run, found.timeline) == (manifest.run, manifest.timeline)
    )


def _make_way(context: CommitContext, final: str, manifest: Manifest) -> None:
    """Move a damaged directory of the same name aside; a valid one of another line is never touched."""
    storage = context.storage
    if not storage.exists(final):
        return
    entry = catalog.inspect(storage, final, context.naming)
    if context.keeps_other_lines:
        _set_aside(context, entry, manifest)
        return
    if entry.problem is None:
        raise SaveFailed(f"{final} is a checkpoint of another line of training; it is not overwritten")
    context.check_lease()
    logger.warning("%s is damaged (%s) and is moved to trash", final, entry.problem)
    storage.rename(final, context.naming.trash(final, secrets.token_hex(4)))
    storage.sync_dir("")


def _is_saved_again(context: CommitContext, final: str) -> bool:
    """Whether the line has this very step in its past, whole: it is saved once more, and the later save counts."""
    if not context.storage.exists(final):
        return False
    entry, record = catalog.inspect(context.storage, final, context.naming), catalog.read_root(context.storage)
    found = entry.manifest
    if entry.problem is not None or found is None or record is None:
        return False
    return record.is_past(found.run, found.timeline, found.step)


def _take_its_place(context: CommitContext, temporary: str, final: str, flush: Flush) -> bool:
    """Step 5 where an earlier save of the step has the name: there is one of them at any moment. False: cannot be."""
    storage = context.storage
    context.check_lease()
    if not storage.exchange(temporary, final):
        return False
    try:
        failpoints.hit(RENAME_AFTER)
        storage.sync_dir("")
    except (OSError, StorageError) as error:
        raise _not_durable(storage, final, flush, error) from error
    try:
        storage.remove_tree(temporary)  # what is left of it by a crash is a leftover of a dead process, as any
    except (OSError, StorageError) as error:
        logger.warning("%s was saved again; removing the earlier one failed: %s", final, error)
    return True


def _set_aside(context: CommitContext, entry: catalog.Entry, manifest: Manifest) -> None:
    """What another line, or the framework itself, has under this number stays, under another name."""
    word = manifest.timeline if entry.kind == "committed" else f"foreign-{secrets.token_hex(4)}"
    storage, stale = context.storage, context.naming.stale(entry.step, word)
    context.check_lease()
    logger.warning("%s is not of this line of training, which needs its number: set aside as %s", entry.name, stale)
    storage.rename(entry.name, stale)
    storage.sync_dir("")


def _make_real(storage: Storage, temporary: str, final: str, flush: Flush) -> None:
    """Step 5. An error is a failure only where the rename has certainly not happened."""
    try:
        storage.rename(temporary, final)
    except (OSError, StorageError) as error:
        # A network file system may answer with an error to a repeated request that had succeeded.
        if _was_renamed(storage, temporary, final):
            raise _not_durable(storage, final, flush, error) from error
        raise
    try:
        failpoints.hit(RENAME_AFTER)
        storage.sync_dir("")
    except (OSError, StorageError) as error:
        raise _not_durable(storage, final, flush, error) from error


def _was_renamed(storage: Storage, temporary: str, final: str) -> bool:
    """Whether the rename has happened, or that cannot be seen."""
    try:
        return storage.exists(final) and not storage.exists(temporary)
    except (OSError, StorageError):
        return True


def _not_durable(storage: Storage, final: str, flush: Flush, error: Exception) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"step {flush.step}: {os.path.join(storage.root, final)} was renamed into place, but making the rename "
        f"durable failed ({error}); it is whole now and may be gone after a power cut"
    )


def _point_to(context: CommitContext, final: str) -> None:
    """Rewrite the hint. The checkpoint is durable by now: a failure here must not be reported as one."""
    try:
        failpoints.hit(DURABLE)
        context.check_lease()
        context.storage.replace(layout.LATEST, (final + "\n").encode())
        failpoints.hit(LATEST_AFTER)
    except (OSError, StorageError) as error:
        logger.warning("%s is committed; rewriting %r failed: %s", final, layout.LATEST, error)
