"""EventLog: cheap to emit, nothing lost silently, bounded memory."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import threading
import time

import pytest

from easyckpt import events
from easyckpt.errors import ConfigError
from easyckpt.events import (
    EventLog,
    FlushCommitted,
    FlushFailed,
    FlushSkipped,
    Restored,
    Retained,
    SnapshotBegun,
    SnapshotDiscarded,
    SnapshotSealed,
    SnapshotSkipped,
    Warned,
)
from tests.support.zygote import fork_program


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


def test_emit_does_no_io(tmp_path):
    path = tmp_path / "log"
    log = EventLog(0, lambda data: pytest.fail("sink on the training thread"), str(path))
    try:
        event = SnapshotBegun(step=1)
        for _ in range(2000):
            log.emit(event)
        logging.getLogger("easyckpt.x").warning("direct")
        assert path.read_text() == ""
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
    log.emit(SnapshotSealed(step=1, bytes=5, seconds=0.5))
    log.emit(SnapshotSealed(step=2, bytes=5, seconds=1.0))
    log.emit(FlushCommitted(step=1, bytes=4))
    for reason in ("floor", "floor", "memory"):
        log.emit(SnapshotSkipped(step=3, reason=reason, bytes=7))
    for number in range(3000):
        log.blocked(0.5)
        log.emit(FlushFailed(step=number, reason=f"different {number}"))
    stats = log.stats()
    assert stats.counts == {"SnapshotSealed": 2, "FlushCommitted": 1, "SnapshotSkipped": 3, "FlushFailed": 3000}
    assert (stats.bytes_staged, stats.bytes_committed) == (10, 4)
    assert stats.bytes == {"SnapshotSealed": 10, "FlushCommitted": 4, "SnapshotSkipped": 21, "FlushFailed": 0}
    assert stats.seconds == {"SnapshotSealed": 1.5, "FlushCommitted": 0, "SnapshotSkipped": 0, "FlushFailed": 0}
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


def test_a_log_file_that_cannot_be_written_any_more_never_raises(tmp_path, caplog):
    log = EventLog(0, None, str(tmp_path / "made" / "log"))
    shutil.rmtree(tmp_path / "made")
    log.emit(Warned(message="x"))
    log.close()
    assert "cannot write the log file" in caplog.text


def test_a_log_file_that_cannot_be_written_at_all_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "log", tmp_path):
        with pytest.raises(ConfigError, match=r"log_file_path: .* cannot be written"):
            EventLog(0, None, str(path))


LOGS = """
import logging, sys
from easyckpt.events import EventLog, Warned

if sys.argv[2] == "configured":
    logging.basicConfig(stream=sys.stdout)
logs = [EventLog(rank, None, sys.argv[1]) for rank in range(2)]
logs[1].emit(Warned(message="an event"))
logging.getLogger("easyckpt").warning("said directly")
for log in logs:
    log.close()
"""


@pytest.mark.parametrize("how", ["configured", "not configured"])
def test_warnings_are_seen_beside_a_log_file_as_without_one(tmp_path, how):
    child = fork_program(LOGS, tmp_path / "log", how, directory=tmp_path)
    out, stderr = child.communicate(100)
    seen, other = (out, stderr) if how == "configured" else (stderr, out)
    assert (seen.count("an event"), seen.count("said directly")) == (1, 1)
    assert "an event" not in other
    assert "said directly" not in other
    assert (tmp_path / "log").read_text().count("an event") == 1


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
    assert len(lines) == 4  # what happens at every step stays out of the file; nothing twice
    text = "\n".join(lines)
    assert "INFO rank 2: flush committed, step 10, attempt: abc, 2.5 MB, 0.250 s" in text
    assert "INFO rank 2: restored, step 9, tier: memory, steps lost: 0, 1.500 s" in text
    assert "WARNING direct 1" in text
    assert lines[-1].endswith(
        "INFO rank 2: in all: snapshots: 0 sealed, 0 skipped, 0 discarded; flushes: 1 committed (2.5 MB), 0 skipped, "
        "0 failed; training held up for 0.000 s"
    )
    assert "snapshot begun, step 1" in caplog.text
    logging.getLogger("easyckpt").warning("after close")
    assert path.read_text().splitlines() == lines


def test_snapshots_missed_now_and_then_are_said_once_in_plain_words_and_summed_up_at_the_end(tmp_path):
    chunks = []
    path = tmp_path / "log"
    log = EventLog(0, chunks.append, str(path))
    for step in range(0, 300, 10):
        for number in range(9):
            log.emit(SnapshotBegun(step=step + number, bytes=10))
            log.emit(SnapshotSealed(step=step + number, bytes=10))
        log.emit(SnapshotSkipped(step=step + 9, reason="no slot is free", bytes=10))
        log.emit(SnapshotDiscarded(step=step + 8, reason="torn" if step % 20 else "no step was seen", bytes=10))
        log.drain()
    log.close()
    assert sum(record["event"] == "SnapshotSkipped" for record in lines_of(chunks)) == 30
    *told, summary = path.read_text().splitlines()
    assert [line.partition("rank 0: ")[2].partition(": ")[0] for line in told] == [
        "1 of 10 snapshots so far skipped (no slot is free)",
        "1 of 10 snapshots so far discarded (no step was seen)",
        "1 of 20 snapshots so far discarded (torn)",
    ]
    assert "normal now and then" in told[0]
    assert all("Further ones are counted" in line for line in told)
    assert "snapshots: 270 sealed (0.0 MB), 30 skipped (no slot is free: 30), 30 discarded (" in summary


def test_where_most_snapshots_are_skipped_that_is_not_called_normal(tmp_path):
    path = tmp_path / "log"
    log = EventLog(0, None, str(path))
    for step in range(120):
        log.emit(SnapshotBegun(step=step) if step % 3 == 0 else SnapshotSkipped(step=step, reason="no slot is free"))
        log.drain()
    log.close()
    first, second, _ = path.read_text().splitlines()
    assert "normal now and then" in first
    assert "WARNING rank 0: most snapshots are skipped (67 of 101 snapshots so far" in second
    assert "save_mem_interval" in second


def test_skipped_flushes_warn_less_and_less_often(tmp_path):
    path = tmp_path / "log"
    log = EventLog(0, None, str(path))
    for step in range(100):
        log.emit(FlushSkipped(step=step, reason="the flush before was still running"))
    log.close()
    warnings = [line for line in path.read_text().splitlines() if "WARNING" in line]
    (advice,) = [line for line in warnings if 'back_pressure="wait"' in line]
    assert "save_storage_interval" in advice
    assert len(warnings) == 7 + 1  # 1, 2, 4, ..., 64, and once what to do


def test_failures_are_loud_every_time(tmp_path):
    path = tmp_path / "log"
    log = EventLog(0, None, str(path))
    for step in range(5):
        log.emit(FlushFailed(step=step, reason="disk"))
    log.close()
    assert path.read_text().count("ERROR") == 5


def test_what_is_unknown_is_said_to_be():
    assert "steps lost: unknown" in events.to_line(Restored(step=9, tier="storage"))
    assert "steps lost: 0" in events.to_line(Restored(step=9, tier="storage", steps_lost=0))
    assert events.to_record(Restored(step=9, tier="storage"), 0)["steps_lost"] is None


def test_every_event_type_can_be_written():
    known = {"reason": "r", "removed": (1,), "tier": "memory", "message": "m"} | {
        "slots": 4,
        "sealed": 2,
        "survives": True,
    }
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)]
    assert len(kinds) == 13
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
