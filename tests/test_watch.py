"""Watch: it tells what a job does out of its files, as they come, and never writes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import easyckpt
from easyckpt.cli.watch.following import Tail, last_record
from easyckpt.cli.watch.looking import Watcher
from easyckpt.event_kinds import (
    FlushBegun,
    FlushCommitted,
    FlushFailed,
    Measured,
    Restored,
    SnapshotBegun,
    SnapshotDiscarded,
    SnapshotSealed,
    SnapshotSkipped,
    Warned,
    to_record,
)
from easyckpt.format import layout
from easyckpt.format.manifest import LeaseRecord
from easyckpt.saving import housekeeper
from easyckpt.storage.local import LocalStorage
from tests.support.commands import everything_in, run  # noqa: F401 - a fixture
from tests.support.livejobs import job  # noqa: F401 - a fixture


def lines(rank: int, *events) -> bytes:
    return "".join(json.dumps(to_record(event, rank)) + "\n" for event in events).encode()


@pytest.fixture
def root(tmp_path) -> Path:
    path = tmp_path / "exp"
    (path / layout.EVENTS).mkdir(parents=True)
    return path


def write(root: Path, rank: int, data: bytes) -> None:
    with open(root / layout.events_file(rank), "ab") as file:
        file.write(data)


def watcher(root: Path) -> Watcher:
    return Watcher(LocalStorage(root), layout.NativeNaming())


def view(run, root: Path, *, step: int) -> dict:
    """The view once the job's background threads have written down that it came to `step`, and its metrics."""
    while True:
        ran = run("watch", root, "--once", "--json")
        assert ran.code == 0
        document = ran.document
        steps = [rank["snapshots"]["last_step"] for rank in document["ranks"]]
        if steps == [step] and (document["metrics"] or {}).get("step") == step:
            return document
        time.sleep(0.02)


# -- a real job


def test_one_view_of_a_running_job(job, run, tmp_path):
    alive = job("--steps", "6", "--every", "4")
    document = view(run, tmp_path / "exp", step=6)
    [rank] = document["ranks"]
    assert rank["snapshots"]["last_step"] == 6
    assert rank["snapshots"]["sealed"] + rank["snapshots"]["skipped"] == 6
    assert rank["flushes"]["committed"] == 1
    assert rank["flushes"]["running"] is None
    assert rank["started"]["tier"] == "none"
    assert rank["held_up"]["recent_max"] >= rank["held_up"]["recent_mean"] > 0
    assert (document["lease"]["pid"], document["lease"]["alive"]) == (alive.process.pid, True)
    assert document["last_commit"]["step"] == document["checkpoints"]["newest"]["step"] == 4
    assert document["metrics"]["step"] == 6
    assert document["metrics"]["loss"] > 0
    shown = run("watch", tmp_path / "exp")  # no terminal: as with --once
    assert shown.code == 0
    assert f"owned by process {alive.process.pid}" in shown.out
    assert "last commit: step 4" in shown.out
    alive.end()
    assert run("watch", tmp_path / "exp", "--json").document["lease"] is None


def test_a_job_that_was_started_again_counts_from_its_start(job, run, tmp_path):
    job("--steps", "6").kill()
    alive = job("--steps", "9", "--every", "8")
    [rank] = view(run, tmp_path / "exp", step=9)["ranks"]
    assert (rank["started"]["step"], rank["started"]["tier"]) == (6, "memory")
    assert (rank["step"], rank["snapshots"]["sealed"], rank["flushes"]["committed"]) == (9, 3, 1)
    alive.end()


