"""What happened, as typed values: counted at once, written out in the background.

``EventLog.emit`` runs on the training thread and only appends to a queue. ``drain``, called by a background thread,
writes the JSON lines (through `sink`), the readable log file and Python's logging. A failing sink or log file never
harms training, and is never silent: what is lost is counted and warned about.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

logger: Final = logging.getLogger("easyckpt")

#: Events that wait for drain() at most, so that memory stays bounded while storage hangs.
QUEUE_LIMIT: Final = 100_000
_RECENT: Final = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Base of all events. `step` counts finished steps (None: of no step), `seconds` is how long it took."""

    LEVEL: ClassVar[int] = logging.INFO

    step: int | None = None
    bytes: int = 0
    seconds: float = 0.0
    time: float = field(default_factory=time.time)
    rank: int = -1  # -1: filled in by the log that it is emitted to


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotBegun(Event):
    """The call that takes a snapshot has returned; `seconds` is how long it held the training up."""

    LEVEL: ClassVar[int] = logging.DEBUG


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSealed(Event):
    """A snapshot is whole and final in host memory; `seconds` since it began."""

    LEVEL: ClassVar[int] = logging.DEBUG


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSkipped(Event):
    """No snapshot of this step was taken."""

    LEVEL: ClassVar[int] = logging.WARNING

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotDiscarded(Event):
    """A snapshot was begun and thrown away, because it may be torn."""

    LEVEL: ClassVar[int] = logging.WARNING

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushBegun(Event):
    """A snapshot is being written to storage."""

    attempt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushCommitted(Event):
    """A checkpoint is committed and durable; `seconds` since the flush began."""

    attempt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushFailed(Event):
    """A checkpoint was not committed, or it is unknown whether it was."""

    LEVEL: ClassVar[int] = logging.ERROR

    reason: str
    attempt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushSkipped(Event):
    """A flush was due and all ranks agreed not to make it."""

    LEVEL: ClassVar[int] = logging.WARNING

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Retained(Event):
    """Retention removed the steps `removed`; `kept` are left."""

    removed: tuple[int, ...]
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored(Event):
    """A state was applied from `tier` ("memory" or "storage"; "none": nothing was found)."""

    tier: str
    path: str | None = None
    timeline: str | None = None
    steps_lost: int | None = None


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


