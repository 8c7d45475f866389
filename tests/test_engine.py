"""The Checkpointer as its users call it, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import easyckpt
from easyckpt import Checkpointer, failpoints
from easyckpt.distributed.ranks import Ranks
from easyckpt.format import layout
from easyckpt.loading import read_only
from easyckpt.saving.messages import Flush
from easyckpt.saving.metrics import Metrics
from easyckpt.saving.staging import Stager
from tests.support.staged import stands_in, until
from tests.support.tmpfs import tmpfs  # noqa: F401 - a fixture


class Training:
    """A model whose state is a function of the number of steps, so that any restored state can be told."""

    def __init__(self, root: Path, **settings) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(16, 16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.progress = {"epoch": 0, "wandb_id": None}
        state = {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}
        self.checkpointer = Checkpointer(root, state, **({"save_storage_interval": 10} | settings))

    def step(self) -> None:
        self.model(torch.randn(4, 16)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress["epoch"] += 1

    def to(self, last: int, first: int = 0) -> None:
        for number in range(first + 1, last + 1):
            self.step()
            self.checkpointer.save_if_needed(number)

    def weights(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


def committed(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step-*") if "." not in path.name)


def start(root: Path, **settings) -> tuple[Training, easyckpt.Restored]:
    training = Training(root, **settings)
    return training, training.checkpointer.load()


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


def test_memory_that_cannot_be_prepared_does_not_make_a_load_pass_over_a_good_checkpoint(root):
    training, _ = start(root)
    with training.checkpointer:
        training.to(13)
    failpoints.arm("supply.prepared=error:EIO")
    again = Training(root)
    with again.checkpointer as checkpointer:
        assert checkpointer._parts.arena._supply.wait(60)  # the failure is there to be raised
        assert checkpointer.load().step == 13
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


@pytest.mark.parametrize("explicit", [False, True])
def test_steps_set_aside_are_said_to_go_where_they_go(root, caplog, explicit):
    training, _ = start(root, back_pressure="wait")
    with training.checkpointer:
        training.to(20)
    if not explicit:
        (root / layout.step_dir(20) / layout.shard_file(0)).unlink()
    again = Training(root)
    with again.checkpointer as checkpointer:
        assert checkpointer.load(step=10 if explicit else None).step == 10
        again.to(11, 10)
    (said,) = (record.getMessage() for record in caplog.records if "set aside as" in record.getMessage())
    assert said.endswith(", and deleted with the next commit") == (not explicit)
    assert bool(list(root.glob("*.stale-*"))) == explicit


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


def test_a_load_finds_no_checkpoint_that_rotation_is_about_to_remove(root):
    training, _ = start(root, max_ckpt_num=1, slots=1)
    with training.checkpointer as checkpointer:
        training.step()
        checkpointer.save(1, wait=True)
        training.step()
        failpoints.arm("retention.rename.before=pause:0.5")
        checkpointer.save(2, wait=True)
        with pytest.raises(easyckpt.NoCheckpoint, match="committed there: 2 "):
            checkpointer.load(step=1)


def test_a_first_save_beside_checkpoints_nobody_loaded_is_refused(root):
    training, _ = start(root)
    with training.checkpointer:
        training.to(10)
    careless = Training(root)
    careless.step()
    with pytest.raises(easyckpt.NotLoaded, match=r"load\(\)"):
        careless.checkpointer.save_if_needed(1)
    careless.checkpointer.close()
    assert committed(root) == [10]


def test_a_first_save_beside_snapshots_nobody_loaded_is_refused(root):
    training, _ = start(root)
    with pytest.raises(ZeroDivisionError), training.checkpointer:
        training.to(7)
        raise ZeroDivisionError
    careless = Training(root)
    careless.step()
    with pytest.raises(easyckpt.NotLoaded, match="shared memory"):
        careless.checkpointer.save_if_needed(1)
    careless.checkpointer.abandon()
    again, restored = start(root)
    with again.checkpointer:
        assert restored.step == 7


def test_a_first_save_behind_a_flush_keeps_the_others_waiting_but_not_for_ever(root, monkeypatch):
    """A signal may have begun a flush before it. Ranks that wait for rank 0 in the channel hear that it gets on."""
    training, _ = start(root)
    held, signs = threading.Event(), []
    with training.checkpointer as checkpointer:
        monkeypatch.setattr(checkpointer._channel, "busy", lambda: signs.append(1), raising=False)
        checkpointer._parts.flusher.submit(held.wait)
        with impatient(checkpointer), pytest.raises(easyckpt.StorageError, match=r"has not ended for 0\.5 s"):
            training.to(1)
        held.set()
        assert signs
        training.to(3, 1)
        record = json.loads((root / "easyckpt.json").read_text())
        assert len(record["timelines"]) == 1, "what was given up is not done later"
    assert committed(root) == [3]


def test_a_first_save_that_is_interrupted_behind_a_flush_opens_no_line_later(root):
    training, _ = start(root)
    held = threading.Event()
    with training.checkpointer as checkpointer:
        begun = checkpointer._parts.flusher.submit(held.wait)
        until(begun.running)

        def interrupt():
            main = threading.main_thread()
            until(lambda: stands_in(main, "_opened_line"))
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            training.to(1)
        thread.join()
        held.set()
        training.to(3, 1)
        record = json.loads((root / "easyckpt.json").read_text())
        assert len(record["timelines"]) == 1
    assert committed(root) == [3]


def test_ranks_do_not_wait_for_ever_for_a_line_that_storage_does_not_open(root, monkeypatch):
    training, _ = start(root)
    held = threading.Event()
    with training.checkpointer as checkpointer:
        flusher, saver = checkpointer._parts.flusher, checkpointer._saver
        with impatient(checkpointer), monkeypatch.context() as patched:
            patched.setattr(saver, "_parts", dataclasses.replace(saver._parts, ranks=Ranks(0, 2, 0, 2)))
            patched.setattr(flusher, "open_line", lambda *arguments, **options: flusher.submit(held.wait))
            with pytest.raises(easyckpt.StorageError, match=r"no answer for 0\.1 s"):
                training.to(1)
        held.set()
        training.to(3, 1)
    assert committed(root) == [3]


@contextlib.contextmanager
def impatient(checkpointer):
    """Short timeouts for the training thread alone."""
    saver, parts = checkpointer._saver, checkpointer._saver._parts
    short = dataclasses.replace(parts.config, commit_timeout=0.3, peer_timeout=0.1)
    saver._parts = dataclasses.replace(parts, config=short)
    yield
    saver._parts = parts


def test_a_second_job_on_the_same_root_is_refused_and_names_the_owner(root):
    training, _ = start(root)
    with training.checkpointer:
        with pytest.raises(easyckpt.RootInUse, match=f"^{root} is in use: .* another Checkpointer of this process"):
            Training(root)
        training.to(3)
    assert committed(root) == [3]


def test_a_step_that_is_not_there_cannot_be_loaded(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        training.to(10)
        checkpointer.wait(60)
        with pytest.raises(easyckpt.NoCheckpoint, match="step 4"):
            checkpointer.load(step=4)


def test_rotation_keeps_the_newest(root):
    training, _ = start(root, save_storage_interval=1, max_ckpt_num=2, back_pressure="wait")
    with training.checkpointer:
        training.to(8)
    assert committed(root) == [7, 8]


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


def test_without_memory_for_one_snapshot_due_saves_wait_and_are_durable(root, monkeypatch):
    from easyckpt.memory.arena import Arena

    no_memory_at_all = property(lambda self: 0)
    monkeypatch.setattr(Arena, "count", no_memory_at_all)
    training, _ = start(root, save_storage_interval=5)
    with training.checkpointer as checkpointer:
        training.to(4)
        assert committed(root) == []
        training.to(5, 4)
        assert committed(root) == [5]
        training.step()
        checkpointer.save(6)
        assert committed(root) == [5, 6]
    again, restored = start(root)
    with again.checkpointer:
        assert (restored.step, restored.tier) == (6, "storage")
        assert torch.equal(again.weights(), training.weights())


def test_a_save_of_the_live_state_that_is_interrupted_is_not_committed_with_a_later_state(root, tmp_path, monkeypatch):
    from easyckpt.memory.arena import Arena

    monkeypatch.setattr(Arena, "count", property(lambda self: 0))
    hold = tmp_path / "hold"
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        training.step()

        def interrupt():
            until(hold.exists)
            os.kill(os.getpid(), signal.SIGINT)

        failpoints.arm(f"writer.shard.begin=hold:{hold}")
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1)
        thread.join()
        training.step()
        hold.with_suffix(".go").touch()
        with pytest.raises(easyckpt.SaveFailed, match="step 1 is not lent any more"):
            checkpointer.wait(60)
        assert committed(root) == []
        checkpointer.save(2, wait=True)
    assert committed(root) == [2]


def test_a_close_that_is_interrupted_lends_nothing_any_more(root, monkeypatch):
    from easyckpt.memory.arena import Arena

    training, _ = start(root)
    checkpointer = training.checkpointer
    with monkeypatch.context() as patched:
        patched.setattr(Arena, "acquire", lambda *arguments: None)
        training.to(1)
    coordinator = checkpointer._parts.coordinator
    close, lent = coordinator.close, []

    def interrupted(timeout):
        lent.append(coordinator._thread.live)
        raise KeyboardInterrupt

    monkeypatch.setattr(coordinator, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpointer._saver.close(60)
    assert not lent[0].still_sealed()
    assert coordinator._thread.live is None
    monkeypatch.setattr(coordinator, "close", close)
    checkpointer.close()


@pytest.mark.parametrize("then", ["nothing", "a draw", "a step"])
def test_without_memory_the_last_step_is_written_at_the_end(root, monkeypatch, then):
    from easyckpt.memory.arena import Arena

    monkeypatch.setattr(Arena, "count", property(lambda self: 0))
    training, _ = start(root, save_storage_interval=5)
    if then == "a step":
        with pytest.raises(easyckpt.SaveFailed, match=r"step 7, .*no memory for a snapshot"), training.checkpointer:
            training.to(7)
            training.step()
    else:
        with training.checkpointer:
            training.to(7)
            drawn = torch.get_rng_state()
            torch.rand(int(then == "a draw"))
    last = 5 if then == "a step" else 7
    assert committed(root) == ([5] if last == 5 else [5, 7])
    again, restored = start(root)
    with again.checkpointer:
        assert restored.step == last
        if last == 7:
            assert torch.equal(again.weights(), training.weights())
            assert torch.equal(torch.get_rng_state(), drawn)


def test_what_a_load_has_left_behind_is_not_owed(root, monkeypatch):
    training, _ = start(root, save_storage_interval=5)
    with training.checkpointer as checkpointer:
        training.to(5)
        checkpointer.wait(60)
        with monkeypatch.context() as patched:
            patched.setattr(checkpointer._parts.arena, "acquire", lambda *arguments: None)
            training.to(7, 5)
        assert checkpointer.load(step=5).step == 5
    assert committed(root) == [5]


def test_metrics_stay_beside_the_checkpoints_and_are_cut_on_resume(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        for number in range(1, 16):
            training.step()
            checkpointer.log(loss=torch.tensor(number / 2), note="x")
            checkpointer.save_if_needed(number)
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 16))
    again, _ = start(root)
    with again.checkpointer as checkpointer:
        restored = checkpointer.load(step=10)
        assert restored.metrics == {"loss": 5.0}
        again.to(11, 10)
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))


def test_metrics_of_every_step_are_kept_whether_or_not_it_is_saved(root):
    training, _ = start(root, save_mem_interval=4, save_storage_interval=8)

    def logged(first, last):
        for number in range(first, last + 1):
            training.step()
            training.checkpointer.log(at=number)
            training.checkpointer.save_if_needed(number)

    with training.checkpointer as checkpointer:
        logged(1, 11)
        assert checkpointer.load(step=8).metrics == {"at": 8}
        logged(9, 14)  # what was logged for 9 to 11 before belongs to a line that was left
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["at"]) for line in lines] == [(number, number) for number in range(1, 15)]


def test_metrics_that_wait_for_storage_are_cut_with_the_rest(root, tmp_path):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        training.to(5)
        checkpointer.save(5, wait=True)
        held = tmp_path / "held"
        failpoints.arm(f"storage.append.before=hold:{held}")
        training.to(6, 5)
        until(held.exists)  # the log of events hangs in storage
        for number in range(7, 10):
            checkpointer.log(loss=float(number))
            training.to(number, number - 1)
        assert checkpointer.load(step=5).step == 5
        for number in range(6, 8):
            checkpointer.log(loss=-float(number))
            training.to(number, number - 1)
        Path(f"{held}.go").touch()
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(6, -6.0), (7, -7.0)]


def test_a_checkpoint_carries_its_metrics_however_late_it_becomes_durable(root, tmp_path):
    held = tmp_path / "held"
    training, _ = start(root, max_ckpt_num=None)
    with training.checkpointer as checkpointer:
        failpoints.arm(f"writer.shard.begin=hold:{held}")
        for number in range(1, 400):
            checkpointer.log(loss=float(number))
            training.to(number, number - 1)
            if number == 11:  # by then step 10 is sealed
                until(held.exists)
        Path(f"{held}.go").touch()
    assert committed(root)[0] == 10
    for step in committed(root):
        assert easyckpt.restore(root, {"model": nn.Linear(16, 16)}, step=step).metrics == {"loss": float(step)}


def test_a_value_that_cannot_be_written_down_takes_nothing_else_with_it(root, caplog):
    training, _ = start(root, lease_interval=0.1)
    with training.checkpointer as checkpointer:
        for number in range(1, 4):
            # As a tensor on a GPU that has failed: it can be read later only, and then it cannot.
            checkpointer.log(loss=float(number), unreadable=torch.ones(1, device="meta"), note="x")
            training.to(number, number - 1)
        renewed = json.loads((root / "lease.json").read_text())["renewed"]
        until(lambda: json.loads((root / "lease.json").read_text())["renewed"] > renewed)
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"], line["note"]) for line in lines] == [(n, float(n), "x") for n in (1, 2, 3)]
    assert "log(unreadable=…) of step 2 cannot be written down and is left out" in caplog.text


def test_metrics_that_storage_refuses_are_written_later(root):
    training, _ = start(root, events=False)
    with training.checkpointer as checkpointer:
        failpoints.arm("storage.append.before@*=error:ENOSPC")
        for number in range(1, 4):
            checkpointer.log(loss=float(number))
            training.to(number, number - 1)
        until(lambda: checkpointer._metrics.unwritten == len(checkpointer._metrics._lines) == 3)  # it was tried
        assert not (root / "metrics.jsonl").exists() or not (root / "metrics.jsonl").read_text()
        failpoints.arm("")
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_trouble_of_one_duty_does_not_keep_the_lease_from_being_renewed(root, monkeypatch, caplog):
    def broken(metrics, storage):
        raise RuntimeError("out of order")

    monkeypatch.setattr(Metrics, "write", broken)
    training, _ = start(root, lease_interval=0.1)
    with training.checkpointer:
        renewed = json.loads((root / "lease.json").read_text())["renewed"]
        until(lambda: json.loads((root / "lease.json").read_text())["renewed"] > renewed + 1)
    assert caplog.text.count("writing metrics failed, will try again: out of order") == 1


@pytest.mark.parametrize("value", [torch.zeros(2), object(), [1], torch.tensor(1j), 1j])
def test_what_is_no_metric_is_refused_by_name(root, value):
    training, _ = start(root)
    with training.checkpointer as checkpointer, pytest.raises(easyckpt.UsageError, match="accuracy"):
        checkpointer.log(accuracy=value)


def test_events_are_written_counted_and_logged(root, tmp_path):
    log = tmp_path / "readable.log"
    training, _ = start(root, log_file_path=str(log))
    with training.checkpointer as checkpointer:
        training.to(10)
        checkpointer.wait(60)
        counts = checkpointer.stats().counts
    assert counts["SnapshotSealed"] >= 9
    assert counts["FlushCommitted"] == 1
    events = [json.loads(line) for line in (root / "events" / "rank-00000.jsonl").read_text().splitlines()]
    sealed = [event["step"] for event in events if event["event"] == "SnapshotSealed"]
    assert sealed == list(range(1, 11))
    commits = [event for event in events if event["event"] == "FlushCommitted"]
    assert commits[0]["step"] == 10
    assert commits[0]["bytes"] > 0
    assert commits[0]["seconds"] > 0
    assert "flush committed, step 10" in log.read_text()


def recorded(root: Path, kind: str) -> list[dict]:
    lines = (root / "events" / "rank-00000.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == kind]


def test_events_carry_step_bytes_and_seconds(root):
    training, _ = start(root, max_ckpt_num=1)
    with training.checkpointer as checkpointer:
        for step in (10, 20, 30):
            training.to(step, step - 10)
            checkpointer.wait()
    training, _ = start(root)
    training.checkpointer.close()
    image = recorded(root, "SnapshotSealed")[-1]["bytes"]
    weights = sum(parameter.nbytes for parameter in training.model.parameters())
    assert image >= 2 * weights  # parameters and momentum
    for kind in ("SnapshotBegun", "SnapshotSealed", "FlushBegun", "FlushCommitted", "Restored"):
        last = recorded(root, kind)[-1]
        assert (last["step"], last["bytes"] >= image) == (30, True), kind
        assert (last["seconds"] > 0) == (kind != "FlushBegun"), kind
    retained = recorded(root, "Retained")
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
    (failed,) = recorded(root, "FlushFailed")
    assert (failed["step"], failed["bytes"]) == (10, recorded(root, "FlushBegun")[0]["bytes"])
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
        while not hold.exists():
            time.sleep(0.001)
        training.to(2, 1)
        Path(f"{hold}.go").touch()
        checkpointer.wait()
    (skipped,) = recorded(root, "SnapshotSkipped")
    assert skipped["step"] == 2
    assert skipped["bytes"] >= recorded(root, "SnapshotSealed")[0]["bytes"] > 0
    assert skipped["seconds"] > 0


def test_a_closed_checkpointer_says_so(root):
    training, _ = start(root)
    training.checkpointer.close()
    training.checkpointer.close()
    with pytest.raises(easyckpt.UsageError, match="closed"):
        training.checkpointer.save_if_needed(1)


def test_bad_input_in_the_constructor_leaves_the_root_as_it_was(root):
    with pytest.raises(easyckpt.ConfigError, match="slots"):
        Training(root, slots=0)
    with pytest.raises(easyckpt.ConfigError, match="save_memory_interval"):
        Training(root, save_memory_interval=2)
    with pytest.raises(easyckpt.EasyckptError, match="thing"):
        Checkpointer(root, {"thing": object()})
    with pytest.raises(easyckpt.UnsupportedValue, match="progress"):
        Checkpointer(root, {"progress": {"lock": object()}})
    assert not root.exists()


@pytest.mark.parametrize("place", ["wiring.reserve", "wiring.AccumulationWatch", "wiring.watch_signals"])
def test_a_constructor_that_fails_lets_go_of_the_root(root, tmp_path, monkeypatch, place):
    handlers = list(logging.getLogger("easyckpt").handlers)
    with monkeypatch.context() as patch:
        if place == "wiring.reserve":
            settings = {"min_free_bytes": 1 << 60}  # really refused
        else:
            settings = {}
            patch.setattr(f"easyckpt.engine.{place}", _refuse)
        with pytest.raises(easyckpt.EasyckptError, match="free"):
            Training(root, log_file_path=tmp_path / "log", **settings)
    assert not (root / "lease.json").exists()
    assert logging.getLogger("easyckpt").handlers == handlers
    training, _ = start(root)  # at once, by the same process
    with training.checkpointer:
        training.to(3)
    assert committed(root) == [3]


def _refuse(*arguments, **options):
    raise easyckpt.OutOfSpace("nothing is free")


def test_a_file_in_place_of_the_root_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(easyckpt.EasyckptError, match="file"):
        Training(path)
    assert path.read_text() == "mine"


def test_restore_is_read_only_and_works_beside_a_running_job(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        training.to(10)
        checkpointer.wait(60)
        at_ten = training.weights()
        before = sorted(str(path) for path in root.rglob("*") if path.suffix != ".jsonl")
        other = nn.Linear(16, 16)
        generator = torch.get_rng_state()
        restored = easyckpt.restore(root, {"model": other})
        assert (restored.step, restored.tier) == (10, "storage")
        assert torch.equal(other.weight, at_ten)
        assert torch.equal(torch.get_rng_state(), generator)
        assert sorted(str(path) for path in root.rglob("*") if path.suffix != ".jsonl") == before


@pytest.mark.parametrize("times", [1, 1000])
def test_restore_looks_again_when_what_it_reads_is_rotated_away(root, monkeypatch, times):
    training, _ = start(root, max_ckpt_num=1)
    open_storage, went_on = read_only.open_storage, []

    def rotated_away(*arguments, **options):
        if len(went_on) < times:
            went_on.append(10 * len(went_on) + 20)
            training.to(went_on[-1], went_on[-1] - 10)
            checkpointer.wait(60)
            until(lambda: committed(root) == [went_on[-1]])
        return open_storage(*arguments, **options)

    with training.checkpointer as checkpointer:
        training.to(10)
        checkpointer.wait(60)
        monkeypatch.setattr(read_only, "open_storage", rotated_away)
        other = nn.Linear(16, 16)
        if times == 1:
            assert easyckpt.restore(root, {"model": other}).step == 20
            assert torch.equal(other.weight, training.weights())
        else:
            with pytest.raises(easyckpt.StorageError, match="rotated away"):
                easyckpt.restore(root, {"model": other})


def test_nothing_is_applied_when_the_objects_do_not_fit(root):
    training, _ = start(root)
    with training.checkpointer:
        training.to(10)
    model = nn.Linear(16, 17)
    weights = model.weight.detach().clone()
    with Checkpointer(root, {"model": model}) as checkpointer:
        with pytest.raises(easyckpt.StateMismatch) as caught:
            checkpointer.load()
        assert "weight" in str(caught.value)
        assert torch.equal(model.weight, weights)
    assert committed(root) == [10]


def test_loading_a_component_may_take_an_optimizer_step(root):
    """Some make their optimizer's state that way before they fill it."""

    class Filled(dict):
        def state_dict(self):
            return {"steps": 1}

        def load_state_dict(self, state):
            parameter = nn.Parameter(torch.zeros(1))
            parameter.grad = torch.zeros(1)
            torch.optim.SGD([parameter], lr=0.1, momentum=0.9).step()
            self.update(state)

    for restored in (0, 1):
        component = Filled()
        with Checkpointer(root, {"component": component}) as checkpointer:
            assert checkpointer.load().step == restored
            checkpointer.save(1, wait=True)
    assert component == {"steps": 1}


