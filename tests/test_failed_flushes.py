"""A flush that fails is told, by a later call or by the end of the job, and takes nothing else with it."""

from __future__ import annotations

import dataclasses
import os

import pytest

import easyckpt
from easyckpt import failpoints
from easyckpt.saving.messages import Flush
from tests.support.staged import until
from tests.support.training import committed, start


@pytest.mark.parametrize("place", ["writer.shard.chunk", "writer.index.written", "commit.rename.before"])
def test_a_failed_background_save_raises_at_a_later_call_and_again_nothing_is_lost(root, place):
    training, _ = start(root)
    failpoints.arm(f"{place}=error:EIO")
    with training.checkpointer as checkpointer:
        training.to(10)
        with pytest.raises(easyckpt.SaveFailed, match="Input/output error"):
            checkpointer.wait(60)
        training.to(12, 10)
    assert committed(root) == [12]
    assert not list(root.glob(".*"))


def test_a_failure_is_raised_by_the_training_loop_itself(root):
    training, _ = start(root)
    failpoints.arm("writer.shard.chunk=error:ENOSPC")
    with training.checkpointer:
        with pytest.raises(easyckpt.SaveFailed, match="No space left"):
            training.to(1_000_000)
        come = training.progress["epoch"]
        assert come < 1_000_000
        training.checkpointer.save(come, wait=True)  # the last snapshot may have been skipped, and training has gone on
    assert committed(root)[-1] == come


@pytest.mark.parametrize("fails", [False, True])
def test_any_number_of_flushes_leaves_nothing_behind_in_the_process(root, fails):
    training, _ = start(root, on_failure="continue", max_failures=1000, overlap=False)
    failpoints.arm("writer.shard.begin@*=error:EIO" if fails else "")
    flusher = training.checkpointer._parts.flusher

    def kept() -> int:
        return sum(len(held) for held in vars(flusher).values() if isinstance(held, (dict, list, set)))

    with training.checkpointer as checkpointer:
        before = kept()
        for number in range(1, 20):
            training.step()
            checkpointer.save(number).exception(60)
        assert kept() <= before + 1
        failpoints.arm("")
        training.step()
        checkpointer.save(20, wait=True)


def test_up_to_k_failures_in_a_row_are_tolerated(root):
    training, _ = start(root, save_storage_interval=1, on_failure="continue", max_failures=2, back_pressure="wait")
    failpoints.arm("writer.shard.chunk@*=error:EIO")
    with pytest.raises(easyckpt.SaveFailed), training.checkpointer as checkpointer:
        training.to(2)
        checkpointer.wait(60)
        training.to(3, 2)
        checkpointer.wait(60)
    failpoints.arm("")


def test_close_raises_what_is_not_durable_whatever_the_policy(root):
    training, _ = start(root, on_failure="continue", max_failures=100)
    failpoints.arm("writer.shard.chunk@*=error:EIO")
    with pytest.raises(easyckpt.SaveFailed), training.checkpointer:
        training.to(3)
    failpoints.arm("")
    again, restored = start(root)
    with again.checkpointer:
        assert (restored.step, restored.tier) == (3, "memory")


