"""The Checkpointer as its users call it, in one process."""

from __future__ import annotations

import os
import threading

import numpy
import pytest
import torch

import easyckpt
from easyckpt import Checkpointer
from easyckpt.saving.staging import Stager
from tests.support.training import Training, committed, start


def test_a_clean_end_commits_the_newest_snapshot_and_frees_the_memory(root, memory_dir):
    training, restored = start(root)
    assert (restored.step, restored.tier) == (0, None)
    with training.checkpointer:
        training.to(13)
    assert committed(root)[-1] == 13
    assert [path for path in memory_dir.iterdir() if path.suffix != ".lock"] == []


def test_a_load_gives_back_the_same_bits_from_storage(root):
    training, _ = start(root)
    with training.checkpointer:
        training.to(13)
    again, restored = start(root)
    with again.checkpointer:
        assert (restored.step, restored.tier) == (13, "storage")
        assert restored.path == str(root / "step-00000013")
        assert torch.equal(again.weights(), training.weights())
        assert again.progress == {"epoch": 13, "wandb_id": None}
        again.to(15, 13)
        training.to_digest = None
    third, restored = start(root)
    with third.checkpointer:
        assert restored.step == 15


def test_a_loop_that_left_with_an_exception_goes_on_from_memory(root):
    training, _ = start(root)
    with pytest.raises(ZeroDivisionError), training.checkpointer:
        training.to(7)
        raise ZeroDivisionError
    again, restored = start(root)
    with again.checkpointer:
        assert (restored.step, restored.tier) == (7, "memory")
        assert torch.equal(again.weights(), training.weights())


def test_restored_from_memory_and_ended_at_once_is_committed(root):
    training, _ = start(root)
    with pytest.raises(ZeroDivisionError), training.checkpointer:
        training.to(7)
        raise ZeroDivisionError
    again, _ = start(root)
    again.checkpointer.close()
    assert committed(root) == [7]
    third, restored = start(root)
    with third.checkpointer:
        assert (restored.step, restored.tier) == (7, "storage")


def test_restored_from_storage_and_ended_at_once_changes_nothing(root):
    training, _ = start(root)
    with training.checkpointer:
        training.to(12)
    before = sorted(os.listdir(root))
    again, _ = start(root)
    again.checkpointer.close()
    assert sorted(os.listdir(root)) == before


def test_save_is_durable_when_its_future_says_so(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        training.step()
        assert checkpointer.save(1).result(60) == 1
        assert committed(root) == [1]
        assert checkpointer.save(1).result(0) == 1  # the existing commit
        training.step()
        checkpointer.save(2, wait=True)
        assert committed(root) == [1, 2]


def test_a_damaged_directory_in_the_way_of_a_commit_is_moved_aside(root):
    with Checkpointer(root, {"numbers": {"a": 1}}) as checkpointer:
        checkpointer.load()
        checkpointer.save(3, wait=True)
        (root / "step-00000004").mkdir()
        checkpointer.save(4, wait=True)
    assert committed(root) == [3, 4]
    assert easyckpt.restore(root, {"numbers": {"a": 0}}).step == 4


def test_step_zero_can_be_saved(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        checkpointer.save_if_needed(0)
        checkpointer.wait(60)
        assert committed(root) == [0]
    again, restored = start(root)
    with again.checkpointer:
        assert (restored.step, restored.tier) == (0, "storage")


@pytest.mark.parametrize("step", [-1, 1.0, True, "3", None, 10**18, 2**64])
def test_a_step_is_a_number_of_finished_steps(root, step):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        for call in (checkpointer.save_if_needed, checkpointer.save):
            with pytest.raises(easyckpt.StepError):
                call(step)


def test_a_step_of_numpy_is_taken_as_a_plain_number(root):
    """One that stayed NumPy's would not go into the JSON that ranks and files are told."""
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        for step in (1, 2):
            training.step()
            checkpointer.save_if_needed(numpy.int64(step))
        result = checkpointer.save(numpy.uint8(3)).result(60)
        assert (type(result), type(checkpointer._step)) == (int, int)
    assert committed(root) == [3]


def test_a_program_may_change_its_directory(tmp_path, monkeypatch):
    before, after = tmp_path / "before", tmp_path / "after"
    for path in (before / "memory", after):
        path.mkdir(parents=True)
    monkeypatch.chdir(before)
    training = Training("run", memory_dir="memory", log_file_path="log")
    monkeypatch.chdir(after)
    with training.checkpointer as checkpointer:
        checkpointer.load()
        training.to(12)
    assert committed(before / "run") == [10, 12]
    assert not list((before / "memory").glob("*.[0-9]*"))
    assert not list(after.iterdir())
    assert checkpointer.stats().counts.get("SnapshotSkipped", 0) == 0


def test_steps_go_backwards_only_by_a_load(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        training.to(12)
        with pytest.raises(easyckpt.StepError, match="backwards"):
            checkpointer.save_if_needed(11)
        checkpointer.wait(60)
        assert checkpointer.load(step=10).step == 10
        training.to(11, 10)
    assert committed(root)[-1] == 11


def test_rotation_keeps_the_newest(root):
    training, _ = start(root, save_storage_interval=1, max_ckpt_num=2, back_pressure="wait")
    with training.checkpointer:
        training.to(8)
    assert committed(root) == [7, 8]


def test_a_closed_checkpointer_says_so(root):
    training, _ = start(root)
    training.checkpointer.close()
    training.checkpointer.close()
    with pytest.raises(easyckpt.UsageError, match="closed"):
        training.checkpointer.save_if_needed(1)


def test_background_threads_do_not_push_training_off_its_core(root):
    training, _ = start(root)
    with training.checkpointer:
        training.to(3)
        names = ("easyckpt-copy", "easyckpt-flush", "easyckpt-coordinator", "easyckpt-housekeeper")
        ours = {thread.name: thread.native_id for thread in threading.enumerate() if thread.name in names}
        assert sorted(ours) == sorted(names)
        assert {os.sched_getscheduler(number) for number in ours.values()} == {os.SCHED_BATCH}
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_forked_child_is_inert(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        training.to(3)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                checkpointer.save_if_needed(4)
                checkpointer.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        training.to(5, 3)
    assert committed(root) == [5]


def test_the_hook_is_gone_after_close(root):
    training, _ = start(root)
    training.checkpointer.close()
    from torch.optim import optimizer as torch_optimizer

    hooks = torch_optimizer._global_optimizer_pre_hooks.values()
    assert not any(isinstance(getattr(hook, "__self__", None), Stager) for hook in hooks)


def test_state_that_grows_at_each_step_is_kept_all_the_same(root):
    """A slot made as large as the state was when it did not fit is too small again at the next step."""
    training, _ = start(root, save_storage_interval=1000)
    training.progress["history"] = []
    with pytest.raises(ZeroDivisionError), training.checkpointer as checkpointer:
        for number in range(1, 41):
            training.step()
            training.progress["history"].append(torch.full((5000,), float(number)))
            checkpointer.save_if_needed(number)
            checkpointer._parts.arena.wait_ready(60)
        assert checkpointer.stats().counts["SnapshotSealed"] >= 25
        raise ZeroDivisionError
    again, restored = start(root)
    with again.checkpointer:
        assert (restored.step, restored.tier) == (40, "memory") or restored.step >= 36
        assert len(again.progress["history"]) == restored.step
