"""The metrics file beside the checkpoints: what is cut and what is written meet in no order that loses a line."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy
import pytest
import torch

from easyckpt import failpoints
from easyckpt.errors import UsageError
from easyckpt.format import layout
from easyckpt.saving import metrics as module
from easyckpt.saving.metrics import Metrics
from easyckpt.storage.local import LocalStorage
from tests.support.staged import until
from tests.support.zygote import fork_program


@pytest.fixture
def storage(tmp_path):
    storage = LocalStorage(tmp_path / "root")
    storage.makedirs("")
    return storage


def take(metrics: Metrics, *steps: int) -> None:
    for step in steps:
        metrics.log({"loss": float(step)})
        metrics.take(step)


def written(storage: LocalStorage) -> list[int]:
    return [json.loads(line)["step"] for line in storage.read(layout.METRICS).splitlines()]


def test_a_line_that_is_just_being_written_is_not_lost_by_a_cut(storage, tmp_path):
    metrics, held = Metrics(), tmp_path / "held"
    take(metrics, 1, 8)
    metrics.write(storage)
    take(metrics, 2, 9)
    failpoints.arm(f"storage.append.before=hold:{held}")
    writing = threading.Thread(target=metrics.write, args=(storage,))
    cutting = threading.Thread(target=metrics.cut, args=(storage, 5))
    writing.start()
    until(held.exists)
    cutting.start()
    until(lambda: metrics._writing.locked() or not cutting.is_alive())
    Path(f"{held}.go").touch()
    writing.join()
    cutting.join()
    assert written(storage) == [1, 2]


def test_lines_that_a_killed_process_had_not_written_are_written_by_the_one_that_goes_on(storage):
    killed = Metrics()
    killed.hold_back()
    take(killed, 1)
    killed.cut(storage, 0)
    take(killed, 2)
    killed.write(storage)
    take(killed, 3)
    killed.log({"loss": torch.tensor(4.0), "lr": 0.1})
    killed.take(4)
    carried = killed.state_dict()
    take(killed, 5)
    for attempt in range(2):  # also when this one is killed before it comes to that
        metrics = Metrics()
        metrics.hold_back()
        metrics.load_state_dict(carried)
        take(metrics, 5)
        metrics.cut(storage, 4)
        if attempt:
            metrics.write(storage)
    assert written(storage) == [1, 2, 3, 4, 5]
    assert metrics.state_dict() == {"newest": {"loss": 5.0}, "unwritten": []}


def test_what_is_written_is_not_carried_and_not_written_twice(storage):
    metrics = Metrics()
    take(metrics, 1, 2)
    carried = metrics.state_dict()
    metrics.write(storage)
    metrics.load_state_dict(carried)
    metrics.hold_back()
    metrics.cut(storage, 2)
    metrics.write(storage)
    assert written(storage) == [1, 2]
    assert metrics.state_dict()["unwritten"] == []


KILLED = """
import os, sys
from torch import nn
import easyckpt

root, last = sys.argv[1], int(sys.argv[2])
with easyckpt.Checkpointer(root, {"model": nn.Linear(2, 2), "count": {}}, overlap=False) as checkpointer:
    for step in range(checkpointer.load().step + 1, 41):
        checkpointer.log(loss=step / 7)
        checkpointer.save_if_needed(step)
        if step == last:
            os.kill(os.getpid(), 9)
"""


def test_the_metrics_of_a_job_that_is_killed_again_and_again_have_no_gap(tmp_path):
    for last in (7, 8, 20, 39):
        assert fork_program(KILLED, tmp_path / "run", last, directory=tmp_path).communicate(100)
    child = fork_program(KILLED, tmp_path / "run", 0, directory=tmp_path)
    _, stderr = child.communicate(100)
    assert child.returncode == 0, stderr
    storage = LocalStorage(tmp_path / "run")
    lines = [json.loads(line) for line in storage.read(layout.METRICS).splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(step, step / 7) for step in range(1, 41)]


def test_what_storage_has_refused_is_cut_as_well(storage):
    metrics = Metrics()
    take(metrics, 1, 8)
    failpoints.arm("storage.append.before=error:EIO")
    with pytest.raises(OSError, match="Input/output error"):
        metrics.write(storage)
    take(metrics, 2, 9)
    metrics.cut(storage, 5)
    take(metrics, 6)
    metrics.write(storage)
    assert written(storage) == [1, 2, 6]


def test_lines_that_nobody_can_write_take_bounded_memory_and_are_counted(storage, monkeypatch, caplog):
    monkeypatch.setattr(module, "QUEUE_LIMIT", 10)
    metrics = Metrics()
    failpoints.arm("storage.append.before@*=error:EIO")
    for step in range(1, 41):
        take(metrics, step)
        with pytest.raises(OSError, match="Input/output error"):
            metrics.write(storage)
    assert metrics.unwritten == 20
    failpoints.arm("")
    metrics.write(storage)
    metrics.write(storage)
    assert written(storage) == list(range(1, 21))
    assert "20 lines of metrics were dropped" in caplog.text


def test_a_rank_that_writes_no_metrics_keeps_none(storage):
    metrics = Metrics(writes=False)
    take(metrics, *range(1, 100))
    assert metrics.unwritten == 0
    assert metrics.latest == {"loss": 99.0}


def test_a_number_too_long_to_be_written_leaves_the_others(storage, caplog):
    metrics = Metrics()
    metrics.log({"long": 10**5000, "loss": torch.tensor(1.5), "step": 7, "nan": float("nan")})
    metrics.take(3)
    metrics.write(storage)
    line = json.loads(storage.read(layout.METRICS))
    line.pop("time")
    assert line == {"step": 3, "loss": 1.5, "logged_step": 7, "nan": "nan"}
    assert "log(long=…) of step 3 cannot be written down" in caplog.text


def test_scalars_of_numpy_are_numbers(storage):
    metrics = Metrics()
    metrics.log({"loss": numpy.float32(0.5), "lr": numpy.float64(0.25), "tokens": numpy.int64(7), "best": numpy.True_})
    metrics.take(1)
    assert metrics.latest == {"loss": 0.5, "lr": 0.25, "tokens": 7, "best": True}
    assert {type(value) for value in metrics.latest.values()} == {float, int, bool}
    for value in (numpy.complex64(1), numpy.zeros(1), numpy.datetime64("2026-01-01", "ns")):
        with pytest.raises(UsageError, match="neither number"):
            metrics.log({"bad": value})