def test_a_failure_on_a_line_that_was_left_does_not_come_back_at_the_end(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        training.to(10)
        checkpointer.wait(60)
        training.step()
        failpoints.arm("writer.shard.chunk=error:EIO")
        future = checkpointer.save(11)
        for call in (lambda: future.result(60), lambda: checkpointer.wait(60)):
            with pytest.raises(easyckpt.SaveFailed, match="Input/output error"):
                call()
        assert checkpointer.load(step=10).step == 10
    assert committed(root) == [10]


def lease_gone(root):
    (root / "lease.json").unlink()


def shard_cut(root):
    (shard,) = root.glob(".step-*/rank-00000.safetensors")
    os.truncate(shard, shard.stat().st_size - 1)


@pytest.mark.parametrize(
    ("place", "happens", "words"),
    [
        ("commit.rename.before", lease_gone, "has lost its lease: somebody removed it"),
        ("commit.reported", shard_cut, "has written"),
    ],
)
def test_what_happens_to_the_root_in_the_middle_of_a_commit_is_seen(root, tmp_path, place, happens, words):
    hold = tmp_path / "hold"
    failpoints.arm(f"{place}=hold:{hold}")
    training, _ = start(root)
    with pytest.raises(easyckpt.SaveFailed, match=words), training.checkpointer as checkpointer:
        training.step()
        future = checkpointer.save(1)
        until(hold.exists)
        happens(root)
        hold.with_suffix(".go").touch()
        assert words in str(future.exception(60))
        assert committed(root) == []
        checkpointer.wait(60)


def test_a_snapshot_that_is_gone_when_it_is_to_be_committed_costs_that_one_commit(root, tmp_path):
    hold = tmp_path / "hold"
    failpoints.arm(f"writer.index.synced=hold:{hold}")
    training, _ = start(root, on_failure="continue")
    with training.checkpointer as checkpointer:
        training.step()
        future = checkpointer.save(1)
        until(hold.exists)
        checkpointer._parts.arena.drop(lambda meta: True)
        hold.with_suffix(".go").touch()
        assert ": rank 0: it holds no whole snapshot of step 1 any more" in str(future.exception(60))
        assert not list(root.glob(".step-*"))
        training.step()
        assert checkpointer.save(2).result(60) == 2


def test_a_flush_of_a_line_that_training_has_left_gets_no_state_of_the_new_one(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        training.to(3)
        checkpointer.save(3, wait=True)
        thread = checkpointer._parts.coordinator._thread
        flush = Flush(attempt="late", step=3, due=None, share=True, line=thread._ledger.post.line)
        assert thread._view(flush).meta.step == 3
        checkpointer.load(step=3)
        training.to(5, 3)
        with pytest.raises(easyckpt.SaveFailed, match="left the line"):
            thread._view(dataclasses.replace(flush, step=5))


def test_an_error_after_the_rename_is_not_called_failed(root):
    training, _ = start(root)
    failpoints.arm("commit.rename.after=error:EIO")
    with training.checkpointer as checkpointer:
        training.step()
        with pytest.raises(easyckpt.OutcomeUnknown):
            checkpointer.save(1, wait=True)
        with pytest.raises(easyckpt.OutcomeUnknown):
            checkpointer.wait(60)
    assert 1 in committed(root)


@pytest.mark.parametrize("asked", [False, True], ids=["due", "asked for"])
def test_a_due_snapshot_that_cannot_be_sealed_holds_no_later_one_up(root, asked):
    """Without overlap it is sealed, or discarded, within the very call that makes it due."""
    training, _ = start(root, save_storage_interval=1, overlap=False, on_failure="continue", back_pressure="wait")
    with training.checkpointer as checkpointer:
        training.to(2)
        training.step()
        failpoints.arm("slot.seal.payload=error:EIO")
        future = checkpointer.save(3) if asked else checkpointer.save_if_needed(3)
        if asked:
            assert "holds no whole snapshot of step 3" in str(future.exception(60))
        checkpointer.wait(60)  # other ranks would wait for one that raised alone
        assert any("slot.seal.payload" in reason for reason in checkpointer.stats().reasons)
        training.step()
        assert checkpointer.save(4).result(60) == 4


@pytest.mark.parametrize("place", ["commit.durable", "commit.latest.after", "retention.rename.before"])
def test_trouble_after_the_commit_does_not_make_it_a_failure(root, place):
    training, _ = start(root, max_ckpt_num=1)
    with training.checkpointer as checkpointer:
        training.step()
        checkpointer.save(1, wait=True)
        failpoints.arm(f"{place}=error:EIO")
        training.step()
        checkpointer.save(2, wait=True)
        checkpointer.wait(60)
    assert 2 in committed(root)


def test_a_flush_without_room_is_refused_before_it_writes(root):
    training, _ = start(root, min_free_bytes=0)
    with training.checkpointer as checkpointer:
        training.step()
        object.__setattr__(checkpointer._parts.flusher._writer, "_min_free_bytes", 2**60)
        with pytest.raises(easyckpt.SaveFailed, match="free") as caught:
            checkpointer.save(1, wait=True)
        assert str(caught.value).count("rank 0") == 1
        assert not list(root.glob("*/*.safetensors"))
        object.__setattr__(checkpointer._parts.flusher._writer, "_min_free_bytes", 0)
        with pytest.raises(easyckpt.SaveFailed):
            checkpointer.wait()
