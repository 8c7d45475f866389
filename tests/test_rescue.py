"""Rescue: what it finds in memory while a job may be alive is looked at again once that is owned."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import easyckpt
from easyckpt import catalog, failpoints
from easyckpt.config import CheckpointConfig
from easyckpt.errors import NotLoaded, RootInUse
from easyckpt.format import layout
from easyckpt.memory.adoption import find_slots
from easyckpt.memory.slot import Slot
from easyckpt.saving import rescue as rescue_module
from easyckpt.storage.local import LocalStorage
from easyckpt.verification import verify
from tests.support import jobs
from tests.support.staged import until
from tests.support.zygote import Child, fork_program

NATIVE = layout.NativeNaming()

TRAINS = """
import os, signal, sys, time, torch, easyckpt
root, seen, go = sys.argv[1:]
model = torch.nn.Linear(3, 3)
checkpointer = easyckpt.Checkpointer(root, {"model": model}, save_storage_interval=1000, overlap=False)
checkpointer.load()

def to(last, first=0):
    for step in range(first + 1, last + 1):
        torch.nn.init.constant_(model.weight, step)
        checkpointer.save_if_needed(step)
        while checkpointer.stats().last_sealed_step != step:
            time.sleep(0.001)

to(6)
open(seen, "w").close()
while not os.path.exists(go):
    time.sleep(0.001)
to(11, 6)
os.kill(os.getpid(), signal.SIGKILL)
"""


def rescue(root: Path, memory_dir: Path, **settings) -> list[int]:
    config = CheckpointConfig(memory_dir=str(memory_dir), **settings)
    return [found.step for found in rescue_module.rescue(str(root), config, NATIVE)]


def after_look(monkeypatch: pytest.MonkeyPatch, number: int, happens: Callable[[], None]) -> None:
    """Have `happens` called right after rescue has looked into memory for the `number`-th time."""
    looks = []

    def looking(*arguments):
        found = find_slots(*arguments)
        looks.append(1)
        if len(looks) == number:
            happens()
        return found

    monkeypatch.setattr(rescue_module, "find_slots", looking)


def sealed(memory_dir: Path) -> set[tuple[int, int]]:
    found = find_slots(str(memory_dir), None)
    return {(meta.rank, meta.step) for _, meta in found if not isinstance(meta, str)}


def bad(root: Path) -> list[str]:
    storage = LocalStorage(root)
    return [entry.name for entry in catalog.scan(storage, NATIVE).entries if verify(storage, entry)]


@pytest.fixture
def training(tmp_path: Path) -> tuple[Path, Child, Path]:
    """A root whose job has step 6 in memory, and comes to 11 and dies once the file is there."""
    root, seen, go = tmp_path / "run", tmp_path / "seen", tmp_path / "go"
    child = fork_program(TRAINS, root, seen, go, directory=tmp_path)
    until(seen.exists)
    return root, child, go


def test_a_job_that_is_killed_between_the_look_and_the_rescue_loses_nothing(training, memory_dir, monkeypatch):
    root, child, go = training

    def dies():
        go.touch()
        child.communicate(60)

    after_look(monkeypatch, 1, dies)
    rescued = rescue(root, memory_dir)
    assert child.returncode == -signal.SIGKILL
    assert rescued == sorted(rescued)
    assert rescued[-1] == 11
    assert bad(root) == []
    model = torch.nn.Linear(3, 3)
    for step in rescued:
        assert easyckpt.restore(root, {"model": model}, step=step).step == step
        assert torch.equal(model.weight, torch.full((3, 3), float(step)))


def test_a_job_that_lives_is_refused(training, memory_dir):
    root, child, go = training
    with pytest.raises(RootInUse, match=rf"{root} is in use by the live process {child.pid} \(.* is locked\)"):
        rescue(root, memory_dir)
    assert jobs.committed(root) == []
    go.touch()
    child.communicate(60)


@pytest.mark.parametrize("look", [1, 2, 3])
def test_slots_of_different_steps_never_become_one_checkpoint(tmp_path, memory_dir, monkeypatch, look):
    """Between two looks one rank's slot has gone on to another step, as it does where the job was alive."""
    root = tmp_path / "run"
    job = jobs.start(root, tmp_path / "notes", "--hold-at=3", steps=9, ranks=2, settings={"save_storage_interval": 100})
    job.wait_until(
        lambda: sealed(memory_dir) >= {(rank, step) for rank in range(2) for step in (1, 2)}, "two snapshots"
    )
    job.kill()

    def goes_on():
        for path, meta in find_slots(str(memory_dir), None):
            if not isinstance(meta, str) and meta.rank == 1:
                slot = Slot.open(path)
                view = slot.view()
                slot.begin()
                slot.seal(replace(meta, step=meta.step + 100, sealed_at=0.0), view.static, view.objects)
                view.close()
                slot.close(unlink=False)

    after_look(monkeypatch, look, goes_on)
    if look == 3:
        with pytest.raises(NotLoaded, match="any more"):
            rescue(root, memory_dir)
    else:
        assert rescue(root, memory_dir) == []
    assert [name for name in os.listdir(root) if "step" in name] == []


def test_the_lease_is_renewed_while_much_is_written(training, memory_dir, tmp_path):
    root, child, go = training
    go.touch()
    child.communicate(60)
    hold = tmp_path / "hold"
    failpoints.arm(f"writer.shard.begin=hold:{hold}")
    with ThreadPoolExecutor(1) as executor:
        rescued = executor.submit(rescue, root, memory_dir, lease_interval=0.05)
        try:
            until(hold.exists)
            until(lambda: json.loads((root / layout.LEASE).read_text())["renewed"] > 2)
        finally:
            Path(f"{hold}.go").touch()
        assert rescued.result()[-1] == 11
    assert not (root / layout.LEASE).exists()