class _DeferredHandler(logging.Handler):
    """Collects what easyckpt logs directly, so that the log file gets it without I/O on the logging thread."""

    def __init__(self, lines: collections.deque[str]) -> None:
        super().__init__()
        self._lines = lines
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the formatted record, unless drain() itself made it."""
        if not getattr(record, "easyckpt_event", False):
            self._lines.append(self.format(record))


class EventLog:
    """Counts and keeps the events of one Checkpointer.

    `sink` takes finished JSON lines (appends them to storage); `log_file_path` is appended to. Both are used by
    drain() only. Every method may be called from any thread.
    """

    def __init__(
        self,
        rank: int,
        sink: Callable[[bytes], None] | None = None,
        log_file_path: str | None = None,
        *,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        self._rank = rank
        self._sink = sink
        self._path = log_file_path
        self._limit = queue_limit
        self._queue: collections.deque[Event] = collections.deque()
        self._lines: collections.deque[str] = collections.deque(maxlen=queue_limit)
        self._lock = threading.Lock()
        self._draining = threading.Lock()
        self._counts: dict[str, int] = {}
        self._reasons: dict[str, int] = {}
        self._blocked = 0.0
        self._recent: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._staged = self._committed = self._lost = self._told_lost = 0
        self._sealed_step: int | None = None
        self._committed_step: int | None = None
        self._warned: dict[str, int] = {}
        self._handler: logging.Handler | None = None
        if log_file_path is not None:
            self._handler = _DeferredHandler(self._lines)
            logger.addHandler(self._handler)

    def emit(self, event: Event) -> None:
        """Count `event` and queue it for drain(). A few microseconds; never blocks on I/O, never raises."""
        kind = type(event).__name__
        with self._lock:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            if kind == "SnapshotSealed":
                self._staged += event.bytes
                self._sealed_step = event.step
            elif kind == "FlushCommitted":
                self._committed += event.bytes
                self._committed_step = event.step
            else:
                self._count_reason(kind, event)
            if len(self._queue) < self._limit:
                self._queue.append(event)
            else:
                self._lost += 1

    def _count_reason(self, kind: str, event: Event) -> None:
        reason = getattr(event, "reason", None)
        if reason is not None:
            key = f"{kind}: {reason}"
            if key in self._reasons or len(self._reasons) < _RECENT:
                self._reasons[key] = self._reasons.get(key, 0) + 1

    def set_sink(self, sink: Callable[[bytes], None]) -> None:
        """Where events go from now on, those emitted before included."""
        self._sink = sink

    def blocked(self, seconds: float) -> None:
        """Add to the time that the training thread was held up."""
        with self._lock:
            self._blocked += seconds
            self._recent.append(seconds)

    def stats(self) -> Stats:
        """A copy of the counters."""
        with self._lock:
            return Stats(
                counts=dict(self._counts),
                reasons=dict(self._reasons),
                blocked_seconds=self._blocked,
                blocked_recent=tuple(self._recent),
                bytes_staged=self._staged,
                bytes_committed=self._committed,
                last_sealed_step=self._sealed_step,
                last_committed_step=self._committed_step,
                events_lost=self._lost,
            )

    def drain(self) -> int:
        """Write out what is queued; returns the number of events. For a background thread: does I/O, never raises."""
        with self._draining:
            with self._lock:
                events = list(self._queue)
                self._queue.clear()
            self._write_logging(events)
            self._write_file()
            self._write_sink(events)
            if self._lost > self._told_lost:
                self._complain(f"{self._lost} events could not be recorded: they came faster than they were written")
            return len(events)

    def close(self) -> None:
        """Drain for the last time and take the log file's handler away from Python's logging."""
        self.drain()
        if self._handler is not None:
            logger.removeHandler(self._handler)
            self._handler = None

    def _write_logging(self, events: Iterable[Event]) -> None:
        for event in events:
            level = self._level(event)
            text = event.message if isinstance(event, Warned) else to_line(event)
            logger.log(level, "rank %d: %s", self._rank, text, extra={"easyckpt_event": True})
            if self._path is not None and level >= logging.INFO:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
                millis = int(event.time % 1 * 1000)
                self._lines.append(f"{stamp},{millis:03d} {logging.getLevelName(level)} rank {self._rank}: {text}")

    def _level(self, event: Event) -> int:
        """Repeated skips warn at their 1st, 2nd, 4th, 8th, ... time; all are counted, and written as events."""
        if not isinstance(event, (SnapshotSkipped, SnapshotDiscarded, FlushSkipped)):
            return event.LEVEL
        key = f"{type(event).__name__}: {event.reason}"
        return event.LEVEL if self._is_news(key) else logging.DEBUG

    def _is_news(self, key: str) -> bool:
        """Whether `key` comes for the 1st, 2nd, 4th, 8th, ... time."""
        if key not in self._warned and len(self._warned) >= _RECENT:
            return True
        seen = self._warned[key] = self._warned.get(key, 0) + 1
        return seen & (seen - 1) == 0

    def _write_file(self) -> None:
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        if self._path is None or not lines:
            return
        try:
            with open(self._path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write("".join(line + "\n" for line in lines))
        except OSError as error:
            self._complain(f"cannot write the log file {self._path}: {error}; {len(lines)} lines are lost")

    def _write_sink(self, events: list[Event]) -> None:
        if self._sink is None or not events:
            return
        lines = [json.dumps(to_record(event, self._rank), separators=(",", ":")) + "\n" for event in events]
        try:
            self._sink("".join(lines).encode())
        except Exception as error:  # noqa: BLE001 - the record of events must never be what stops a training
            with self._lock:
                self._lost += len(events)
            self._complain(f"cannot record {len(events)} events: {type(error).__name__}: {error}")

    def _complain(self, text: str) -> None:
        """Warn through Python's logging, which is all that is left; less and less often for the same trouble."""
        self._told_lost = self._lost
        if self._is_news(f"complaint: {text.partition(':')[0]}"):
            logger.warning("rank %d: %s", self._rank, text)
