"""What happened, as typed values (`event_kinds`): counted at once, written out in the background.

``EventLog.emit`` runs on the training thread and only appends to a queue. ``drain``, called by a background thread,
writes the JSON lines (through `sink`), the readable log file and Python's logging. A failing sink or log file never
harms training, and is never silent: what is lost is counted and warned about.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from easyckpt.errors import ConfigError
from easyckpt.event_kinds import (
    STILL_RUNNING,
    Event,
    FlushBegun,
    FlushCommitted,
    FlushFailed,
    FlushSkipped,
    Measured,
    Restored,
    Retained,
    SnapshotBegun,
    SnapshotDiscarded,
    SnapshotSealed,
    SnapshotSkipped,
    Stats,
    Warned,
    in_plain_words,
    reason_of,
    summary,
    to_line,
    to_record,
)

__all__ = [
    "Event",
    "EventLog",
    "FlushBegun",
    "FlushCommitted",
    "FlushFailed",
    "FlushSkipped",
    "Measured",
    "Restored",
    "Retained",
    "SnapshotBegun",
    "SnapshotDiscarded",
    "SnapshotSealed",
    "SnapshotSkipped",
    "Stats",
    "Warned",
    "to_line",
    "to_record",
]

logger: Final = logging.getLogger("easyckpt")

#: Events that wait for drain() at most, so that memory stays bounded while storage hangs.
QUEUE_LIMIT: Final = 100_000
_RECENT: Final = 1_000


class _DeferredHandler(logging.Handler):
    """Collects what easyckpt logs directly, so that the log file gets it without I/O on the logging thread."""

    def __init__(self, lines: collections.deque[str]) -> None:
        super().__init__()
        self._lines = lines
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the formatted record, unless drain() itself made it.

        A program that has configured no logging sees warnings on stderr as without a log file: that there is this
        handler would end that.
        """
        if not getattr(record, "easyckpt_event", False):
            self._lines.append(self.format(record))
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and self._is_first_of_none_but_ours():
            last.handle(record)

    def _is_first_of_none_but_ours(self) -> bool:
        handlers = []
        at: logging.Logger | None = logger
        while at is not None:
            handlers += at.handlers
            at = at.parent if at.propagate else None
        others = [handler for handler in handlers if not isinstance(handler, _DeferredHandler)]
        return not others and handlers[:1] == [self]


def _appendable(path: str) -> str:
    """The absolute path of the log file, which can be appended to. Raises ConfigError."""
    whole = os.path.abspath(os.path.expanduser(path))
    try:
        os.makedirs(os.path.dirname(whole), exist_ok=True)
        with open(whole, "a"):
            return whole
    except OSError as error:
        raise ConfigError(f"log_file_path: {whole} cannot be written: {error.strerror}") from None


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
        self._path = None if log_file_path is None else _appendable(log_file_path)
        self._limit = queue_limit
        self._queue: collections.deque[Event] = collections.deque()
        self._lines: collections.deque[str] = collections.deque(maxlen=queue_limit)
        self._lock = threading.RLock()  # a signal handler may look at `stats` while its own thread is in `emit`
        self._draining = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._bytes: collections.Counter[str] = collections.Counter()
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._reasons: dict[str, int] = {}
        self._blocked = 0.0
        self._recent: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._lost = self._told_lost = 0
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
            self._counts[kind] += 1
            self._bytes[kind] += event.bytes
            self._seconds[kind] += event.seconds
            if kind == "SnapshotSealed":
                self._sealed_step = event.step
            elif kind == "FlushCommitted":
                self._committed_step = event.step
            else:
                self._count_reason(event)
            if len(self._queue) < self._limit:
                self._queue.append(event)
            else:
                self._lost += 1

    def _count_reason(self, event: Event) -> None:
        key = reason_of(event)
        if key is not None and (key in self._reasons or len(self._reasons) < _RECENT):
            self._reasons[key] = self._reasons.get(key, 0) + 1

    def set_sink(self, sink: Callable[[bytes], None] | None) -> None:
        """Where events go from now on, those emitted before included; None: to log file and Python's logging only."""
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
                bytes=dict(self._bytes),
                seconds=dict(self._seconds),
                reasons=dict(self._reasons),
                blocked_seconds=self._blocked,
                blocked_recent=tuple(self._recent),
                bytes_staged=self._bytes["SnapshotSealed"],
                bytes_committed=self._bytes["FlushCommitted"],
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

    def close(self, *, write: bool = True) -> None:
        """Write out the rest and a line on the whole, and take the log file's handler away from Python's logging.

        `write` False: storage hangs, so nothing is written.
        """
        if write:
            self.drain()
            stats = self.stats()
            if stats.counts:
                self._log(logging.INFO, time.time(), summary(stats))
                self._write_file()
        if self._handler is not None:
            logger.removeHandler(self._handler)
            self._handler = None

    def _write_logging(self, events: Iterable[Event]) -> None:
        for event in events:
            text = event.message if isinstance(event, Warned) else to_line(event)
            self._log(self._level(event), event.time, text)
        missed = [
            event
            for event in events
            if isinstance(event, (SnapshotSkipped, SnapshotDiscarded))
            or (isinstance(event, FlushSkipped) and event.reason == STILL_RUNNING)
        ]
        for event in {reason_of(event): event for event in missed}.values():
            key, text = in_plain_words(event, self.stats())
            if self._times(key) == 1:  # once: that a few are missed is no fault
                self._log(logging.WARNING, event.time, text)

    def _log(self, level: int, moment: float, text: str) -> None:
        logger.log(level, "rank %d: %s", self._rank, text, extra={"easyckpt_event": True})
        if self._path is not None and level >= logging.INFO:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
            millis = int(moment % 1 * 1000)
            self._lines.append(f"{stamp},{millis:03d} {logging.getLevelName(level)} rank {self._rank}: {text}")

    def _level(self, event: Event) -> int:
        """Repeated skips of flushes warn at their 1st, 2nd, 4th, 8th, ... time; all are counted and written."""
        repeated = isinstance(event, FlushSkipped) and not self._is_news(str(reason_of(event)))
        return logging.DEBUG if repeated else event.LEVEL

    def _is_news(self, key: str) -> bool:
        """Whether `key` comes for the 1st, 2nd, 4th, 8th, ... time."""
        seen = self._times(key)
        return seen & (seen - 1) == 0

    def _times(self, key: str) -> int:
        """How often `key` has come, this time included; 1 for ever where too many different ones have come."""
        if key not in self._warned and len(self._warned) >= _RECENT:
            return 1
        self._warned[key] = self._warned.get(key, 0) + 1
        return self._warned[key]

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
        sink = self._sink  # another thread may take it away
        if sink is None or not events:
            return
        lines = [json.dumps(to_record(event, self._rank), separators=(",", ":")) + "\n" for event in events]
        try:
            sink("".join(lines).encode())
        except Exception as error:  # noqa: BLE001 - the record of events must never be what stops a training
            with self._lock:
                self._lost += len(events)
            self._complain(f"cannot record {len(events)} events: {type(error).__name__}: {error}")

    def _complain(self, text: str) -> None:
        """Warn through Python's logging, which is all that is left; less and less often for the same trouble."""
        self._told_lost = self._lost
        if self._is_news(f"complaint: {text.partition(':')[0]}"):
            logger.warning("rank %d: %s", self._rank, text)
