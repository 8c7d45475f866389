"""Which checkpoint all ranks go on from, where each node may have a directory of its own."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from easyckpt.errors import ConfigError, DamagedCheckpoint
from easyckpt.format.trainer_names import TrainerNaming
from easyckpt.integrations.transformers import judging
from easyckpt.integrations.transformers.judging import DAMAGED, Demands
from easyckpt.storage.base import Storage
from easyckpt.storage.records_apart import place_of

_log = logging.getLogger("easyckpt")
_NAMING = TrainerNaming()


class Everybody(Protocol):
    """All ranks call it at the same time. Returns what each has answered; the error of one is raised on all."""

    def __call__(self, what: str, work: Callable[[], Any] | None, /) -> list[Any]:
        """Do `work` on this rank, if it has some."""


def sharers(everybody: Everybody, storage: Storage, rank: int, *, saves: bool) -> list[int]:
    """The ranks whose directory is the one of this `rank`: those that see the same probe of one that `saves`."""
    mine = _NAMING.trash("probe", secrets.token_hex(8))

    def leave() -> str:
        storage.makedirs(mine)
        return mine

    probes = everybody("probes in the directories", leave if saves else None)

    def first() -> int:
        seen = [other for other, probe in enumerate(probes) if probe is not None and storage.exists(probe)]
        if not seen:
            raise ConfigError(f"{storage.root}: no rank that saves has the directory of rank {rank}")
        return seen[0]

    try:
        firsts = everybody("who sees which probe", first)
    finally:
        if saves:
            storage.remove_tree(mine)
    return [other for other, one in enumerate(firsts) if one == firsts[rank]]


def where_to_go_on(everybody: Everybody, storage: Storage, resume: Any, demands: Demands | None) -> str | None:
    """The directory of the checkpoint that `resume` means; ranks that have `demands` look whether it is whole.

    A path that is the newest on each of these means what True does. Raises DamagedCheckpoint, on all ranks, where there
    are some and none is whole, or where the one that was named is not.
    """
    if resume is None or resume is False:
        return None
    if resume is not True:
        path = os.path.realpath(os.path.expanduser(os.fspath(resume)))
        if not _all_newest(everybody, storage, path, demands):
            return _named(everybody, path, demands)
    return _newest(everybody, storage, demands)


def _all_newest(everybody: Everybody, storage: Storage, path: str, demands: Demands | None) -> bool:
    def is_newest() -> bool:
        parent, name = os.path.split(path)
        steps = judging.steps(storage)
        return parent == os.path.realpath(storage.root) and _NAMING.parse_committed(name) == max(steps, default=-1)

    answers = everybody("the checkpoint that was named", None if demands is None else is_newest)
    return all(answer is not False for answer in answers)


def _named(everybody: Everybody, path: str, demands: Demands | None) -> str:
    def problem() -> tuple[str, str] | None:
        assert demands is not None
        if not os.path.isdir(path):
            raise ConfigError(f"resume_from_checkpoint={path!r}: no such directory")
        parent, name = os.path.split(path)
        return judging.judge(place_of(_NAMING, parent), name, demands)

    found = _said(everybody(f"whether {path} is whole", None if demands is None else problem))
    if found:
        raise DamagedCheckpoint(f"{path} cannot be resumed from: {found[0][1]}")
    return path


def _newest(everybody: Everybody, storage: Storage, demands: Demands | None) -> str | None:
    say = _log.warning if demands is not None and 0 in demands.ranks else _log.debug
    lists = everybody("which checkpoints there are", None if demands is None else lambda: judging.steps(storage))
    damaged = []
    for step in sorted({step for steps in lists for step in steps or ()}, reverse=True):
        name = _NAMING.committed(step)

        def problem(name: str = name) -> tuple[str, str] | None:
            assert demands is not None
            return judging.judge(storage, name, demands)

        found = _said(everybody(f"whether {name} is whole", None if demands is None else problem))
        if not found:
            return os.path.join(storage.root, name)
        say("%s cannot be resumed from and is passed over: %s", name, found[0][1])
        damaged += [f"{name}: {text}" for kind, text in found if kind == DAMAGED][:1]
    if damaged:
        raise DamagedCheckpoint(
            f"{storage.root}: no checkpoint is whole on every node, and training is not started from nothing by "
            f"itself: {'; '.join(damaged)}"
        )
    say("nothing to resume from in %s: training starts from scratch", storage.root)
    return None


def _said(answers: Sequence[Any]) -> list[tuple[str, str]]:
    """What was found wrong, damage first, and by which rank."""
    found = [(kind, f"rank {rank}: {text}") for rank, (kind, text) in _answered(answers)]
    return sorted(found, key=lambda one: one[0] != DAMAGED)


def _answered(answers: Sequence[Any]) -> list[tuple[int, tuple[str, str]]]:
    return [(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
