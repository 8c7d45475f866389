"""How a rank stands, by its own events. What a line says is believed only where it has the right type."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

_RECENT_SECONDS = 60.0
_RECENT = 1000
_WARNINGS = 20
_LONGEST_TEXT = 1000
_LARGEST = 1e15
_WARNING_KINDS = {"Warned": "message", "FlushFailed": "reason", "FlushSkipped": "reason", "SnapshotDiscarded": "reason"}


@dataclass(slots=True)
class Standing:
    """Of one rank, since its last start, or since the first event that is read of it."""

    rank: int
    since: float | None = None
    """Unix time of the first event that counts here."""
    started: dict[str, Any] | None = None
    """What it went on from: time, step, tier. None: before what is read."""
    step: int | None = None
    step_time: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    """Events by kind."""
    sealed_step: int | None = None
    sealed_time: float = 0.0
    sealed_bytes: int = 0
    held_up: float = 0.0
    """Seconds in all that calls of save_if_needed took."""
    recent: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """(step, unix time, seconds that its call took) of the newest steps."""
    flushing: tuple[int, float] | None = None
    """(step, unix time of the beginning) of the flush under way."""
    last_commit: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    warnings: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_WARNINGS))
    newest_warnings: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_WARNINGS))
    """Those of `warnings` that nothing else has followed: a start warns before it is told of."""

    def take(self, record: dict[str, Any]) -> None:
        """Count one event."""
        kind, step, time = record.get("event"), _whole(record, "step"), _number(record, "time")
        if not isinstance(kind, str):
            return
        began = kind in ("SnapshotBegun", "SnapshotSkipped")
        if kind == "Restored" or (began and step is not None and self.step is not None and step < self.step):
            self._start_again()
            if kind == "Restored":
                self.started = {"time": time, "step": step, "tier": _text(record, "tier")}
        self.since = time if self.since is None else self.since
        self.counts[kind] += 1
        if kind != "Warned":
            self.newest_warnings.clear()
        if kind in _WARNING_KINDS:
            text = _text(record, _WARNING_KINDS[kind])
            warning = {"rank": self.rank, "time": time, "kind": kind, "step": step, "text": text}
            self.warnings.append(warning)
            if kind == "Warned":
                self.newest_warnings.append(warning)
        if began and step is not None:
            seconds = _number(record, "seconds")
            self.step, self.step_time = step, time
            self.held_up += seconds
            self.recent.append((step, time, seconds))
        elif kind == "SnapshotSealed":
            self.sealed_step, self.sealed_time, self.sealed_bytes = step, time, _whole(record, "bytes") or 0
        elif kind == "FlushBegun" and step is not None:
            self.flushing = step, time
        elif kind in ("FlushCommitted", "FlushFailed"):
            self._flush_ended(kind, step, time, record)
        elif kind == "Measured":
            self.measured = {
                "held_up_seconds": _number(record, "seconds"),
                "slots": _whole(record, "slots"),
                "sealed": _whole(record, "sealed"),
                "survives": record.get("survives") is True,
            }

    def _flush_ended(self, kind: str, step: int | None, time: float, record: dict[str, Any]) -> None:
        self.flushing = None
        if kind == "FlushCommitted":
            seconds, nbytes = _number(record, "seconds"), _whole(record, "bytes") or 0
            rate = nbytes / seconds if seconds > 0 else math.inf
            self.last_commit = {
                "step": step,
                "time": time,
                "bytes": nbytes,
                "seconds": seconds,
                "bytes_per_second": rate if math.isfinite(rate) else None,
            }

    def _start_again(self) -> None:
        """The job was started anew: what it did before is no part of how it stands."""
        fresh = Standing(self.rank)
        for name in ("since", "started", "step", "counts", "held_up", "recent", "flushing", "measured"):
            setattr(self, name, getattr(fresh, name))
        self.sealed_step, self.sealed_time, self.sealed_bytes = None, 0.0, 0
        self.warnings = self.newest_warnings.copy()

    @property
    def steps_per_second(self) -> float | None:
        """Of the last minute of training; None where one step is all that is known."""
        newest = [entry for entry in self.recent if entry[1] >= self.step_time - _RECENT_SECONDS]
        if len(newest) < 2 or newest[-1][1] <= newest[0][1]:
            return None
        return (newest[-1][0] - newest[0][0]) / (newest[-1][1] - newest[0][1])

    def document(self, now: float) -> dict[str, Any]:
        """All that, for programs; ages in seconds."""
        calls = [seconds for _, _, seconds in self.recent]
        return {
            "rank": self.rank,
            "since": self.since,
            "started": self.started,
            "step": self.step,
            "step_age": _age(now, self.step_time) if self.step is not None else None,
            "steps_per_second": self.steps_per_second,
            "snapshots": {
                "sealed": self.counts["SnapshotSealed"],
                "skipped": self.counts["SnapshotSkipped"],
                "discarded": self.counts["SnapshotDiscarded"],
                "last_step": self.sealed_step,
                "last_age": _age(now, self.sealed_time) if self.sealed_step is not None else None,
                "bytes": self.sealed_bytes,
            },
            "flushes": {
                "committed": self.counts["FlushCommitted"],
                "failed": self.counts["FlushFailed"],
                "skipped": self.counts["FlushSkipped"],
                "running": None
                if self.flushing is None
                else {"step": self.flushing[0], "seconds": _age(now, self.flushing[1])},
            },
            "held_up": {
                "calls_seconds": self.held_up,
                "recent_mean": sum(calls) / len(calls) if calls else None,
                "recent_max": max(calls, default=None),
                "in_all_seconds": None if self.measured is None else self.measured["held_up_seconds"],
            },
            "memory": self.measured,
        }


def _age(now: float, time: float) -> float:
    return max(0.0, now - time)


def _whole(record: dict[str, Any], name: str) -> int | None:
    value = record.get(name)
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _number(record: dict[str, Any], name: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _LARGEST:  # NaN, too
        return 0.0
    return float(value)


def _text(record: dict[str, Any], name: str) -> str:
    return str(record.get(name) or "")[:_LONGEST_TEXT]