def test_an_owner_that_was_killed_is_said_to_be_dead_and_nothing_is_written(job, run, tmp_path, memory_dir):
    killed = job()
    killed.kill()
    before = everything_in(tmp_path), everything_in(memory_dir)
    lease = run("watch", tmp_path / "exp", "--json").document["lease"]
    assert (lease["pid"], lease["alive"]) == (killed.process.pid, False)
    first = run("watch", tmp_path / "exp").out.splitlines()[0]
    assert "owned by" not in first
    assert f"process {killed.process.pid} on {socket.gethostname()} is dead" in first
    assert (everything_in(tmp_path), everything_in(memory_dir)) == before
    for step, how in ((4, "committed"), (6, "under way")):
        write(tmp_path / "exp", 0, lines(0, FlushBegun(step=step, time=time.time())))
        assert f"step {step} was {how} when the job ended" in run("watch", tmp_path / "exp").out


@pytest.mark.parametrize(("silent", "gone"), [(10.0, False), (3600.0, True)])
def test_an_owner_on_another_host_may_be_gone_if_it_is_silent_for_long(root, run, silent, gone):
    (root / layout.NativeNaming().committed(3)).mkdir()
    record = LeaseRecord(
        host="elsewhere", boot="another/1/2", pid=4711, run="a" * 32, incarnation="i", token="b" * 32,
        lock="/no/such", time=time.time() - silent,
    )  # fmt: skip
    (root / layout.LEASE).write_bytes(record.to_bytes())
    lease = run("watch", root, "--json").document["lease"]
    assert (lease["host"], lease["alive"]) == ("elsewhere", None)
    assert lease["renewed_age"] >= silent
    first = run("watch", root).out.splitlines()[0]
    assert "owned by process 4711 on elsewhere" in first
    assert ("it may be gone" in first) is gone


def test_the_live_view_follows_a_job_and_ends_well_by_ctrl_c(job, tmp_path):
    first = job("--steps", "3")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "easyckpt", "watch", str(tmp_path / "exp"), "--interval", "0.1"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "COLUMNS": "160", "LINES": "40", "TERM": "xterm"},
    )
    os.close(slave)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            assert process.poll() is None, seen.decode()
            if select.select([master], [], [], 0.1)[0]:
                seen += os.read(master, 1 << 16)

    try:
        until(b"metrics of step 3")
        first.kill()
        second = job("--steps", "5")
        until(b"metrics of step 5")
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            with contextlib.suppress(OSError):  # the other end is closed
                if select.select([master], [], [], 0.05)[0]:
                    os.read(master, 1 << 16)
        assert process.returncode == 0
        second.end()
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_the_engine_says_how_it_stands(root, monkeypatch):
    monkeypatch.setattr(housekeeper, "MEMORY_PERIOD_SECONDS", 0.0)
    model = torch.nn.Linear(4, 4)
    with easyckpt.Checkpointer(root, {"model": model}, slots=3) as ckpt:
        ckpt.load()
        for step in range(1, 4):
            ckpt.save_if_needed(step)
            ckpt.wait()
        looking = watcher(root)
        memory = None
        while memory is None or memory["sealed"] < 2:
            memory = next((rank["memory"] for rank in looking.look()["ranks"]), None)
        blocked = ckpt.stats().blocked_seconds
    assert (memory["slots"], memory["survives"]) == (3, True)
    assert 0 < memory["held_up_seconds"] <= blocked


def test_a_rank_that_stands_still_says_so_once(root, monkeypatch):
    """The event log of a job that waits for hours does not grow."""
    monkeypatch.setattr(housekeeper, "MEMORY_PERIOD_SECONDS", 0.0)
    with easyckpt.Checkpointer(root, {"model": torch.nn.Linear(4, 4)}) as ckpt:
        ckpt.load()
        ckpt.save_if_needed(1)
        ckpt.wait()
        house = ckpt._housekeeper
        house.write_now(10)
        house.write_now(10)
        before = ckpt.stats().counts["Measured"]
        for _ in range(10):
            assert house.write_now(10)
        assert ckpt.stats().counts["Measured"] == before


# -- files as they come


