"""What went wrong for people elsewhere, each as a test named after the symptom.

Cases that need ranks or dying processes stand in the scenario files; CASES.md names the test of each.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import easyckpt
from easyckpt import failpoints
from tests.support.jobs import committed
from tests.support.tmpfs import tmpfs  # noqa: F401 - a fixture

INTERVAL_NEVER = {"save_storage_interval": 10**9}


def roundtrip(root: Path, saved: dict, loaded: dict, **settings) -> easyckpt.Restored:
    with easyckpt.Checkpointer(root, saved, **INTERVAL_NEVER, **settings) as checkpointer:
        checkpointer.load()
        checkpointer.save_if_needed(1)
    with easyckpt.Checkpointer(root, loaded, **INTERVAL_NEVER) as checkpointer:
        return checkpointer.load()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_cpu_tensors_in_a_checkpoint_are_not_those_of_a_later_step(root):
    counter = torch.zeros(3)
    with easyckpt.Checkpointer(root, {"progress": {"counter": counter}}, **INTERVAL_NEVER) as checkpointer:
        checkpointer.load()
        future = checkpointer.save(1)
        counter += 1
        future.result(60)
    other = {"counter": torch.full((3,), 9.0)}
    with easyckpt.Checkpointer(root, {"progress": other}, **INTERVAL_NEVER) as checkpointer:
        checkpointer.load(step=1)
    assert other["counter"].tolist() == [0, 0, 0]


def test_latest_never_names_what_is_not_durable(root):
    model = nn.Linear(8, 8)
    with easyckpt.Checkpointer(root, {"model": model}, **INTERVAL_NEVER) as checkpointer:
        checkpointer.load()
        checkpointer.save(1, wait=True)
        failpoints.arm("commit.rename.before=error:EIO")
        with pytest.raises(easyckpt.SaveFailed):
            checkpointer.save(2, wait=True)
        assert (root / "latest").read_text() == "step-00000001\n"
        with pytest.raises(easyckpt.SaveFailed):
            checkpointer.wait()


@pytest.mark.parametrize("damage", ["empty", "no manifest", "truncated shard"])
def test_an_incomplete_newest_checkpoint_is_passed_over_with_a_warning(root, damage, caplog):
    model = nn.Linear(8, 8)
    with easyckpt.Checkpointer(root, {"model": model}, **INTERVAL_NEVER) as checkpointer:
        checkpointer.load()
        checkpointer.save(1, wait=True)
        checkpointer.save(2, wait=True)
    newest = root / "step-00000002"
    if damage == "empty":
        for path in newest.iterdir():
            path.unlink()
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        os.truncate(newest / "rank-00000.safetensors", 100)
    with easyckpt.Checkpointer(root, {"model": model}, **INTERVAL_NEVER) as checkpointer:
        assert checkpointer.load().step == 1
    assert any("step-00000002" in record.message for record in caplog.records)


def test_a_writers_error_publishes_nothing(root):
    model = nn.Linear(8, 8)
    failpoints.arm("writer.shard.chunk=error:EIO")
    with easyckpt.Checkpointer(root, {"model": model}, **INTERVAL_NEVER) as checkpointer:
        checkpointer.load()
        with pytest.raises(easyckpt.SaveFailed):
            checkpointer.save(1, wait=True)
        assert committed(root) == []
        with pytest.raises(easyckpt.SaveFailed):
            checkpointer.wait()


FLAT = """
import json, os, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import psutil, torch, easyckpt
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
samples = []
with easyckpt.Checkpointer(sys.argv[1], {"model": model, "optimizer": optimizer}, save_storage_interval=10,
                           max_ckpt_num=2, back_pressure="wait", events=True) as checkpointer:
    checkpointer.load()
    for step in range(1, 1001):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.log(step=step)
        checkpointer.save_if_needed(step)
        if step % 100 == 0:
            checkpointer.wait()
            me = psutil.Process()
            samples.append([me.memory_full_info().uss, me.num_fds(), threading.active_count()])
    commits = checkpointer.stats().counts["FlushCommitted"]
