"""Where memory holds no snapshot of a step: training waits, or lends its live state, and never another step's."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

import easyckpt
from easyckpt import failpoints
from easyckpt.memory.arena import Arena
from tests.support.staged import until
from tests.support.training import committed, start


def test_without_memory_for_one_snapshot_due_saves_wait_and_are_durable(root, monkeypatch):
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
