"""The kinds of events, what they add up to, and how each looks as a JSON record and as a line of a log."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

#: In a field's metadata: what a log says in place of None, which is left out of it otherwise.
WITHOUT = "without"
#: Snapshots before it can be said that most of them are skipped.
ENOUGH_TO_JUDGE = 100
#: Different reasons that a summary names.
REASONS_TOLD = 3
#: Why a flush is skipped where storage is slower than flushes are due.
STILL_RUNNING = "the flush before was still running"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Base of all events. `step` counts finished steps (None: of no step).

    `bytes` and `seconds` are what it is about and how long it took, 0 where there is nothing to be measured.
    """

    LEVEL: ClassVar[int] = logging.INFO

    step: int | None = None
    bytes: int = 0
    seconds: float = 0.0
    time: float = field(default_factory=time.time)
    rank: int = -1  # -1: filled in by the log that it is emitted to


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotBegun(Event):
    """The call that takes a snapshot of `bytes` has returned; `seconds` is how long it held the training up."""

    LEVEL: ClassVar[int] = logging.DEBUG


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSealed(Event):
    """A snapshot is whole and final in host memory; `seconds` since it began."""

    LEVEL: ClassVar[int] = logging.DEBUG


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSkipped(Event):
    """No snapshot of this step was taken; it would have had `bytes`. `seconds` is how long the try took."""

    LEVEL: ClassVar[int] = logging.DEBUG

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotDiscarded(Event):
    """A snapshot was begun and thrown away, because it may be torn; `seconds` since it began."""

    LEVEL: ClassVar[int] = logging.DEBUG

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushBegun(Event):
    """A snapshot is being written to storage; `bytes` is this rank's part in memory."""

    attempt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushCommitted(Event):
    """A checkpoint is committed and durable; `bytes` of all ranks' files, `seconds` since the flush began."""

    attempt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushFailed(Event):
    """A checkpoint was not committed, or it is unknown whether it was.

    `bytes` is this rank's part in memory, `seconds` since the flush began; 0 where none had begun.
    """

    LEVEL: ClassVar[int] = logging.ERROR

    reason: str
    attempt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushSkipped(Event):
    """A flush was due and all ranks agreed not to make it: nothing was written, no time was spent."""

    LEVEL: ClassVar[int] = logging.WARNING

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Retained(Event):
    """Retention removed the steps `removed`, `bytes` in all; `kept` are left, the newest of them is `step`."""

    removed: tuple[int, ...]
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored(Event):
    """A state was applied from `tier` ("memory" or "storage"; "none": nothing was found); `bytes` of this rank's."""

    tier: str
    path: str | None = None
    timeline: str | None = None
    steps_lost: int | None = field(default=None, metadata={WITHOUT: "unknown"})
    """Finished steps after the restored one, as far as memory and the logs of the run tell; None: they tell nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured(Event):
    """How this rank stands, every few seconds while that changes; `seconds` is how long training was held up in all."""

    LEVEL: ClassVar[int] = logging.DEBUG

    slots: int
    """How many slots the arena means to have."""
    sealed: int
    """Slots that hold a whole snapshot."""
    survives: bool
    """Whether these survive the death of the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned(Event):
    """Anything else that the user should read."""

    LEVEL: ClassVar[int] = logging.WARNING

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What one rank has done so far."""

    counts: dict[str, int]
    """Events by kind."""

    bytes: dict[str, int]
    """Sum of their bytes by kind."""

    seconds: dict[str, float]
    """Sum of their seconds by kind."""

    reasons: dict[str, int]
    """Skipped, discarded and failed ones by "kind: reason" (the first 1,000 different ones)."""

    blocked_seconds: float
    """Seconds in all that the training thread was held up."""

    blocked_recent: tuple[float, ...]
    """The same of the last calls, newest last."""

    bytes_staged: int
    bytes_committed: int
    last_sealed_step: int | None
    last_committed_step: int | None
    events_lost: int
    """Events that could not be written out, by a full queue or a failing sink."""


def reason_of(event: Event) -> str | None:
    """What `Stats.reasons` counts the event under; None where it has no reason."""
    return f"{type(event).__name__}: {event.reason}" if hasattr(event, "reason") else None


def in_plain_words(event: SnapshotSkipped | SnapshotDiscarded | FlushSkipped, stats: Stats) -> tuple[str, str]:
    """What it means for the user that something was missed as `event` says; and a key, to say it once."""
    key = str(reason_of(event))
    if isinstance(event, FlushSkipped):
        return f"about {key}", (
            "due flushes are skipped while the one before is being written, so that training is not held up: the next "
            "due step is flushed, and a clean end commits the newest. To skip none, set a larger save_storage_interval "
            'or back_pressure="wait"'
        )
    begun, skipped = stats.counts.get("SnapshotBegun", 0), stats.counts.get("SnapshotSkipped", 0)
    so_far = f"{stats.reasons.get(key, 1)} of {begun + skipped} snapshots so far"
    if isinstance(event, SnapshotDiscarded):
        text = f"{so_far} discarded ({event.reason}): only whole snapshots are kept, the one before stays"
    elif skipped > begun and begun + skipped >= ENOUGH_TO_JUDGE:
        key = "most are skipped"
        text = (
            f"most snapshots are skipped ({so_far}, last: {event.reason}): the newest one in memory may be many steps "
            "old. Steps are too short for a snapshot at each: set a larger save_mem_interval, or more slots"
        )
    else:
        text = (
            f"{so_far} skipped ({event.reason}): normal now and then, where steps are shorter than a round of the "
            "memory tier, or the state has just grown. The snapshot before stays; training was not held up"
        )
    return key, f"{text}. Further ones are counted: stats(), and the last line of the log"


def summary(stats: Stats) -> str:
    """One line on everything that was done."""
    parts = [
        "in all: snapshots: " + ", ".join(_told(stats, f"Snapshot{how}") for how in ("Sealed", "Skipped", "Discarded")),
        "flushes: " + ", ".join(_told(stats, f"Flush{how}") for how in ("Committed", "Skipped", "Failed")),
        f"training held up for {stats.blocked_seconds:.3f} s",
    ]
    return "; ".join(parts)


def _told(stats: Stats, kind: str) -> str:
    """How many of a kind there were, their bytes, and why, the most frequent reasons first."""
    found = {key: count for key, count in stats.reasons.items() if key.startswith(f"{kind}: ")}
    ranked = sorted(found, key=lambda key: -found[key])
    notes = [f"{key.partition(': ')[2]}: {found[key]}" for key in ranked[:REASONS_TOLD]]
    if len(ranked) > REASONS_TOLD:
        notes.append(f"{len(ranked) - REASONS_TOLD} other reasons")
    if not found and stats.bytes.get(kind):
        notes = [f"{stats.bytes[kind] / 1e6:.1f} MB"]
    word = kind.removeprefix("Snapshot").removeprefix("Flush").lower()
    return f"{stats.counts.get(kind, 0)} {word}" + (f" ({', '.join(notes)})" if notes else "")


def to_record(event: Event, rank: int) -> dict[str, Any]:
    """The JSON object of an event; `rank` fills in where the event has none."""
    record: dict[str, Any] = {"event": type(event).__name__}
    for entry in dataclasses.fields(event):
        value = getattr(event, entry.name)
        record[entry.name] = list(value) if isinstance(value, tuple) else value
    if event.rank < 0:
        record["rank"] = rank
    return record


def to_line(event: Event) -> str:
    """The readable text of an event: kind, step, what it says, size, duration."""
    parts = [_words(type(event).__name__)]
    if event.step is not None:
        parts.append(f"step {event.step}")
    for entry in dataclasses.fields(event):
        value = getattr(event, entry.name)
        value = entry.metadata.get(WITHOUT) if value is None else value
        if entry.name in Event.__dataclass_fields__ or value in (None, "", ()):
            continue
        if isinstance(value, tuple):
            value = " ".join(map(str, value))
        parts.append(f"{entry.name.replace('_', ' ')}: {value}")
    if event.bytes:
        parts.append(f"{event.bytes / 1e6:.1f} MB")
    if event.seconds:
        parts.append(f"{event.seconds:.3f} s")
    return ", ".join(parts)


def _words(name: str) -> str:
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()
