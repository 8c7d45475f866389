"""What a resume says it has lost: as much as memory and the logs tell, "unknown" where they tell nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import easyckpt
from easyckpt.format import layout
from easyckpt.loading.progress import TAIL_BYTES, newest_step_logged, steps_lost
from easyckpt.storage.local import LocalStorage


@pytest.fixture
def storage(tmp_path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "root")
    storage.makedirs(layout.EVENTS)
    return storage


def event(kind: str, step: object) -> bytes:
    return json.dumps({"event": kind, "step": step, "bytes": 4}).encode() + b"\n"


def write(storage: LocalStorage, *lines: bytes, name: str | None = None) -> None:
    (Path(storage.root) / (name or layout.events_file(0))).write_bytes(b"".join(lines))


def test_the_newest_snapshot_since_the_last_load_counts(storage):
    write(storage, event("SnapshotBegun", 60), event("Restored", 40), event("SnapshotBegun", 44))
    assert newest_step_logged(storage) == 44
    write(storage, event("SnapshotSealed", 60), event("Restored", 40))
    assert newest_step_logged(storage) == 40
    write(storage, event("SnapshotSkipped", 7), event("SnapshotSealed", 6), event("Warned", 90))
    assert newest_step_logged(storage) == 7


def test_metrics_tell_where_events_are_switched_off(storage):
    write(storage, b'{"step":3}\n', b'{"step":5,"loss":1}\n', name=layout.METRICS)
    assert newest_step_logged(storage) == 5
    write(storage, event("SnapshotSealed", 4))
    assert newest_step_logged(storage) == 4


def test_only_the_end_of_a_long_log_is_read(storage, monkeypatch):
    write(storage, *(event("SnapshotSealed", step) for step in range(1, 20_000)))
    assert newest_step_logged(storage) == 19_999
    write(storage, event("SnapshotSealed", 5), b"x" * TAIL_BYTES + b"\n")
    assert newest_step_logged(storage) is None


NO_STEPS = {
    "empty": b"",
    "no JSON": b"\xff\x00{]\n" * 9,
    "not a record": b"7\n[1]\nnull\n",
    "without a step": b'{"event":"SnapshotSealed"}\n',
    "negative": event("SnapshotSealed", -1),
    "too large": event("SnapshotSealed", 10**18),
    "too many digits": b'{"event":"SnapshotSealed","step":' + b"9" * 9000 + b"}\n",
    "a flag": event("SnapshotSealed", True),
    "a fraction": event("SnapshotSealed", 7.0),
    "nested": b'{"event":' + b"[" * 60_000 + b"\n",
    "a kind that is no text": b'{"event":["SnapshotSealed"],"step":7}\n',
}


@pytest.mark.parametrize("content", NO_STEPS.values(), ids=NO_STEPS)
def test_what_is_no_log_of_ours_tells_nothing(storage, content):
    write(storage, content)
    assert newest_step_logged(storage) is None
    write(storage, content, event("SnapshotSealed", 3), content)
    assert newest_step_logged(storage) == 3


def test_what_is_no_file_of_ours_tells_nothing(storage, tmp_path):
    path = tmp_path / "root" / layout.events_file(0)
    (tmp_path / "elsewhere").write_bytes(event("SnapshotSealed", 3))
    path.symlink_to(tmp_path / "elsewhere")
    assert newest_step_logged(storage) is None
    path.unlink()
    os.mkfifo(path)
    assert newest_step_logged(storage) is None
    path.unlink()
    path.mkdir()
    assert newest_step_logged(storage) is None
    assert newest_step_logged(LocalStorage(tmp_path / "absent")) is None


@pytest.mark.parametrize(
    ("restored", "tried", "seen", "lost"),
    [
        (50, [50], [57], 7),
        (50, [50], [50], 0),
        (50, [50], [], None),  # the newest checkpoint, and nothing tells what came after it
        (50, [50], [30], None),  # an old log
        (50, [60, 50], [], 10),  # a newer one was there, and is damaged
        (57, [57, 50], [57, 58], 1),  # another rank had come further
        (0, [], [], None),
        (0, [], [12], 12),
    ],
)
def test_steps_lost(restored, tried, seen, lost):
    assert steps_lost(restored, tried, seen) == lost


# A job that is killed for real.

DIES = """
import json, sys, torch, easyckpt
settings = json.loads(sys.argv[2])
checkpointer = easyckpt.Checkpointer(sys.argv[1], {"model": torch.nn.Linear(3, 3)}, save_storage_interval=5, **settings)
checkpointer.load()
for step in range(1, 8):
    checkpointer.save_if_needed(step)
    checkpointer.wait()
print("there", flush=True)
sys.stdin.read()
"""


def killed(root: Path, **settings) -> None:
    """A job that was killed after step 7 with 5 committed, and its events, if it writes any, recorded."""
    arguments = [sys.executable, "-c", DIES, str(root), json.dumps(settings)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "there\n"
        while settings.get("events", True) and newest_step_logged(LocalStorage(root)) != 7:
            time.sleep(0.01)
        job.send_signal(signal.SIGKILL)


def resume(root: Path) -> dict:
    """The record of the resume."""
    lease = {"lease_timeout": 0.5, "lease_interval": 0.2}  # the owner file goes with the memory that is wiped
    with easyckpt.Checkpointer(root, {"model": torch.nn.Linear(3, 3)}, **lease) as checkpointer:
        checkpointer.load()
    lines = (root / layout.events_file(0)).read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == "Restored"][-1]


@pytest.mark.parametrize("wiped", [False, True])
def test_a_resume_says_what_the_log_of_the_killed_job_tells(tmp_path, memory_dir, caplog, wiped):
    killed(tmp_path / "run")
    if wiped:
        shutil.rmtree(memory_dir)
        memory_dir.mkdir()
    with caplog.at_level("INFO", logger="easyckpt"):
        restored = resume(tmp_path / "run")
    assert (restored["tier"], restored["step"], restored["steps_lost"]) == (
        ("storage", 5, 2) if wiped else ("memory", 7, 0)
    )
    assert restored["bytes"] >= 3 * 3 * 4
    assert f"steps lost: {2 if wiped else 0}" in caplog.text


def test_a_resume_without_memory_and_logs_does_not_say_0(tmp_path, memory_dir, caplog):
    killed(tmp_path / "run", events=False)
    shutil.rmtree(memory_dir)
    memory_dir.mkdir()
    with caplog.at_level("INFO", logger="easyckpt"):
        assert resume(tmp_path / "run")["steps_lost"] is None
    assert "steps lost: unknown" in caplog.text


def test_a_new_root_has_lost_nothing(tmp_path):
    assert resume(tmp_path / "run")["steps_lost"] == 0
