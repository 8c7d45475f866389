"""Windows: when they begin and end, what is sealed, what is raised, and what the training thread pays."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import Forked
from support.staged import Rig, rig_of, stands_in, until  # noqa: F401 - rig_of is a fixture
from torch import nn

import easyckpt
from easyckpt import failpoints

WIDTH = 128


class Job:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state: dict[str, Any] = {"model": self.model, "opt": self.optimizer, "progress": {"epoch": 0}}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, WIDTH)).pow(2).mean().backward()
        self.optimizer.step()

    def settle(self, rig: Rig) -> int:
        for number in (1, 2, 3):
            self.step()
            rig.save(number)
        self.step()
        return 4


def test_overlap_begins_once_a_step_was_seen_between_two_saves(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    job.step()
    rig.save(1)
    assert (rig.window_step, rig.sealed) == (None, [1])
    rig.save(2)
    assert (rig.window_step, rig.sealed) == (None, [1, 2])
    job.step()
    rig.save(3)
    assert rig.window_step == 3
    job.step()
    assert (rig.window_step, rig.sealed) == (None, [1, 2, 3])


def test_overlap_can_be_had_off(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state, overlap=False)
    for number in range(1, 5):
        job.step()
        rig.save(number)
        assert rig.sealed[-1] == number
        job.model.weight.data.add_(1)
    rig.end()
    assert not rig.warned


def test_a_snapshot_without_overlap_is_sealed_at_once(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    number = job.settle(rig)
    rig.save(number, overlap=False)
    assert rig.sealed[-1] == number


@pytest.mark.parametrize("by", ["wait", "close"])
def test_the_last_window_is_ended_without_a_step(rig_of: Callable[..., Rig], by: Any) -> None:
    job = Job()
    rig = rig_of(job.state)
    number = job.settle(rig)
    rig.save(number)
    rig.stager.end_window(by)
    assert rig.sealed[-1] == number
    assert not rig.torn


def test_the_hook_of_another_optimizer_ends_the_window_too(rig_of: Callable[..., Rig]) -> None:
    job, other = Job(), Job()
    rig = rig_of(job.state)
    number = job.settle(rig)
    rig.save(number)
    other.step()
    assert rig.sealed[-1] == number
    job.step()
    rig.end()


def test_steps_on_another_thread(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    number = job.settle(rig)
    rig.save(number)
    thread = threading.Thread(target=job.step)
    thread.start()
    thread.join()
    assert rig.sealed[-1] == number


def test_the_hook_of_a_forked_child_does_nothing(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    number = job.settle(rig)
    with rig.holding() as gate:
        rig.save(number)
        gate.reached()

        with Forked(lambda child: (job.optimizer.step(), child.say("stepped"))[1]) as child:
            assert child.line() == "stepped"  # else it waits for a thread that is not there
        assert rig.window_step == number
    job.step()
    rig.end()
    assert rig.sealed[-1] == number


def test_time_in_the_hook_is_counted(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    number = job.settle(rig)
    rig.stager.blocked_in_hook = 0.0
    with rig.holding() as gate:
        rig.save(number)
        gate.reached()
        stepping = threading.Thread(target=job.step)
        stepping.start()
        until(lambda: stands_in(stepping, "wait_before_step"))
        stood = time.perf_counter()
        time.sleep(0.01)
        least = time.perf_counter() - stood
        gate.release()
        stepping.join()
    assert rig.stager.blocked_in_hook >= least
    rig.end()


def test_no_hook_is_left_after_the_end(memory_dir: Path) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    before = len(_global_optimizer_pre_hooks)
    rig = Rig(memory_dir, Job().state)
    assert len(_global_optimizer_pre_hooks) == before + 1
    rig.close()
    assert len(_global_optimizer_pre_hooks) == before


def test_a_discarded_snapshot_frees_its_slot(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state, slots=2)
    number = job.settle(rig)
    for again in range(number, number + 6):
        assert rig.save(again)
        if again == number:
            with torch.no_grad():
                job.model.weight.add_(1)
        job.step()
    rig.end()
    assert list(rig.discarded) == [number]


def test_the_arena_shows_no_snapshot_whose_window_is_open(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    number = job.settle(rig)
    rig.save(number)
    rig.stager._window.job.wait()  # type: ignore[union-attr]
    assert number not in [meta.step for meta in rig.arena.sealed()]
    job.step()
    assert number in [meta.step for meta in rig.arena.sealed()]


# Through a Checkpointer.


def test_a_torn_snapshot_is_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with easyckpt.Checkpointer(tmp_path / "root", job.state, signals=()) as ckpt:
        ckpt.load()
        for step in range(1, 5):
            job.step()
            ckpt.save_if_needed(step)
        job.step()  # behind the copy before, which must not meet what is armed
        hold = tmp_path / "hold"
        failpoints.arm(f"staging.copy=hold:{hold}")
        ckpt.save_if_needed(5)
        until(hold.exists)
        job.model.weight.data.add_(1)
        hold.with_suffix(".go").touch()
        job.step()
        failpoints.arm("")
        ckpt.save_if_needed(6)  # the loss of the last one would be an error
        stats = ckpt.stats()
    assert stats.counts["SnapshotDiscarded"] == 1
    assert stats.bytes["SnapshotDiscarded"] == stats.bytes["SnapshotBegun"] / stats.counts["SnapshotBegun"]
    assert stats.seconds["SnapshotDiscarded"] > 0
    assert [reason for reason in stats.reasons if "model.weight" in reason and "outside of an optimizer step" in reason]
    assert "changed outside of an optimizer step" in caplog.text


def test_a_save_of_the_step_whose_window_is_open_ends_it_without_a_loss(tmp_path: Path) -> None:
    """No optimizer step belongs between save_if_needed(n) and save(n): that is no sign of one that cannot be seen."""
    job = Job()
    with easyckpt.Checkpointer(tmp_path / "root", job.state, signals=()) as ckpt:
        ckpt.load()
        overlapped = []
        for step in range(1, 10):
            job.step()
            ckpt.save_if_needed(step)
            overlapped.append(ckpt._parts.stager._window is not None)
            if step >= 5:
                assert ckpt.save(step).result(60) == step
        assert overlapped[4:] == [True] * 5
        assert "SnapshotDiscarded" not in ckpt.stats().counts


@pytest.mark.parametrize("mode", ["step", "micro"])
def test_what_a_job_with_a_scaler_saved_is_what_it_had(tmp_path: Path, mode: str) -> None:
    """Every step's state is restored from what was committed, bit by bit."""
    job = Job()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    job.state["scaler"] = scaler
    kept: dict[int, tuple[torch.Tensor, torch.Tensor, float]] = {}
    with easyckpt.Checkpointer(tmp_path / "root", job.state, save_storage_interval=1, max_ckpt_num=None,
                               back_pressure="wait", signals=()) as ckpt:  # fmt: skip
        ckpt.load()
        for step in range(1, 13):
            loss = job.model(torch.randn(4, WIDTH)).pow(2).mean()
            scaler.scale(loss * (float("inf") if step % 5 == 4 else 1.0)).backward()
            if mode == "step" or step % 2 == 0:
                scaler.step(job.optimizer)
                scaler.update()
                job.optimizer.zero_grad()
            moment = job.optimizer.state.get(job.model.weight, {}).get("exp_avg", torch.zeros(1))
            kept[step] = (job.model.weight.detach().clone(), moment.clone(), scaler.get_scale())
            ckpt.save_if_needed(step)
        discarded = ckpt.stats().counts.get("SnapshotDiscarded", 0)
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "root").glob("step-*"))
    assert discarded <= (0 if mode == "step" else 2)
    assert len(steps) >= 12 - discarded
    for step in steps:
        other = Job()
        other.state["scaler"] = torch.amp.GradScaler("cpu")
        easyckpt.restore(tmp_path / "root", other.state, step=step)
        weight, moment, scale = kept[step]
        assert torch.equal(other.model.weight, weight)
        assert torch.equal(other.optimizer.state.get(other.model.weight, {}).get("exp_avg", torch.zeros(1)), moment)
        assert other.state["scaler"].get_scale() == scale