def test_all_ranks_are_told_of(root):
    for rank in range(3):
        events = [SnapshotBegun(step=step, seconds=0.25, time=100.0 + step) for step in range(1, 5 + rank)]
        write(root, rank, lines(rank, Restored(step=0, tier="none", time=100.0), *events))
    document = watcher(root).look()
    assert [rank["step"] for rank in document["ranks"]] == [4, 5, 6]
    assert [rank["steps_per_second"] for rank in document["ranks"]] == [1.0, 1.0, 1.0]
    assert document["ranks"][2]["held_up"] == {
        "calls_seconds": 1.5, "recent_mean": 0.25, "recent_max": 0.25, "in_all_seconds": None,
    }  # fmt: skip


def test_snapshots_flushes_and_warnings_are_counted(root):
    write(
        root,
        0,
        lines(
            0,
            SnapshotSealed(step=1, bytes=8, time=1.0),
            SnapshotSkipped(step=2, reason="no slot", time=2.0),
            SnapshotDiscarded(step=3, reason="torn", time=3.0),
            FlushBegun(step=1, time=4.0),
            FlushFailed(step=1, reason="disk full", time=5.0),
            FlushBegun(step=3, time=6.0),
            FlushCommitted(step=3, bytes=100, seconds=2.0, time=8.0),
            FlushBegun(step=5, time=9.0),
            Measured(seconds=1.5, slots=4, sealed=2, survives=False, time=10.0),
        ),
    )
    document = watcher(root).look()
    [rank] = document["ranks"]
    assert [rank["snapshots"][name] for name in ("sealed", "skipped", "discarded")] == [1, 1, 1]
    assert [rank["flushes"][name] for name in ("committed", "failed", "skipped")] == [1, 1, 0]
    assert rank["flushes"]["running"]["step"] == 5
    assert document["last_commit"]["bytes_per_second"] == 50.0
    assert rank["memory"] == {"held_up_seconds": 1.5, "slots": 4, "sealed": 2, "survives": False}
    assert [(each["kind"], each["text"]) for each in document["warnings"]] == [
        ("SnapshotDiscarded", "torn"),
        ("FlushFailed", "disk full"),
    ]


def test_warnings_of_the_start_before_are_forgotten_and_those_of_the_new_one_are_not(root):
    """A start warns (of a checkpoint that it passes over, for instance) before it says where it goes on."""
    before = [Warned(message="old", time=1.0), SnapshotSealed(step=1, bytes=8, time=2.0)]
    start = [Warned(message="passed over", time=3.0), Restored(step=1, tier="storage", time=4.0)]
    write(root, 0, lines(0, *before, *start, Warned(message="later", time=5.0)))
    assert [each["text"] for each in watcher(root).look()["warnings"]] == ["passed over", "later"]


def test_what_an_ended_job_has_not_said_is_not_waited_for(root, run):
    (root / layout.NativeNaming().committed(3)).mkdir()
    write(root, 0, lines(0, SnapshotBegun(step=3, time=1.0)))
    assert "held up in all" not in run("watch", root).out
    write(root, 0, lines(0, Measured(seconds=1.5, slots=4, sealed=2, survives=False, time=10.0)))
    assert "held up in all: 1.50 s" in run("watch", root).out


def test_a_line_is_counted_once_it_is_whole(root):
    looking = watcher(root)
    line = lines(0, SnapshotBegun(step=7, time=1.0))
    write(root, 0, line[:20])
    assert looking.look()["ranks"][0]["step"] is None
    write(root, 0, line[20:] + line[:5])
    for _ in range(2):
        [rank] = looking.look()["ranks"]
        assert (rank["step"], rank["held_up"]["recent_max"]) == (7, 0.0)


def test_a_torn_line_hides_no_other(root):
    good = lines(0, SnapshotBegun(step=7, time=1.0))
    write(root, 0, good[:30] + b"\n\xff\n[]\n{}\n" + b"[" * 100_000 + b"\n" + good)
    assert watcher(root).look()["ranks"][0]["step"] == 7


