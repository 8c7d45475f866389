"""Training that is faster than storage: what is skipped is counted, what is asked for is not, and nothing waits."""

from __future__ import annotations

import threading

from easyckpt import failpoints
from tests.support.staged import until
from tests.support.training import committed, start


def test_back_pressure_wait_commits_every_due_step(root):
    training, _ = start(root, save_storage_interval=2, max_ckpt_num=None, back_pressure="wait")
    with training.checkpointer as checkpointer:
        training.to(10)
        checkpointer.wait(60)
        assert committed(root) == [2, 4, 6, 8, 10]
        assert "FlushSkipped" not in checkpointer.stats().counts


def test_back_pressure_skip_never_waits_and_counts(root, tmp_path):
    hold = tmp_path / "hold"
    failpoints.arm(f"writer.shard.begin=hold:{hold}")
    training, _ = start(root, save_storage_interval=5)
    with training.checkpointer as checkpointer:
        for due in range(5, 25, 5):  # comes to its end although the flush of step 5 does not
            training.to(due, due - 5)
            until(lambda due=due: checkpointer.stats().counts.get("FlushSkipped", 0) == due // 5 - 1)
        hold.with_suffix(".go").touch()
        checkpointer.wait(60)
        assert committed(root) == [5]
        assert checkpointer.stats().counts["FlushSkipped"] == 3
        assert "SnapshotSkipped" not in checkpointer.stats().counts
    assert committed(root) == [5, 20]


def test_a_skip_of_the_due_flush_is_not_the_end_of_a_save_of_the_same_step(root, tmp_path):
    hold = tmp_path / "hold"
    failpoints.arm(f"writer.shard.begin=hold:{hold}")
    training, _ = start(root, save_storage_interval=5)
    decided, heard = threading.Event(), threading.Event()
    with training.checkpointer as checkpointer:
        mailbox = checkpointer._parts.mailbox
        read = mailbox.board

        def board() -> object:
            value = read()
            if value and any(decision["due"] == 10 for decision in value["decisions"]):
                decided.set()
                heard.wait(60)
            return value

        mailbox.board = board
        training.to(10)  # the flush of step 5 is still running
        assert decided.wait(60)
        future = checkpointer.save(10)  # before this rank has heard of the decision
        heard.set()
        hold.with_suffix(".go").touch()
        assert future.result(60) == 10
        assert checkpointer.stats().counts["FlushSkipped"] == 1
    assert committed(root) == [5, 10]


def test_the_newest_whole_snapshot_is_kept_while_a_flush_holds_the_only_other_slot(root, tmp_path):
    hold = tmp_path / "hold"
    failpoints.arm(f"writer.shard.begin=hold:{hold}")
    training, _ = start(root, save_storage_interval=5, slots=2, overlap=False)
    with training.checkpointer as checkpointer:
        training.to(5)
        until(hold.exists)
        training.to(8, 5)  # a kill while 7 is written over 6 would leave 5
        assert [meta.step for meta in checkpointer._parts.arena.sealed()] == [5, 6]
        assert checkpointer.stats().counts["SnapshotSkipped"] == 2
        hold.with_suffix(".go").touch()