print(json.dumps({"samples": samples, "commits": commits}))
"""


def test_memory_descriptors_and_threads_stay_flat_over_a_thousand_saves_with_256_descriptors(root):
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 256
    done = subprocess.run([sys.executable, "-c", FLAT, str(root)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["commits"] >= 90
    early, late = result["samples"][2:5], result["samples"][-3:]
    # A sample may meet a thread that is just ending or a log file that is just open: growth is what stays.
    growth = [
        min(values) - max(before)
        for before, values in zip(zip(*early, strict=True), zip(*late, strict=True), strict=True)
    ]
    assert growth[0] < 4_000_000, f"memory grows: {result['samples']}"
    assert growth[1] <= 0, f"descriptors grow: {result['samples']}"
    assert growth[2] <= 0, f"threads grow: {result['samples']}"


def test_a_flush_of_step_n_holds_step_n_though_training_goes_on(root, tmp_path):
    hold = tmp_path / "hold"
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    progress = {"step": 0}
    failpoints.arm(f"writer.shard.begin=hold:{hold}")
    state = {"model": model, "optimizer": optimizer, "progress": progress}
    with easyckpt.Checkpointer(root, state, save_storage_interval=5) as checkpointer:
        checkpointer.load()
        for step in range(1, 15):
            train(model, optimizer)
            progress["step"] = step
            if step == 5:
                truth = model.weight.detach().clone()
            checkpointer.save_if_needed(step)
        hold.with_suffix(".go").touch()
        checkpointer.wait(60)
        checkpointer.load(step=5)
        assert progress["step"] == 5
        assert torch.equal(model.weight, truth)


def test_starting_from_nothing_is_said_loudly(root, caplog):
    with easyckpt.Checkpointer(root, {"model": nn.Linear(2, 2)}) as checkpointer:
        assert checkpointer.load().tier is None
        checkpointer._events.drain()
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert any("nothing to restore" in message for message in warnings)


def test_a_plan_never_misses_a_new_key_or_a_changed_dtype(root):
    model = nn.Linear(8, 8)
    progress: dict = {"values": torch.zeros(2)}
    with easyckpt.Checkpointer(root, {"model": model, "progress": progress}, **INTERVAL_NEVER) as checkpointer:
        checkpointer.load()
        checkpointer.save(1, wait=True)
        model.register_buffer("extra", torch.full((3,), 7.0))
        progress["values"] = torch.ones(2, dtype=torch.float64)
        progress["new"] = {"deep": torch.arange(4)}
        checkpointer.save(2, wait=True)
    other, found = nn.Linear(8, 8), {"values": torch.zeros(2)}
    other.register_buffer("extra", torch.zeros(3))
    with easyckpt.Checkpointer(root, {"model": other, "progress": found}, **INTERVAL_NEVER) as checkpointer:
        checkpointer.load()
    assert other.extra.tolist() == [7, 7, 7]
    assert found["values"].dtype == torch.float64
    assert found["new"]["deep"].tolist() == [0, 1, 2, 3]


def test_a_step_whose_pointer_could_not_be_written_can_be_saved_again(root):
    failpoints.arm("commit.durable=error:ENOSPC")
    model = nn.Linear(8, 8)
    with easyckpt.Checkpointer(root, {"model": model}, **INTERVAL_NEVER) as checkpointer:
        checkpointer.load()
        checkpointer.save(1, wait=True)
        assert not (root / "latest").exists()
        assert checkpointer.save(1, wait=True).result() == 1
        assert committed(root) == [1]


def test_another_runs_files_in_the_same_directory_are_refused(root, tmp_path):
    for name in ("a", "b"):
        with easyckpt.Checkpointer(tmp_path / name, {"model": nn.Linear(8, 8)}, **INTERVAL_NEVER) as checkpointer:
            checkpointer.load()
            checkpointer.save_if_needed({"a": 1, "b": 2}[name])
    os.rename(tmp_path / "b" / "step-00000002", tmp_path / "a" / "step-00000002")
    with easyckpt.Checkpointer(tmp_path / "a", {"model": nn.Linear(8, 8)}, **INTERVAL_NEVER) as checkpointer:
        with pytest.raises(easyckpt.FormatError, match="belongs to run"):
            checkpointer.load()


def test_python_structure_comes_back_exactly(root):
    value = {1: "int key", "a.b": (1, [2, ()]), "empty": {}, "none": [], "od": OrderedDict(z=1, a=float("nan"))}
    found: dict = {"something": "else"}
    same = found
    roundtrip(root, {"progress": value}, {"progress": found})
    assert same is found
    assert list(found) == list(value)
    assert found["a.b"] == (1, [2, ()])
    assert isinstance(found["od"], OrderedDict)
    assert found["od"]["a"] != found["od"]["a"]


def test_param_groups_keep_their_settings_and_unused_parameters_their_absence(root):
    def build() -> tuple[nn.ModuleList, torch.optim.Optimizer]:
        model = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        groups = [{"params": model[0].parameters(), "lr": 0.5, "betas": (0.1, 0.2)}, {"params": model[1].parameters()}]
        return model, torch.optim.AdamW([*groups, {"params": model[2].parameters()}], lr=0.1)

    model, optimizer = build()
    for parameter in model[1].parameters():
        parameter.requires_grad = False
    model[0](torch.randn(2, 8)).sum().backward()  # model[2] never gets a gradient
    optimizer.step()
    other, loaded = build()
    roundtrip(root, {"model": model, "optimizer": optimizer}, {"model": other, "optimizer": loaded})
    assert [group["betas"] for group in loaded.param_groups] == [(0.1, 0.2), (0.9, 0.999), (0.9, 0.999)]
    assert {id(p) for p in loaded.state} == {id(p) for p in other[0].parameters()}


def test_zero_element_tensors_are_state(root):
    found = {"empty": torch.ones(2)}
    roundtrip(root, {"progress": {"empty": torch.empty(0, 5, dtype=torch.int16)}}, {"progress": found})
    assert (found["empty"].shape, found["empty"].dtype) == ((0, 5), torch.int16)


def test_rotation_goes_by_step_and_not_by_time(root):
    model = nn.Linear(8, 8)
    with easyckpt.Checkpointer(root, {"model": model}, max_ckpt_num=2, **INTERVAL_NEVER) as checkpointer:
        checkpointer.load()
        for step in (1, 2):
            checkpointer.save(step, wait=True)
        os.utime(root / "step-00000001", (2**33, 2**33))
        checkpointer.save(3, wait=True)
        checkpointer.wait()
    assert committed(root) == [2, 3]


def test_a_committed_directory_is_never_written_into(root):
    model = nn.Linear(8, 8)
    with easyckpt.Checkpointer(root, {"model": model}, max_ckpt_num=None, **INTERVAL_NEVER) as checkpointer:
        checkpointer.load()
        checkpointer.save(1, wait=True)
        before = {path.name: path.stat().st_mtime_ns for path in (root / "step-00000001").iterdir()}
        for step in (1, 2, 3):
            checkpointer.save(step, wait=True)
        assert {path.name: path.stat().st_mtime_ns for path in (root / "step-00000001").iterdir()} == before


def test_tied_tensors_are_written_once_and_tied_again(root):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight

    model, other = Tied(), Tied()
    roundtrip(root, {"model": model}, {"model": other})
    assert torch.equal(other.head.weight, model.embedding.weight)
    assert other.head.weight is other.embedding.weight
    shard = root / "step-00000001" / "rank-00000.safetensors"
    assert shard.stat().st_size < 2 * 50 * 16 * 4 + 16384


def test_with_one_checkpoint_allowed_the_old_goes_only_after_the_new_is_whole(root, tmp_path):
    model = nn.Linear(8, 8)
    with easyckpt.Checkpointer(root, {"model": model}, max_ckpt_num=1, **INTERVAL_NEVER) as checkpointer:
        checkpointer.load()
        checkpointer.save(1, wait=True)
        for place in ("writer.shard.begin", "writer.index.synced", "commit.rename.before"):
            hold = tmp_path / place
            failpoints.arm(f"{place}=hold:{hold}")
            step = len(list(tmp_path.glob("*.go"))) + 2
            future = checkpointer.save(step)
            while not hold.exists():
                pass
            assert committed(root) == [step - 1]
            Path(f"{hold}.go").touch()
            future.result(60)
            checkpointer._parts.flusher.submit(lambda: None).result(60)  # rotation comes after the commit is told
            assert committed(root) == [step]


def test_taken_begun_and_committed_are_separate_events(root):
    with easyckpt.Checkpointer(root, {"model": nn.Linear(2, 2)}, **INTERVAL_NEVER) as checkpointer:
        checkpointer.load()
        checkpointer.save(1, wait=True)
        names = [*checkpointer.stats().counts]
    order = [names.index(name) for name in ("SnapshotBegun", "SnapshotSealed", "FlushBegun", "FlushCommitted")]
    assert order == sorted(order)


def test_the_learning_rate_goes_on_from_the_absolute_step(root):
    def build():
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [5])
        return {"optimizer": optimizer, "scheduler": scheduler}

    straight = build()
    rates = []
    for _ in range(20):
        straight["optimizer"].step()
        straight["scheduler"].step()
        rates.append(straight["optimizer"].param_groups[0]["lr"])
    stopped = build()
    for _ in range(8):
        stopped["optimizer"].step()
        stopped["scheduler"].step()
    resumed = build()
    roundtrip(root, stopped, resumed)
    for expected in rates[8:]:
        resumed["optimizer"].step()
        resumed["scheduler"].step()
        assert resumed["optimizer"].param_groups[0]["lr"] == expected


def test_counters_and_the_best_metric_come_back(root):
    found = {"best": float("inf"), "patience": 0}
    roundtrip(root, {"early_stopping": {"best": 0.125, "patience": 3}}, {"early_stopping": found})
    assert found == {"best": 0.125, "patience": 3}


def test_a_small_shared_memory_is_noticed_beforehand(root, tmpfs, caplog):
    model = nn.Linear(5000, 4000)  # 80 MB
    with easyckpt.Checkpointer(root, {"model": model}, memory_dir=tmpfs, **INTERVAL_NEVER) as checkpointer:
        checkpointer.load()
        checkpointer.save_if_needed(1)
    assert committed(root) == [1]
    assert any("private memory" in record.message for record in caplog.records)


def test_every_case_names_tests_that_exist():
    here = Path(__file__).parent
    rows = [line for line in (here / "CASES.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(\w+)::(\w+)`", row)
        assert named, row
        for module, test in named:
            assert re.search(rf"^def {test}\(", (here / f"{module}.py").read_text(), re.MULTILINE), (module, test)