def test_values_of_wrong_types_are_not_believed(root):
    records = [
        {"event": "SnapshotBegun", "step": "9", "time": "x", "seconds": None},
        {"event": "SnapshotBegun", "step": True, "time": float("nan"), "seconds": -1},
        {"event": 5},
        {"event": "FlushCommitted", "step": -1, "bytes": 1.5, "seconds": float("inf")},
        {"event": "Warned", "message": "\x1b[2J" + "x" * 100_000},
        {"event": "Measured", "slots": [], "sealed": {}},
    ]
    write(root, 0, "".join(json.dumps(record) + "\n" for record in records).encode())
    document = watcher(root).look()
    assert document["ranks"][0]["step"] is None
    assert len(document["warnings"][0]["text"]) <= 1000


def test_numbers_beyond_all_floats_end_no_view(run, root):
    write(root, 0, b'{"event":"SnapshotBegun","step":3,"time":1' + b"0" * 400 + b',"seconds":-1' + b"0" * 400 + b"}\n")
    write(root, 0, b'{"event":"FlushCommitted","step":3,"time":5,"bytes":2305843009213693952,"seconds":5e-324}\n')
    (root / layout.NativeNaming().committed(3)).mkdir()
    for options in ([], ["--json"]):
        assert run("watch", root, "--once", *options).code == 0
    assert watcher(root).look()["last_commit"]["bytes_per_second"] is None


def test_escapes_in_files_do_not_reach_the_terminal(job, run, tmp_path):
    job().end()
    write(tmp_path / "exp", 0, b'{"event":"Warned","message":"\\u001b[2Jgone"}\n')
    ran = run("watch", tmp_path / "exp")
    assert "gone" in ran.out
    assert "\x1b" not in ran.out


def test_only_what_is_new_is_read_and_of_much_only_the_end(tmp_path):
    class Counting(LocalStorage):
        bytes_read = 0

        def reader(self, path):
            reader = super().reader(path)
            real = reader.read_into

            def read_into(buffer, offset):
                count = real(buffer, offset)
                self.bytes_read += count
                return count

            reader.read_into = read_into
            return reader

    storage = Counting(tmp_path)
    line = b'{"n":1}\n'
    (tmp_path / "log").write_bytes(line * 10_000)
    tail = Tail(storage, "log", 1000)
    assert len(list(tail.new_records())) == 1000 // len(line) - 1  # the first one may lack its beginning
    assert tail.skipped
    assert storage.bytes_read == 1000
    with open(tmp_path / "log", "ab") as file:
        file.write(line * 3)
    assert len(list(tail.new_records())) == 3
    assert list(tail.new_records()) == []
    assert storage.bytes_read == 1000 + 3 * len(line)


def test_a_file_that_begins_anew_is_read_anew(tmp_path):
    storage = LocalStorage(tmp_path)
    (tmp_path / "log").write_bytes(b'{"n":1}\n{"n":2}\n')
    tail = Tail(storage, "log", 1000)
    assert [record["n"] for record in tail.new_records()] == [1, 2]
    (tmp_path / "log").write_bytes(b'{"n":3}\n')
    assert [record["n"] for record in tail.new_records()] == [3]
    (tmp_path / "log").unlink()
    assert list(tail.new_records()) == []


def test_a_line_without_end_takes_no_memory(tmp_path):
    with open(tmp_path / "log", "wb") as file:
        for _ in range(8):
            file.write(b"x" * (1 << 20))
        file.write(b'\n{"n":1}\n')
    tail = Tail(LocalStorage(tmp_path), "log", 1 << 30)
    assert [record["n"] for record in tail.new_records()] == [1]
    assert last_record(LocalStorage(tmp_path), "log") == {"n": 1}
    assert last_record(LocalStorage(tmp_path), "missing") is None


def test_what_is_no_root_is_refused(run, tmp_path, job):
    (tmp_path / "empty").mkdir()
    assert run("watch", tmp_path / "empty").code == 2
    job().end()
    assert run("watch", f"{tmp_path / 'exp'}@4").code == 2
