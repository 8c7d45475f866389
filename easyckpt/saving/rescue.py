"""Committing what dead processes left in shared memory, without their program."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from easyckpt import catalog
from easyckpt.config import CheckpointConfig
from easyckpt.errors import ForeignFormat, LeaseLost, NotLoaded
from easyckpt.format import layout, memory_names
from easyckpt.format.image import Layout
from easyckpt.format.layout import NamingScheme
from easyckpt.format.manifest import RootRecord
from easyckpt.memory.adoption import find_slots
from easyckpt.memory.place import memory_directory
from easyckpt.memory.reading import open_slot
from easyckpt.memory.slot import SlotMeta, SlotView
from easyckpt.saving.commit import CommitContext, build_manifest, commit
from easyckpt.saving.messages import Flush
from easyckpt.saving.metrics import metrics_in
from easyckpt.saving.owning import owned_arenas, owned_lease
from easyckpt.saving.writer import ShardWriter, replicated_digest
from easyckpt.storage.base import Storage
from easyckpt.storage.local import LocalStorage

Held = tuple[str, SlotMeta]
"""The path of a slot, and what it holds."""


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
    directory, _ = memory_directory(config.memory_dir)
    # What is found now may be gone, or be of other steps, once it is owned: a job may live and go on until then.
    owners = {memory_names.owner_beside(path) for path, _ in _slots(storage, _record(storage), directory, user)}
    with owned_arenas(owners, storage):
        record = _record(storage)
        if not _whole_groups(storage, record, directory, user, owners):
            return []
        with owned_lease(storage, record.run, min(owners), config, on_wait) as check:
            context = CommitContext(storage=storage, naming=naming, check_lease=check)
            return _commit_all(context, directory, user, owners)


def _record(storage: Storage) -> RootRecord:
    record = catalog.read_root(storage)
    if record is None:
        raise ForeignFormat(f"{storage.root} is not a checkpoint root: it has no {layout.ROOT_FILE}")
    return record


def _commit_all(context: CommitContext, directory: str, user: str | None, owners: Collection[str]) -> list[RescuedStep]:
    storage = context.storage
    record = _record(storage)  # who owned the root before may have changed it up to now
    found = catalog.scan(storage, context.naming)
    newest = max((entry.step for entry in found.committed() if _on_line(record, entry)), default=-1)
    groups = _whole_groups(storage, record, directory, user, owners)
    return [_commit_group(context, record, group) for group in groups if group[0][1].step > newest]


def _on_line(record: RootRecord, entry: catalog.Entry) -> bool:
    return entry.manifest is not None and record.on_ancestry(entry.manifest.timeline, entry.step)


def _slots(storage: Storage, record: RootRecord, directory: str, user: str | None) -> list[Held]:
    """What is sealed in this node's memory for `storage`."""
    arena = memory_names.arena_id(record.run, os.path.realpath(storage.root))
    return [
        (path, meta)
        for path, meta in find_slots(directory, user)
        if not isinstance(meta, str) and (meta.run, meta.arena_id) == (record.run, arena)
    ]


def _whole_groups(
    storage: Storage, record: RootRecord, directory: str, user: str | None, owners: Collection[str]
) -> list[list[Held]]:
    """All ranks' slots of one step, by rank, for the steps in the past of the newest timeline; oldest step first."""
    parts: dict[tuple[int, str], dict[int, Held]] = {}
    for path, meta in _slots(storage, record, directory, user):
        if memory_names.owner_beside(path) in owners and record.on_ancestry(meta.timeline, meta.step):
            parts.setdefault((meta.step, meta.timeline), {})[meta.rank] = (path, meta)
    whole = []
    for _, by_rank in sorted(parts.items()):
        sizes = {meta.world_size for _, meta in by_rank.values()}
        if len(sizes) == 1 and sorted(by_rank) == list(range(sizes.pop())):
            whole.append([by_rank[rank] for rank in sorted(by_rank)])
    return whole


def _commit_group(context: CommitContext, record: RootRecord, group: Sequence[Held]) -> RescuedStep:
    views = []
    for path, meta in group:
        view = open_slot(path)
        if view is None or view.meta != meta:
            raise NotLoaded(f"{path} does not hold this snapshot of step {meta.step} any more: somebody is using it")
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
    except LeaseLost:
        raise  # who has taken over may be making this very attempt a checkpoint
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
