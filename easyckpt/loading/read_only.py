"""Restoring a state out of a root that is not owned: for evaluation beside a running job, or weights for a new run."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

from easyckpt import catalog
from easyckpt.catalog import Catalog
from easyckpt.distributed.rendezvous import LocalChannel
from easyckpt.errors import DamagedCheckpoint, EasyckptError, ForeignFormat, NoCheckpoint, StorageError, UsageError
from easyckpt.format.layout import ROOT_FILE, NamingScheme
from easyckpt.format.manifest import Manifest
from easyckpt.loading.apply import restore_agreed
from easyckpt.loading.loader import Restored, fit, left_out_text
from easyckpt.loading.parts_reader import open_parts
from easyckpt.loading.reader import open_storage, run_now
from easyckpt.loading.resolve import Candidate, candidates, no_such_step
from easyckpt.loading.snapshot import Snapshot
from easyckpt.state.apply import apply_all
from easyckpt.state.capture import StateCapture
from easyckpt.state.components import check_names
from easyckpt.storage.local import LocalStorage
from easyckpt.storage.records_apart import open_place

logger = logging.getLogger("easyckpt")

#: Looks at a root whose checkpoints go away while they are read.
_TRIES = 10


class _Moved(Exception):
    """A checkpoint of the listing is not there any more: an attempt was renamed, or a checkpoint rotated away."""


def restore(
    root: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    strict: bool = True,
    components: Collection[str] | None = None,
) -> Restored:
    """Restore `state` from the newest (or the given) committed step of `root`, read-only.

    For evaluation beside a running job, or old weights for a new run: no lease, no shared memory, nothing on disk
    changes, and this process's generators stay as they are. Checkpoints that were copied into a directory of their own
    are read as well. Where ranks differ, a group's checkpoint gives what rank 0 had. `strict` and `components` as for
    Checkpointer.load, but that components which only the checkpoint has are never asked for. Raises what
    Checkpointer.load raises.
    """
    check_names(components)
    storage, naming = open_place(root)
    for _ in range(_TRIES):
        try:
            return _restore(storage, naming, state, step=step, strict=strict, components=components)
        except _Moved as moved:
            logger.info("%s was renamed or rotated away by the running job: looking again", moved)
    raise StorageError(
        f"{storage.root}: checkpoints were rotated away {_TRIES} times while they were read: raise the job's "
        "max_ckpt_num, or pin or copy the one to be read"
    )


def _restore(
    storage: LocalStorage,
    naming: NamingScheme,
    state: Mapping[str, Any],
    *,
    step: int | None,
    strict: bool,
    components: Collection[str] | None,
) -> Restored:
    listed = _committed(storage, naming, step)
    live = StateCapture(state).components
    names = set(state) if components is None else components
    manifests: dict[str, Manifest] = {}

    def open_candidate(candidate: Candidate) -> Snapshot:
        source, attempt = candidate.source, candidate.attempt
        try:
            manifests[source] = catalog.read_manifest(storage, source)
            # Replicated state is whole in rank 0's part, whatever the number of ranks that saved it.
            world_size = manifests[source].world_size
            read = open_parts if naming.shared else open_storage
            return read(storage, source, rank=0, world_size=world_size, attempt=attempt, submit=run_now)
        except (EasyckptError, OSError):
            if not storage.exists(source):
                raise _Moved(source) from None
            raise

    def apply(snapshot: Snapshot) -> None:
        image = snapshot.layout
        apply_all(live, image, image.trees, snapshot.objects, snapshot.leaf, strict=strict, components=names)

    def left_out(number: int, what: list[str]) -> None:
        logger.warning(left_out_text(number, what))

    taken = restore_agreed(
        LocalChannel(),
        listed,
        open_candidate,
        lambda snapshot: fit(snapshot, live, strict, names, left_out),
        apply,
        timeout=1.0,
    )
    if taken is None:
        raise DamagedCheckpoint(f"{storage.root}: nothing could be restored")
    manifest, path = manifests[taken.source], os.path.join(storage.root, taken.source)
    return Restored(taken.step, "storage", path, manifest.world_size, taken.timeline, dict(manifest.metrics))


def _committed(storage: LocalStorage, naming: NamingScheme, step: int | None) -> list[Candidate]:
    """The candidates in the root. Raises NoCheckpoint where there are none, ForeignFormat where it is no root."""
    record = catalog.read_root(storage)
    found = catalog.scan(storage, naming)
    if record is None and not found.entries:
        raise _no_root(storage)
    run = _run_of_copies(found) if record is None else record.run
    listed = candidates(found, record, (), run=run, arena_id="", step=step)
    if not listed and step is not None:
        every = candidates(found, record, (), run=run, arena_id="")
        raise NoCheckpoint(no_such_step(storage.root, step, [candidate.step for candidate in every]))
    if not listed:
        raise NoCheckpoint(f"{storage.root} holds no checkpoint")
    return listed


def _run_of_copies(found: Catalog) -> str:
    """The run that checkpoints without a root's record come from: the newest one's, as for a job that goes on there."""
    manifests = [entry.manifest for entry in found.committed() or found.entries if entry.manifest is not None]
    return manifests[-1].run if manifests else ""


def _no_root(storage: LocalStorage) -> EasyckptError:
    """Why nothing of ours was found there."""
    if not os.path.isdir(storage.root):
        before, _, after = storage.root.rpartition("@")
        if after.isdecimal() and os.path.isdir(before):  # as the command line has it
            call = f"restore({before!r}, ..., step={int(after)})"
            return UsageError(f"{storage.root}: no such directory; @{after} is for the command line, here it is {call}")
        return NoCheckpoint(f"{storage.root}: no such directory")
    parent, name = os.path.split(os.path.realpath(storage.root))
    step = open_place(parent)[1].parse_committed(name)
    if step is not None:
        return UsageError(f"{storage.root} is one step of {parent}: restore({parent!r}, ..., step={step})")
    return ForeignFormat(f"{storage.root} is not a checkpoint root: no {ROOT_FILE} and no checkpoint in it")
