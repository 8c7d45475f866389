"""What a job leaves in its event log: every event, with its step, bytes and seconds."""

from __future__ import annotations

from pathlib import Path

from easyckpt import failpoints
from tests.support import jobs
from tests.support.staged import until
from tests.support.training import start


def test_events_are_written_counted_and_logged(root, tmp_path):
    log = tmp_path / "readable.log"
    training, _ = start(root, log_file_path=str(log))
    with training.checkpointer as checkpointer:
        training.to(10)
        checkpointer.wait(60)
        counts = checkpointer.stats().counts
    assert counts["SnapshotSealed"] >= 9
    assert counts["FlushCommitted"] == 1
    sealed = [event["step"] for event in jobs.events(root, kind="SnapshotSealed")]
    assert sealed == list(range(1, 11))
    commits = jobs.events(root, kind="FlushCommitted")
    assert commits[0]["step"] == 10
    assert commits[0]["bytes"] > 0
    assert commits[0]["seconds"] > 0
    assert "flush committed, step 10" in log.read_text()


def test_events_carry_step_bytes_and_seconds(root):
    training, _ = start(root, max_ckpt_num=1)
    with training.checkpointer as checkpointer:
        for step in (10, 20, 30):
            training.to(step, step - 10)
            checkpointer.wait()
    training, _ = start(root)
    training.checkpointer.close()
    image = jobs.events(root, kind="SnapshotSealed")[-1]["bytes"]
    weights = sum(parameter.nbytes for parameter in training.model.parameters())
    assert image >= 2 * weights  # parameters and momentum
    for kind in ("SnapshotBegun", "SnapshotSealed", "FlushBegun", "FlushCommitted", "Restored"):
        last = jobs.events(root, kind=kind)[-1]
        assert (last["step"], last["bytes"] >= image) == (30, True), kind
        assert (last["seconds"] > 0) == (kind != "FlushBegun"), kind
    retained = jobs.events(root, kind="Retained")
    assert [(record["step"], record["removed"], record["kept"]) for record in retained] == [
        (20, [10], [20]), (30, [20], [30]),
    ]  # fmt: skip
    assert all(record["bytes"] >= image and record["seconds"] > 0 for record in retained)


def test_a_failed_flush_says_how_much_it_was_and_how_long_it_took(root):
    failpoints.arm("writer.shard.written=error:EIO")
    training, _ = start(root, on_failure="continue")
    with training.checkpointer as checkpointer:
        training.to(10)
        checkpointer.wait()
        stats = checkpointer.stats()
    (failed,) = jobs.events(root, kind="FlushFailed")
    assert (failed["step"], failed["bytes"]) == (10, jobs.events(root, kind="FlushBegun")[0]["bytes"])
    assert failed["bytes"] > 0
    assert failed["seconds"] > 0
    assert stats.bytes["FlushFailed"] == failed["bytes"]
    assert stats.seconds["FlushFailed"] == failed["seconds"]


def test_a_skipped_snapshot_says_what_it_would_have_been(root, tmp_path):
    hold = tmp_path / "hold"
    failpoints.arm(f"writer.shard.begin=hold:{hold}")
    training, _ = start(root, slots=1, save_storage_interval=1)
    with training.checkpointer as checkpointer:
        training.to(1)
        until(hold.exists)
        training.to(2, 1)
        Path(f"{hold}.go").touch()
        checkpointer.wait()
    (skipped,) = jobs.events(root, kind="SnapshotSkipped")
    assert skipped["step"] == 2
    assert skipped["bytes"] >= jobs.events(root, kind="SnapshotSealed")[0]["bytes"] > 0
    assert skipped["seconds"] > 0
