"""What a job logs: one line for each step beside the checkpoints, on this line of training, whatever happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import easyckpt
from easyckpt import failpoints
from easyckpt.saving.metrics import Metrics
from tests.support.staged import until
from tests.support.training import committed, start


def written(root: Path) -> list[dict]:
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def test_metrics_stay_beside_the_checkpoints_and_are_cut_on_resume(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        for number in range(1, 16):
            training.step()
            checkpointer.log(loss=torch.tensor(number / 2), note="x")
            checkpointer.save_if_needed(number)
    lines = written(root)
    assert [line["step"] for line in lines] == list(range(1, 16))
    again, _ = start(root)
    with again.checkpointer as checkpointer:
        restored = checkpointer.load(step=10)
        assert restored.metrics == {"loss": 5.0}
        again.to(11, 10)
    lines = written(root)
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
    lines = written(root)
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
    lines = written(root)
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
    lines = written(root)
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
    lines = written(root)
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
    lines = written(root)
    assert [(line["step"], line["logged_step"], line["logged_time"]) for line in lines] == [
        (number, number * 1000, 0) for number in range(1, 6)
    ]
    assert all(line["time"] > 0 for line in lines)