def test_many_small_tensors_print_what_they_cost(
    rig_of: Callable[..., Rig], capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = [nn.Parameter(torch.randn(16)) for _ in range(20_000)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    rig = rig_of({"model": nn.ParameterList(parameters), "opt": optimizer})
    costs = []
    for step in range(1, 6):
        optimizer.step()
        rig.stager.end_window("save")
        begun = time.perf_counter()
        capture = rig.capture.capture()
        captured = time.perf_counter()
        del capture
        rig.save(step)
        costs.append((captured - begun, rig.log._queue[-2 if rig.window_step is None else -1].seconds))
    rig.end()
    assert rig.sealed == list(range(1, 6))
    capture_ms, stage_ms = (statistics.median(column) * 1e3 for column in zip(*costs[2:], strict=True))
    with capsys.disabled():
        print(f"\n20,000 tensors of 64 bytes: capture {capture_ms:.1f} ms, staging {stage_ms:.1f} ms (goal: 50 in all)")


def test_nothing_grows_over_many_saves(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    job.settle(rig)

    def held() -> tuple[int, int, int]:
        return (
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            len(rig.stager._unsealed),
        )

    rig.save(5)
    job.step()
    before = held()
    for step in range(6, 206):
        rig.save(step)
        job.step()
        rig._references.pop(step - 3, None)
    assert held() == before
    until(lambda: rig.sealed[-1] == 205)
