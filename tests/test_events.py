"""EventLog: cheap to emit, nothing lost silently, bounded memory."""

from __future__ import annotations

import dataclasses
import json
import logging
import statistics
import threading
import time

import pytest

from easyckpt import events
from easyckpt.events import (
    EventLog,
    FlushCommitted,
    FlushFailed,
    Restored,
    Retained,
    SnapshotBegun,
    SnapshotSealed,
    SnapshotSkipped,
    Warned,
)


def lines_of(chunks):
    return [json.loads(line) for line in b"".join(chunks).splitlines()]


def test_events_are_json_lines_with_every_field():
    chunks = []
    log = EventLog(3, chunks.append)
    log.emit(SnapshotBegun(step=7, bytes=10, seconds=0.5, time=12.0))
    log.emit(Retained(removed=(1, 2), kept=(3,), rank=5))
    assert chunks == []
    assert log.drain() == 2
    assert len(chunks) == 1
    begun, retained = lines_of(chunks)
    assert begun == {"event": "SnapshotBegun", "step": 7, "bytes": 10, "seconds": 0.5, "time": 12.0, "rank": 3}
    assert (retained["rank"], retained["removed"], retained["kept"]) == (5, [1, 2], [3])
    assert log.drain() == 0
    assert len(chunks) == 1


def test_emit_does_no_io_and_costs_microseconds(tmp_path):
    path = tmp_path / "log"
    log = EventLog(0, lambda data: pytest.fail("sink on the training thread"), str(path))
    try:
        event = SnapshotBegun(step=1)
        costs = []
        for _ in range(2000):
            start = time.perf_counter()
            log.emit(event)
            costs.append(time.perf_counter() - start)
        assert statistics.median(costs) < 10e-6
        logging.getLogger("easyckpt.x").warning("direct")
        assert not path.exists()
    finally:
        logging.getLogger("easyckpt").removeHandler(log._handler)


def test_emit_goes_on_while_the_sink_hangs():
    entered, leave = threading.Event(), threading.Event()

    def sink(data):
        entered.set()
        leave.wait(60)

    log = EventLog(0, sink)
    log.emit(Warned(message="a"))
    thread = threading.Thread(target=log.drain)
    thread.start()
    try:
        assert entered.wait(60)
        start = time.perf_counter()
        log.emit(Warned(message="b"))
        assert log.stats().counts == {"Warned": 2}
        assert time.perf_counter() - start < 5
        assert not leave.is_set()
    finally:
        leave.set()
        thread.join()


def test_stats():
    log = EventLog(0)
    log.emit(SnapshotSealed(step=1, bytes=5))
    log.emit(SnapshotSealed(step=2, bytes=5))
    log.emit(FlushCommitted(step=1, bytes=4))
    for reason in ("floor", "floor", "memory"):
        log.emit(SnapshotSkipped(step=3, reason=reason))
    for number in range(3000):
        log.blocked(0.5)
        log.emit(FlushFailed(step=number, reason=f"different {number}"))
    stats = log.stats()
    assert stats.counts == {"SnapshotSealed": 2, "FlushCommitted": 1, "SnapshotSkipped": 3, "FlushFailed": 3000}
    assert (stats.bytes_staged, stats.bytes_committed) == (10, 4)
    assert (stats.last_sealed_step, stats.last_committed_step) == (2, 1)
    assert stats.reasons["SnapshotSkipped: floor"] == 2
    assert stats.blocked_seconds == 1500
    assert len(stats.blocked_recent) == 1000
    assert len(stats.reasons) == 1000  # bounded, whatever the reasons say


def test_full_queue_is_bounded_counted_and_told(caplog):
    log = EventLog(0, queue_limit=10)
    for step in range(25):
        log.emit(SnapshotBegun(step=step))
    assert log.stats().events_lost == 15
    assert log.stats().counts["SnapshotBegun"] == 25
    assert log.drain() == 10
    assert "15 events could not be recorded" in caplog.text


def test_a_failing_sink_is_counted_and_told_but_never_raises(caplog):
    def sink(data):
        raise OSError(28, "No space left on device")

    log = EventLog(0, sink)
    for step in range(9):
        log.emit(Warned(step=step, message="x"))
        log.drain()
    assert log.stats().events_lost == 9
    told = [record for record in caplog.records if "No space left" in record.getMessage()]
    assert len(told) == 4  # 1st, 2nd, 4th, 8th: not silent, not a flood


def test_a_log_file_that_cannot_be_written_never_raises(tmp_path, caplog):
    log = EventLog(0, None, str(tmp_path / "absent" / "log"))
    log.emit(Warned(message="x"))
    log.close()
    assert "cannot write the log file" in caplog.text


def test_readable_log(tmp_path, caplog):
    path = tmp_path / "log"
    log = EventLog(2, None, str(path))
    with caplog.at_level(logging.DEBUG, logger="easyckpt"):
        log.emit(SnapshotBegun(step=1))
        log.emit(FlushCommitted(step=10, bytes=2_500_000, seconds=0.25, attempt="abc"))
        log.emit(Restored(step=9, tier="memory", steps_lost=0, seconds=1.5))
        logging.getLogger("easyckpt.storage").warning("direct %d", 1)
        log.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 3  # what happens at every step stays out of the file; nothing twice
    text = "\n".join(lines)
    assert "INFO rank 2: flush committed, step 10, attempt: abc, 2.5 MB, 0.250 s" in text
    assert "INFO rank 2: restored, step 9, tier: memory, steps lost: 0, 1.500 s" in text
    assert "WARNING direct 1" in text
    assert "snapshot begun, step 1" in caplog.text
    logging.getLogger("easyckpt").warning("after close")
    assert path.read_text().splitlines() == lines


def test_repeated_skips_are_all_recorded_but_do_not_flood_the_log(tmp_path):
    chunks = []
    path = tmp_path / "log"
    log = EventLog(0, chunks.append, str(path))
    for step in range(100):
        log.emit(SnapshotSkipped(step=step, reason="no slot is free"))
    log.close()
    assert len(lines_of(chunks)) == 100
    assert len(path.read_text().splitlines()) == 7  # 1, 2, 4, ..., 64


def test_every_event_type_can_be_written():
    known = {"reason": "r", "removed": (1,), "tier": "memory", "message": "m"}
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)]
    assert len(kinds) == 12
    for kind in kinds:
        needed = {f.name: known[f.name] for f in dataclasses.fields(kind) if f.name in known}
        event = kind(step=1, **needed)
        assert json.loads(json.dumps(events.to_record(event, 0)))["event"] == kind.__name__
        assert "step 1" in events.to_line(event)


def test_concurrent_emits_and_drains_lose_nothing():
    chunks = []
    log = EventLog(0, chunks.append)
    done = threading.Event()

    def drainer():
        while not done.is_set():
            log.drain()

    def emitter():
        for step in range(500):
            log.emit(SnapshotBegun(step=step))

    threads = [threading.Thread(target=emitter) for _ in range(3)]
    background = threading.Thread(target=drainer)
    background.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    background.join()
    log.close()
    assert len(lines_of(chunks)) == log.stats().counts["SnapshotBegun"] == 1500
