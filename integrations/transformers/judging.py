"""Whether training can go on from what the Trainer wrote: to the byte where a manifest of ours has its checksums."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from easyckpt import catalog
from easyckpt.catalog import Catalog, Entry
from easyckpt.format import layout
from easyckpt.format.trainer_names import TrainerNaming
from easyckpt.integrations.transformers import stock
from easyckpt.storage.base import Storage
from easyckpt.verification import verify

_log = logging.getLogger("easyckpt")
_NAMING = TrainerNaming()
DAMAGED, UNFINISHED = "damaged", "unfinished"
_GENERATORS = re.compile(r"(.*/)?rng_state(_\d+)?\.pth")


def problem(storage: Storage, name: str, *, world_size: int, busy: Callable[[], None]) -> str | None:
    """What keeps a job of `world_size` processes from going on from the checkpoint `name`; None: nothing.

    The Trainer's files are as they are without sharding (see `stock`). `busy` is called as reading gets on.
    """
    return committed_problem(storage, name, busy=busy) or stock.problem(
        os.path.join(storage.root, name), world_size=world_size, busy=busy
    )


def committed_problem(storage: Storage, name: str, *, busy: Callable[[], None]) -> str | None:
    """What of the checkpoint `name` is not as its manifest says; None also where it has none."""
    entry = catalog.inspect(storage, name, _NAMING)
    if entry.manifest is None:
        return None if entry.kind == "foreign" else entry.problem
    if entry.problem is not None:
        return entry.problem
    return next((f"{one.file}: {one.message}" for one in verify(storage, entry, lambda _: busy())), None)


@dataclass(frozen=True, slots=True)
class Demands:
    """What a checkpoint must have for a training to go on from it."""

    world_size: int
    ranks: Sequence[int]
    """Those that go on from this directory."""
    plain: bool
    """Its files are the Trainer's own, without sharding: it is known which there must be."""
    busy: Callable[[], None] = lambda: None
    """Is called as reading gets on."""


def steps(storage: Storage) -> list[int]:
    """The steps of what has the name of a checkpoint."""
    return [entry.step for entry in checkpoints(catalog.scan(storage, _NAMING))]


def judge(storage: Storage, name: str, demands: Demands) -> tuple[str, str] | None:
    """Why a training cannot go on from ``name``: whether it never was a checkpoint, or is none any more; or None."""
    if not storage.exists(name):
        return (DAMAGED, f"there is no {os.path.join(storage.root, name)}")
    if storage.exists(f"{name}/{layout.MANIFEST}"):
        problem = _committed(storage, name, demands)
    elif _NAMING.parse_committed(name) in _unfinished(storage):
        return (UNFINISHED, "the job died while it was written")
    elif demands.plain:
        path = os.path.join(storage.root, name)
        problem = stock.problem(path, world_size=demands.world_size, ranks=demands.ranks, busy=demands.busy)
        if problem is None:
            _log.warning("%s was written by the Trainer itself: it has no checksums", path)
    elif any(has_manifest(storage, entry) for entry in checkpoints(catalog.scan(storage, _NAMING))):
        return (UNFINISHED, "it has no manifest, and others have one")
    else:
        problem = stock.state_problem(os.path.join(storage.root, name))
        if problem is None:
            _log.warning("%s has no manifest: nothing tells whether it is whole", name)
    return None if problem is None else (DAMAGED, problem)


def _committed(storage: Storage, name: str, demands: Demands) -> str | None:
    path = os.path.join(storage.root, name)
    problem = committed_problem(storage, name, busy=demands.busy) or stock.state_problem(path)
    if problem is not None:
        return problem
    if demands.plain:
        return stock.lacks(path, world_size=demands.world_size, ranks=demands.ranks)
    if not any(map(_GENERATORS.fullmatch, catalog.read_manifest(storage, name).files)):
        return "it holds a model only, no state of the training (save_only_model)"
    return None


def _unfinished(storage: Storage) -> set[int]:
    """The steps of what was being written when a job died."""
    return {mark.step for mark in catalog.scan(storage, _NAMING).of_kind("temporary")}


def checkpoints(found: Catalog) -> list[Entry]:
    """What has the name of a checkpoint, whoever committed it."""
    return [entry for entry in found.entries if _NAMING.parse_committed(entry.name) is not None]


def has_manifest(storage: Storage, entry: Entry) -> bool:
    """Whether somebody has committed it."""
    return storage.exists(f"{entry.name}/{layout.MANIFEST}")