def test_saving_after_a_half_applied_load_is_refused(root):
    training, _ = start(root)
    with training.checkpointer:
        training.to(10)

    class Bad:
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            raise RuntimeError("no")

    state = {"model": training.model, "bad": Bad()}
    with Checkpointer(root.with_name("other"), state) as checkpointer:
        checkpointer.load()
        checkpointer.save_if_needed(100)
    with Checkpointer(root.with_name("other"), state) as checkpointer:
        with pytest.raises(easyckpt.PartlyApplied, match="bad"):
            checkpointer.load()
        with pytest.raises(easyckpt.UsageError, match="partly"):
            checkpointer.save_if_needed(101)


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


def test_a_root_without_room_for_one_checkpoint_is_refused_at_the_start(tmpfs):
    model = nn.Linear(5000, 4000)  # 80 MB, and a tmpfs of 64
    with pytest.raises(easyckpt.OutOfSpace, match=r"about 76\.3 MiB, 6[34]\.\d MiB are free\. Free space"):
        Checkpointer(Path(tmpfs) / "run", {"model": model})


def test_room_that_is_to_stay_free_is_named_where_it_lacks(root):
    wanted = r"about [\d.]+ KiB and 1\.0 PiB are to stay free \(min_free_bytes\), [\d.]+ [GT]iB are free"
    with pytest.raises(easyckpt.OutOfSpace, match=wanted):
        Training(root, min_free_bytes=2**50)


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


