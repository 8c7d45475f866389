"""Committing what dead processes left in shared memory, without their program."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from easyckpt import catalog
from easyckpt.config import CheckpointConfig
from easyckpt.errors import ForeignFormat, NotLoaded, RootInUse
from easyckpt.format import layout
from easyckpt.format.image import Layout
from easyckpt.format.layout import NamingScheme
from easyckpt.format.manifest import RootRecord
from easyckpt.memory.adoption import find_slots
from easyckpt.memory.owner import OwnerLock
from easyckpt.memory.place import memory_directory
from easyckpt.memory.reading import open_slot
from easyckpt.memory.slot import SlotMeta, SlotView
from easyckpt.saving.commit import CommitContext, build_manifest, commit
from easyckpt.saving.messages import Flush
from easyckpt.saving.metrics import metrics_in
from easyckpt.saving.writer import ShardWriter, replicated_digest
from easyckpt.storage.lease import Lease
from easyckpt.storage.local import LocalStorage


@dataclass(frozen=True, slots=True)
class RescuedStep:
    """A snapshot that is a checkpoint now."""

    step: int
    path: str
    bytes: int


def rescue(
    root: str,
    config: CheckpointConfig,
    naming: NamingScheme,
    *,
    user: str | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> list[RescuedStep]:
    """Commit every snapshot of `root`'s run that is whole in this node's shared memory and newer than all committed.

    `config` are the run's settings; `on_wait` hears what is waited for while another job may own the root. Raises
    RootInUse while a process of the run lives, ForeignFormat where `root` is none of ours. Snapshots of which a rank's
    part is missing here (another node has it, or had it) are left alone.
    """
    storage = LocalStorage(root, direct_io=config.direct_io)
    record = catalog.read_root(storage)
    if record is None:
        raise ForeignFormat(f"{root} is not a checkpoint root: it has no {layout.ROOT_FILE}")
    directory, _ = memory_directory(config.memory_dir)
    arena = layout.arena_id(record.run, os.path.realpath(storage.root))
    groups = _whole_groups(directory, user, record, arena)
    if not groups:
        return []
    found = catalog.scan(storage, naming)
    newest = max((entry.step for entry in found.committed() if _on_line(record, entry)), default=-1)
    lease = _lease(storage, record, next(iter(groups.values()))[0], config)
    with _owned(path for paths in groups.values() for path in paths):
        lease.acquire(on_wait)
        try:
            context = CommitContext(storage=storage, naming=naming, check_lease=lease.check)
            return [
                _commit_group(context, record, paths)
                for (_, step), paths in sorted(groups.items(), key=lambda item: item[0][1])
                if step > newest
            ]
        finally:
            lease.release()


def _lease(storage: LocalStorage, record: RootRecord, slot_path: str, config: CheckpointConfig) -> Lease:
    return Lease(
        storage,
        root_lock_path=layout.owner_beside(slot_path),
        incarnation=secrets.token_hex(4),
        run=record.run,
        timeout=config.lease_timeout,
        is_free=OwnerLock.is_free,
    )


def _on_line(record: RootRecord, entry: catalog.Entry) -> bool:
    return entry.manifest is not None and record.on_ancestry(entry.manifest.timeline, entry.step)


def _whole_groups(directory: str, user: str | None, record: RootRecord, arena: str) -> dict[tuple[str, int], list[str]]:
    """(timeline, step) -> paths of all its ranks' slots by rank, for those in the past of the newest timeline."""
    parts: dict[tuple[str, int], dict[int, tuple[str, SlotMeta]]] = {}
    for path, meta in find_slots(directory, user):
        if isinstance(meta, str) or (meta.run, meta.arena_id) != (record.run, arena):
            continue
        if record.on_ancestry(meta.timeline, meta.step):
            parts.setdefault((meta.timeline, meta.step), {})[meta.rank] = (path, meta)
    whole = {}
    for key, by_rank in parts.items():
        sizes = {meta.world_size for _, meta in by_rank.values()}
        if len(sizes) == 1 and sorted(by_rank) == list(range(sizes.pop())):
            whole[key] = [by_rank[rank][0] for rank in sorted(by_rank)]
    return whole


@contextlib.contextmanager
def _owned(slot_paths: Iterable[str]) -> Iterator[None]:
    """Own the arenas of these slots, as a job that starts now would: it waits, or this refuses."""
    with contextlib.ExitStack() as stack:
        for path in sorted({layout.owner_beside(slot) for slot in slot_paths}):
            lock = OwnerLock(path)
            if not lock.try_acquire():
                raise RootInUse(f"{path}: its process is alive: stop the job before rescuing its snapshots")
            stack.callback(lock.release)
        yield


def _commit_group(context: CommitContext, record: RootRecord, paths: Sequence[str]) -> RescuedStep:
    views = []
    for path in paths:
        view = open_slot(path)
        if view is None:
            raise NotLoaded(f"{path} is not sealed any more: somebody else is using it")
        views.append(view)
    meta = views[0].meta
    metrics = metrics_in(Layout.from_bytes(views[0].static), views[0].objects)
    share = len({replicated_digest(view) for view in views}) == 1
    attempt = f"rescue{secrets.token_hex(4)}-000001"
    flush = Flush(attempt=attempt, step=meta.step, due=None, share=share)
    directory = context.naming.temporary(meta.step, attempt)
    context.storage.makedirs(directory)
    try:
        files = _write(context, directory, views, share)
        manifest = build_manifest(
            flush,
            files,
            run=record.run,
            timeline=meta.timeline,
            world_size=meta.world_size,
            parent=record.parent,
            metrics=metrics,
        )
        nbytes = commit(context, flush, files, manifest)
    except BaseException:
        if context.storage.exists(directory):
            context.storage.remove_tree(directory)
        raise
    for view in views:
        view.close()
    return RescuedStep(meta.step, os.path.join(context.storage.root, context.naming.committed(meta.step)), nbytes)


def _write(
    context: CommitContext, directory: str, views: Sequence[SlotView], share: bool
) -> dict[str, tuple[int, str]]:
    writer = ShardWriter(context.storage)
    files: dict[str, tuple[int, str]] = {}
    for rank, view in enumerate(views):
        written = writer.write(directory, view, write_replicated=rank == 0 or not share)
        files |= {name: (entry.size, entry.digest) for name, entry in written.items()}
    context.storage.sync_dir(directory)
    return files
