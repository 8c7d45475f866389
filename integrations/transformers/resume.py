"""Where a call of ``train()`` goes on from, agreed by all ranks before anything is changed."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from easyckpt import catalog
from easyckpt.catalog import Entry
from easyckpt.distributed.agree import done_by_rank_0
from easyckpt.errors import ConfigError, DamagedCheckpoint, WorldSizeChanged
from easyckpt.format import layout
from easyckpt.format.manifest import RootRecord
from easyckpt.format.trainer_names import TrainerNaming
from easyckpt.integrations.transformers import judging, stock
from easyckpt.loading.loader import Restored
from easyckpt.prospect import Prospect
from easyckpt.storage.local import LocalStorage

_log = logging.getLogger("easyckpt")
_NAMING = TrainerNaming()


@dataclass(frozen=True, slots=True)
class Origin:
    """What a run goes on from."""

    step: int = 0
    """Finished steps."""
    found: Restored | None = None
    """A state of ours in this root."""
    foreign: str | None = None
    """The directory of a checkpoint that the Trainer wrote by itself."""
    elsewhere: str | None = None
    """The directory of a checkpoint of ours in another root."""
    explicit: bool = False
    """It was named, and is not the newest."""

    @property
    def ours(self) -> bool:
        """The whole state is put back by us."""
        return self.found is not None or self.elsewhere is not None

    def is_outside(self, root: str) -> bool:
        """Whether it is a checkpoint of the Trainer's own that does not lie in `root`."""
        return self.foreign is not None and os.path.realpath(os.path.dirname(self.foreign)) != os.path.realpath(root)


def find_origin(prospect: Prospect, resume: Any, state: Mapping[str, Any]) -> Origin:
    """Find what `resume` (as ``train(resume_from_checkpoint=…)`` takes it) means, and restore `state` from it.

    All ranks call it and get the same. Raises as Checkpointer.load does, ConfigError for a path where nothing is.
    """
    try:
        return _origin(prospect, resume, state)
    except WorldSizeChanged as error:
        raise WorldSizeChanged(
            f"{error} Of a Trainer's checkpoint there is more to choose from: start as many processes as before, for "
            "the same training; or go on without TrainerWrapper, by trainer.train(resume_from_checkpoint=PATH) with "
            "the path of a checkpoint-<step>, which is not exact; or begin anew from its weights, by from_pretrained."
        ) from error


def _origin(prospect: Prospect, resume: Any, state: Mapping[str, Any]) -> Origin:
    if resume is None or resume is False:
        return Origin()
    if resume is True:
        return _newest(prospect, state)
    path = os.path.realpath(os.path.expanduser(os.fspath(resume)))
    answer = _by_rank_0(prospect, "the checkpoint that was named", lambda: _told(prospect, path))
    if answer["kind"] == "newest":
        return _newest(prospect, state)
    if answer["kind"] == "here":
        found = prospect.look(state, step=answer["step"], timeline=answer["timeline"])
        return Origin(found.step, found=found, explicit=True)
    if answer["kind"] == "elsewhere":
        found = prospect.look_elsewhere(path, state)
        return Origin(found.step, elsewhere=path, explicit=True)
    _say_foreign(path)
    return Origin(answer["step"], foreign=path, explicit=True)


def _told(prospect: Prospect, path: str) -> dict[str, Any]:
    """Rank 0: what the directory `path` is."""
    if not os.path.isdir(path):
        raise ConfigError(f"resume_from_checkpoint={path!r}: no such directory")
    parent, name = os.path.split(path)
    step = _NAMING.parse_committed(name)
    storage = LocalStorage(parent)
    has_manifest = os.path.lexists(os.path.join(path, layout.MANIFEST))
    entry = catalog.inspect(storage, name, _NAMING) if has_manifest else None
    of_ours = entry is not None and entry.kind != "foreign"
    if parent == os.path.realpath(prospect.root) and step is not None:
        found, record = catalog.scan(prospect.storage, _NAMING), catalog.read_root(prospect.storage)
        steps = [entry.step for entry in found.entries if entry.kind == "foreign" or _on_line(record, entry)]
        if step == max(steps, default=None):
            return {"kind": "newest"}
        if entry is not None and of_ours:
            if entry.manifest is None:
                raise DamagedCheckpoint(f"{path} cannot be resumed from: {entry.problem}")
            return {"kind": "here", "step": step, "timeline": entry.manifest.timeline}
    elif of_ours:
        return {"kind": "elsewhere"}
    reason = judging.problem(storage, name, world_size=prospect.ranks.world_size, busy=prospect.channel.busy)
    if reason is not None:
        raise DamagedCheckpoint(f"{path} cannot be resumed from: {reason}")
    return {"kind": "foreign", "step": stock.step_of(path)}


def _on_line(record: RootRecord | None, entry: Entry) -> bool:
    """Whether `entry` is whole and lies in the past of the line that is open."""
    if not entry.valid or entry.kind != "committed" or entry.manifest is None:
        return False
    manifest = entry.manifest
    return record is None or not record.timelines or record.is_past(manifest.run, manifest.timeline, entry.step)


