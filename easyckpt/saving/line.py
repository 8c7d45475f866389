"""A root's own record: its first one, and the line of training that rank 0 opens in it before the first save.

The order makes a crash anywhere harmless: the timeline is durable first, and from that moment on steps past the fork
are no candidates any more, whatever their names are.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from easyckpt import catalog, failpoints
from easyckpt.catalog import Catalog, Entry
from easyckpt.errors import NotLoaded, SaveFailed
from easyckpt.format import layout
from easyckpt.format.manifest import RootRecord, Timeline
from easyckpt.saving.attempt import is_own
from easyckpt.saving.commit import CommitContext
from easyckpt.saving.metrics import Metrics
from easyckpt.saving.retention import empty_trash
from easyckpt.storage.base import Storage
from easyckpt.verification import verify

logger = logging.getLogger("easyckpt")

OPEN_BEFORE = failpoints.declare("line.open.before", "the first save after a load has begun, nothing is changed")
OPENED = failpoints.declare("line.opened", "the timeline is durable, steps past the fork have their old names")
SET_ASIDE = failpoints.declare("line.set_aside", "one step past the fork was renamed")


@dataclass(frozen=True, slots=True)
class Origin:
    """What a line goes on from."""

    step: int
    timeline: str | None
    """None: from nothing."""
    explicit: bool = False
    """The user named the step."""
    again: bool = False
    """That step is to be saved once more: what was saved of it stays a candidate until then, and is no answer."""
    outside: bool = False
    """It lies in another root: nothing in this one is its past, nor what it leaves behind."""

    @property
    def alone(self) -> bool:
        """Whether nothing that this root holds has to do with it."""
        return self.outside or (self.step == 0 and self.timeline is None)


def new_root(storage: Storage, naming: layout.NamingScheme) -> RootRecord:
    """The record of a root that has none yet: a new run.

    Checkpoints that lie there already were copied there. The run of the newest one is the parent, and their timelines
    are the past that the new run goes on from: one after the other, in the order of their newest steps.
    """
    now = time.time()
    found = [entry.manifest for entry in catalog.scan(storage, naming).committed() if entry.manifest is not None]
    parent = found[-1] if found else None
    newest: dict[str, int] = {}
    for manifest in found:
        if parent is not None and manifest.run == parent.run:
            newest.pop(manifest.timeline, None)
            newest[manifest.timeline] = manifest.step
    lines: list[Timeline] = []
    for timeline, before in zip(newest, (None, *newest), strict=False):
        fork = 0 if before is None else newest[before]
        lines.append(Timeline(id=timeline, parent=before, fork_step=fork, explicit=False, opened=now))
    return RootRecord(
        run=secrets.token_hex(16),
        created=now,
        timelines=tuple(lines),
        parent=None if parent is None else f"{parent.run}/{parent.timeline}/{parent.step}",
    )


def open_line(
    context: CommitContext,
    origin: Origin | None,
    metrics: Metrics,
    *,
    incarnation: str,
    busy: Callable[[], None] = lambda: None,
) -> tuple[RootRecord, int]:
    """Open the line that goes on from `origin`; None when load() was never called. `metrics` past it are dropped.

    A leftover to be rolled forward is read as a whole, all ranks' files, and others are removed: `busy` is called as
    that gets on. Attempts of this `incarnation` of the job are no leftovers.
    Returns the root's new record, whose last timeline it is, and the newest step that is committed on it (-1: none).
    Raises NotLoaded when the root holds checkpoints that nobody has looked at, SaveFailed when storage refuses,
    LeaseLost when the root belongs to another job by now: it is asked before each change, since that other job may
    have taken over at any moment since this one has loaded.
    """
    try:
        return _open_line(context, origin, metrics, incarnation, busy)
    except OSError as error:
        root = context.storage.root
        raise SaveFailed(f"{root}: beginning a line of training failed, nothing is saved: {error}") from error


def _open_line(
    context: CommitContext, origin: Origin | None, metrics: Metrics, incarnation: str, busy: Callable[[], None]
) -> tuple[RootRecord, int]:
    storage = context.storage
    context.check_lease()
    record = catalog.read_root(storage)
    assert record is not None
    found = catalog.scan(storage, context.naming)
    if origin is None and any(entry.kind == "committed" for entry in found.entries):
        raise NotLoaded(
            f"{storage.root} holds checkpoints: call load() before the first save, or give the job another root"
        )
    origin = origin or Origin(0, None)
    failpoints.hit(OPEN_BEFORE)
    _tidy_attempts(context, record, found, incarnation, busy)
    parent = origin.timeline
    line = Timeline(
        id=secrets.token_hex(4),
        parent=parent,
        fork_step=origin.step,
        explicit=origin.explicit,
        opened=time.time(),
    )
    record = dataclasses.replace(record, timelines=(*record.timelines, line))
    context.check_lease()
    catalog.write_root(storage, record)
    failpoints.hit(OPENED)
    beside = context.keeps_other_lines and origin.alone
    committed = -1 if beside else _set_aside(context, record, origin.step)
    if origin.again:
        committed = min(committed, origin.step - 1)
    context.check_lease()
    metrics.cut(storage, origin.step)
    return record, committed


def _set_aside(context: CommitContext, record: RootRecord, fork: int) -> int:
    """Rename what does not lie in the past of the new line; returns the newest step that does."""
    storage, naming = context.storage, context.naming
    kept = [-1]
    for entry in catalog.scan(storage, naming).entries:
        if entry.kind not in ("committed", "foreign"):
            continue
        timeline = entry.manifest.timeline if entry.manifest is not None and entry.kind == "committed" else None
        if entry.step <= fork and (timeline is None or record.on_ancestry(timeline, entry.step)):
            if entry.problem is None:
                kept.append(entry.step)
            continue
        abandoned_by = _abandoned_by(record, timeline, entry.step)
        # What another program wrote stays: no line's name is on it.
        word = abandoned_by.id if entry.kind == "committed" else f"foreign-{secrets.token_hex(4)}"
        stale = naming.stale(entry.step, word)
        context.check_lease()
        until = "" if abandoned_by.explicit or entry.kind == "foreign" else ", and deleted with the next commit"
        logger.warning(
            "%s is not in the past of step %d, where training goes on from: set aside as %s%s",
            entry.name,
            fork,
            stale,
            until,
        )
        storage.rename(entry.name, stale)
        failpoints.hit(SET_ASIDE)
    storage.sync_dir("")
    return max(kept)


def _abandoned_by(record: RootRecord, timeline: str | None, step: int) -> Timeline:
    """The line that first left `step` behind: an earlier one than the newest where its opening was cut short.

    What a step back by name has left behind stays; it must not pass for the leavings of the fallback that came after.
    """
    for number, line in enumerate(record.timelines):
        past = dataclasses.replace(record, timelines=record.timelines[: number + 1])
        begun = any(line.id == timeline for line in past.timelines)
        if begun and timeline is not None and not past.on_ancestry(timeline, step):
            return line
    return record.timelines[-1]


def _tidy_attempts(
    context: CommitContext, record: RootRecord, found: Catalog, incarnation: str, busy: Callable[[], None]
) -> None:
    """Roll the newest whole attempt forward, remove the other leftovers of dead processes.

    An attempt of this job may be running, for a signal that came before the first save: its end is its own business.
    """
    storage = context.storage
    committed = {entry.step for entry in found.entries if entry.kind == "committed" and entry.problem is None}
    leftovers = [entry for entry in found.of_kind("temporary") if not is_own(entry.attempt, incarnation)]
    whole = [entry for entry in leftovers if _rolls_forward(record, entry, committed)]
    newest = max(whole, key=lambda entry: (entry.step, entry.attempt or ""), default=None)
    for entry in leftovers:
        if entry is newest and not verify(storage, entry, lambda _: busy()):
            _roll_forward(context, entry)
        else:
            context.check_lease()
            storage.remove_tree(entry.name)
            busy()
    empty_trash(storage, context.naming, found.of_kind("trash"), check_lease=context.check_lease, busy=busy)
    for name in found.stray:
        context.check_lease()
        storage.remove(name)
    storage.sync_dir("")


def _roll_forward(context: CommitContext, entry: Entry) -> None:
    storage, final = context.storage, context.naming.committed(entry.step)
    context.check_lease()
    # The process that wrote the manifest may have died before it could sync it; all other files were synced before it.
    manifest = f"{entry.name}/{layout.MANIFEST}"
    storage.replace(manifest, storage.read(manifest))
    if storage.exists(final):
        foreign = catalog.inspect(storage, final, context.naming).kind == "foreign"  # not ours to delete
        nonce = secrets.token_hex(4)
        away = context.naming.stale(entry.step, f"foreign-{nonce}") if foreign else context.naming.trash(final, nonce)
        context.check_lease()
        storage.rename(final, away)
    context.check_lease()
    storage.rename(entry.name, final)
    logger.warning("%s was complete but for its rename: it is %s now", entry.name, final)


def _rolls_forward(record: RootRecord, entry: Entry, committed: set[int]) -> bool:
    manifest = entry.manifest
    return (
        manifest is not None
        and entry.problem is None
        and record.is_past(manifest.run, manifest.timeline, entry.step)
        and entry.step not in committed
    )