def test_a_future_cannot_be_cancelled_and_saving_goes_on(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        for number in range(1, 4):
            training.step()
            future = checkpointer.save(number)
            assert not future.cancel()  # as asyncio does on a timeout
        assert future.result(60) == 3
    assert committed(root) == [1, 2, 3]


def test_what_waits_for_a_future_does_not_hold_the_training_up(root):
    training, _ = start(root)
    release, seen = threading.Event(), []  # a callback is the user's code: it runs without our locks

    def upload(future) -> None:
        release.wait(60)
        seen.append(future.result())

    with training.checkpointer as checkpointer:
        training.step()
        checkpointer.save(1).add_done_callback(upload)
        deadline = time.monotonic() + 60
        while not committed(root) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        training.step()
        begun = time.monotonic()
        checkpointer.save_if_needed(2)
        assert time.monotonic() - begun < 5
        assert seen == []
        release.set()
    assert committed(root) == [1, 2]


def test_a_callback_that_takes_long_holds_up_no_other_save(root):
    training, _ = start(root)
    release, ended_by_release, on = threading.Event(), [], []

    def upload(future) -> None:
        on.append(threading.current_thread().name)
        ended_by_release.append(release.wait(20))

    with training.checkpointer as checkpointer:
        training.step()
        hold = root.with_name("hold")
        failpoints.arm(f"commit.reported=hold:{hold}")
        first = checkpointer.save(1)
        first.add_done_callback(upload)
        hold.with_suffix(".go").touch()
        training.step()
        checkpointer.save(2, wait=True)  # returns although the callback has not
        assert committed(root) == [1, 2]
        first.add_done_callback(lambda _: on.append(threading.current_thread().name))
        release.set()
    assert ended_by_release == [True]  # and the end has waited for it
    assert sorted(on) == ["MainThread", "easyckpt-callbacks"]


def test_a_callback_that_fails_is_logged_and_harms_nothing(root, caplog):
    training, _ = start(root)

    def upload(future) -> None:
        raise ZeroDivisionError("the upload has failed")

    hold = root.with_name("hold")
    failpoints.arm(f"commit.reported=hold:{hold}")
    with training.checkpointer as checkpointer:
        training.step()
        checkpointer.save(1).add_done_callback(upload)
        hold.with_suffix(".go").touch()
        training.step()
        checkpointer.save(2, wait=True)
    assert committed(root) == [1, 2]
    assert "the upload has failed" in caplog.text


def test_metrics_called_step_and_time_do_not_decide_where_a_resume_cuts(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        for number in range(1, 6):
            training.step()
            checkpointer.log(step=number * 1000, time=0, loss=number)
            checkpointer.save_if_needed(number)
    again, restored = start(root)
    with again.checkpointer as checkpointer:
        assert restored.metrics == {"step": 5000, "time": 0, "loss": 5}
        again.to(6, 5)
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["logged_step"], line["logged_time"]) for line in lines] == [
        (number, number * 1000, 0) for number in range(1, 6)
    ]
    assert all(line["time"] > 0 for line in lines)


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


def test_the_memory_belongs_to_the_user_whatever_the_environment_says(root, monkeypatch):
    """Two jobs that name their user differently would both own the slots."""
    first, _ = start(root)
    with first.checkpointer:
        for variable in ("USER", "LOGNAME", "USERNAME", "LNAME"):
            monkeypatch.setenv(variable, "somebody-else")
        with pytest.raises(easyckpt.errors.RootInUse, match="memory of rank 0"):
            Training(root)
        first.to(3)
    assert committed(root) == [3]