def _newest(prospect: Prospect, state: Mapping[str, Any]) -> Origin:
    """The newest that is whole: of ours, in memory or on storage, and of what the Trainer wrote by itself."""
    found, failure = None, None
    try:
        found = prospect.look(state)
    except DamagedCheckpoint as error:
        failure = error
    have = -1 if found is None or found.tier is None else found.step
    answer = _by_rank_0(prospect, "checkpoints of the Trainer's own", lambda: _newest_foreign(prospect, have))
    if answer["path"] is not None:
        _say_foreign(answer["path"])
        return Origin(answer["step"], foreign=answer["path"])
    if failure is not None:
        raise failure
    if answer["damaged"] and have < 0:
        raise DamagedCheckpoint(
            f"none of the checkpoints in {prospect.root} can be resumed from, and training is not started from nothing "
            f"by itself: {'; '.join(answer['damaged'])}. Train without resume_from_checkpoint to begin anew."
        )
    if found is None or found.tier is None:
        return _of_an_older_line(prospect, state)
    return Origin(found.step, found=found)


def _of_an_older_line(prospect: Prospect, state: Mapping[str, Any]) -> Origin:
    """A line that was begun, and has nothing yet, hides nothing: the newest of the lines before it."""
    damaged = []
    for path in _by_rank_0(prospect, "checkpoints of older lines", lambda: _older(prospect)):
        try:
            found = prospect.look_elsewhere(path, state)
        except DamagedCheckpoint as error:
            _log.warning("%s cannot be resumed from and is passed over: %s", path, error)
            damaged.append(str(error))
            continue
        _log.warning("nothing was saved since a new training began: going on from %s, of the one before", path)
        return Origin(found.step, elsewhere=path)
    if damaged:
        raise DamagedCheckpoint(
            f"{prospect.root}: none of {len(damaged)} checkpoints can be resumed from; {damaged[0]}"
        )
    if prospect.ranks.rank == 0:
        _log.warning("nothing to resume from in %s: training starts from scratch", prospect.root)
    return Origin()


def _older(prospect: Prospect) -> list[str]:
    """Rank 0: committed checkpoints that are not in the past of the open line, those of the newest lines first."""
    record, found = catalog.read_root(prospect.storage), catalog.scan(prospect.storage, _NAMING).committed()
    paths: dict[str, None] = {}
    for count in range(0 if record is None else len(record.timelines), 0, -1):
        assert record is not None
        past = dataclasses.replace(record, timelines=record.timelines[:count])
        on_line = [e for e in found if e.manifest is not None and past.on_ancestry(e.manifest.timeline, e.step)]
        paths |= {os.path.join(prospect.root, entry.name): None for entry in reversed(on_line)}
    return list(paths)


def _newest_foreign(prospect: Prospect, have: int) -> dict[str, Any]:
    """Rank 0: the newest whole checkpoint of the Trainer's own that is newer than step `have`."""
    storage = prospect.storage
    found, record = catalog.scan(storage, _NAMING), catalog.read_root(storage)
    damaged: list[str] = []
    _say_links(storage, have)
    for entry in reversed(found.of_kind("foreign")):
        path = os.path.join(storage.root, entry.name)
        if entry.step <= have or not _counts(record, entry, path):
            continue
        reason = judging.problem(storage, entry.name, world_size=prospect.ranks.world_size, busy=prospect.channel.busy)
        if reason is None:
            return {"path": path, "step": entry.step, "damaged": damaged}
        _log.warning("%s cannot be resumed from and is passed over: %s", path, reason)
        damaged.append(f"{entry.name}: {reason}")
    return {"path": None, "step": -1, "damaged": damaged}


def _say_links(storage: Any, have: int) -> None:
    """Rank 0: no link in a root is followed, since what it leads to may be rotated or changed by others."""
    for name in storage.listdir(""):
        path, step = os.path.join(storage.root, name), _NAMING.parse_committed(name)
        if step is not None and step > have and os.path.islink(path):
            _log.warning(
                "%s is a symbolic link and is passed over: resume_from_checkpoint=%r goes on from there",
                path,
                os.path.realpath(path),
            )


def _counts(record: RootRecord | None, entry: Entry, path: str) -> bool:
    """Whether the line of training that is open has gone on from a foreign checkpoint, or that is younger than it."""
    if record is None or not record.timelines:
        return True
    if entry.step <= record.begun_at:
        return True
    try:
        return os.stat(os.path.join(path, stock.STATE)).st_mtime > record.timelines[-1].opened
    except OSError:
        return False


def _say_foreign(path: str) -> None:
    verified = os.path.lexists(os.path.join(path, layout.MANIFEST))
    _log.warning(
        "%s was written by the Trainer itself: it has %snot all of the place in the data; what is saved from now on "
        "has",
        path,
        "" if verified else "no checksums, and ",
    )


def _by_rank_0(prospect: Prospect, what: str, work: Any) -> Any:
    return done_by_rank_0(prospect.channel, prospect.ranks, what, work, prospect.timeout)
