"""What `cp` makes: a copied checkpoint begins a new run that names its parent, a copied root goes on as its run."""

from __future__ import annotations

import functools
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import easyckpt
from easyckpt import catalog
from easyckpt.errors import ForeignFormat
from easyckpt.format import layout
from easyckpt.format.manifest import RootRecord
from easyckpt.saving.line import new_root
from easyckpt.storage.local import LocalStorage
from tests.support import training
from tests.support.checkpoints import make_view, write_checkpoint
from tests.support.commands import run  # noqa: F401 - a fixture
from tests.support.jobs import committed

NATIVE = layout.NativeNaming()
LEASE = {"lease_timeout": 0.5, "lease_interval": 0.2}  # a copied lease names the original's process

train = functools.partial(training.train, **LEASE)


def record(root: Path) -> RootRecord:
    found = catalog.read_root(LocalStorage(root))
    assert found is not None
    return found


def copy_steps(source: Path, target: Path, *steps: int) -> None:
    for step in steps:
        shutil.copytree(source / layout.step_dir(step), target / layout.step_dir(step))


def test_a_copied_checkpoint_begins_a_new_run_that_names_its_parent(tmp_path, run):
    old, new = tmp_path / "old", tmp_path / "new"
    train(old, 6)
    parent = f"{record(old).run}/{record(old).timelines[-1].id}/6"
    copy_steps(old, new, 6)
    assert train(new, 9).step == 6
    assert record(new).run != record(old).run
    assert record(new).parent == parent
    for step in (8, 9):
        manifest = catalog.read_manifest(LocalStorage(new), layout.step_dir(step))
        assert (manifest.run, manifest.parent) == (record(new).run, parent)
    assert f"its run began from a copy of {parent}" in " ".join(run("show", new).out.split())
    assert train(new, 9).step == 9
    assert committed(old) == [2, 4, 6]


def test_a_copied_checkpoint_is_rotated_like_any_other(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    train(old, 6)
    copy_steps(old, new, 4, 6)
    train(new, 10, max_ckpt_num=2)
    assert committed(new) == [8, 10]


def test_a_copied_attempt_that_lacked_only_its_rename_is_restored_and_kept(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    train(old, 6)
    copy_steps(old, new, 2, 4, 6)
    attempt = catalog.read_manifest(LocalStorage(new), layout.step_dir(6)).attempt
    (new / layout.step_dir(6)).rename(new / layout.tmp_dir(6, attempt))
    assert train(new, 8).step == 6
    assert committed(new) == [2, 4, 6, 8]


def test_all_that_was_copied_can_be_restored_also_from_several_timelines(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    train(old, 4)
    train(old, 8)
    copy_steps(old, new, 2, 4, 6, 8)
    assert train(new, 8, step=2).step == 2  # goes back, over both lines, and on
    assert committed(new) == [2, 4, 6, 8]
    assert {entry.step for entry in catalog.scan(LocalStorage(new), NATIVE).of_kind("stale")} == {4, 6, 8}
    assert train(new, 8).step == 8


def test_timelines_of_a_copy_are_ordered_by_their_newest_steps(tmp_path):
    storage = LocalStorage(tmp_path / "root")
    for step, timeline in ((10, "one"), (20, "two"), (30, "one"), (25, "other")):
        run = "c" * 32 if timeline == "other" else "a" * 32
        view = make_view({"w": torch.zeros(1)}, step=step, timeline=timeline, run=run)
        write_checkpoint(storage, view, attempt="a-1")
    found = new_root(storage, NATIVE)
    assert found.parent == "a" * 32 + "/one/30"
    assert [line.id for line in found.timelines] == ["two", "one"]
    assert all(found.on_ancestry(*key) for key in (("one", 10), ("two", 20), ("one", 30)))
    assert RootRecord.from_bytes(found.to_bytes()) == found


def test_damaged_copies_are_no_parent(tmp_path):
    train(tmp_path / "old", 6)
    copy_steps(tmp_path / "old", tmp_path / "new", 4, 6)
    (tmp_path / "new" / layout.step_dir(6) / layout.shard_file(0)).unlink()
    assert new_root(LocalStorage(tmp_path / "new"), NATIVE).parent.endswith("/4")


def read(root: Path, **options) -> tuple[int, float]:
    """What restore takes from `root`: the step, and the number that all weights are."""
    model = torch.nn.Linear(2, 2)
    return easyckpt.restore(root, {"model": model}, **options).step, model.weight.unique().item()


def test_restore_reads_copies_as_they_lie_there(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    train(old, 4)
    train(old, 8)
    copy_steps(old, new, 2, 6, 8)
    assert read(new) == (8, 8.0)
    assert read(new, step=2) == (2, 2.0)
    (new / layout.step_dir(8) / layout.shard_file(0)).unlink()
    assert read(new) == (6, 6.0)
    assert [path.name for path in sorted(new.iterdir())] == [layout.step_dir(step) for step in (2, 6, 8)]


def test_restore_refuses_copies_of_two_runs(tmp_path):
    train(tmp_path / "one", 2)
    train(tmp_path / "two", 4)
    copy_steps(tmp_path / "one", tmp_path / "new", 2)
    copy_steps(tmp_path / "two", tmp_path / "new", 4)
    with pytest.raises(ForeignFormat, match="belongs to run"):
        read(tmp_path / "new")


def test_restore_says_what_else_a_path_is(tmp_path):
    train(tmp_path / "old", 2)
    step = tmp_path / "old" / layout.step_dir(2)
    with pytest.raises(easyckpt.UsageError) as caught:
        read(step)
    assert (
        str(caught.value)
        == f"{step} is one step of {tmp_path / 'old'}: restore({str(tmp_path / 'old')!r}, ..., step=2)"
    )
    with pytest.raises(easyckpt.UsageError) as caught:
        read(f"{tmp_path / 'old'}@2")
    assert f"restore({str(tmp_path / 'old')!r}, ..., step=2)" in str(caught.value)
    for nothing in ("nowhere", "nowhere@2", "old@two"):
        with pytest.raises(easyckpt.NoCheckpoint, match=f"{nothing}: no such directory"):
            read(tmp_path / nothing)
    (tmp_path / "other").mkdir()
    with pytest.raises(ForeignFormat, match="not a checkpoint root"):
        read(tmp_path / "other")


DIES = """
import os, signal, sys, torch, easyckpt
checkpointer = easyckpt.Checkpointer(sys.argv[1], {"model": torch.nn.Linear(2, 2)}, save_storage_interval=1000)
step = checkpointer.load().step + 1
checkpointer.save_if_needed(step)
checkpointer.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_copied_root_goes_on_as_the_same_run_and_shares_no_memory(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    train(old, 4)
    died = subprocess.run([sys.executable, "-c", DIES, str(old)], capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    shutil.copytree(old, new)
    assert train(new, 8).tier == "storage"  # step 5 lies in the original's memory
    assert (record(new).run, record(new).parent) == (record(old).run, None)
    assert committed(old) == [2, 4]
    with easyckpt.Checkpointer(old, {"model": torch.nn.Linear(2, 2)}) as checkpointer:
        restored = checkpointer.load()
    assert (restored.step, restored.tier) == (5, "memory")


def test_a_root_whose_own_record_is_damaged_says_how_to_go_on_and_does(tmp_path):
    root = tmp_path / "run"
    train(root, 6)
    path = root / layout.ROOT_FILE
    path.write_bytes(path.read_bytes()[:-20])
    before = sorted(root.rglob("*"))
    with pytest.raises(easyckpt.DamagedCheckpoint, match="move this file away"):
        train(root, 8)
    assert sorted(root.rglob("*")) == before
    path.rename(tmp_path / "damaged")
    assert train(root, 8).step == 6
    assert committed(root) == [2, 4, 6, 8]


def test_a_root_that_was_moved_says_what_stays_behind_in_memory(tmp_path, caplog):
    old, new = tmp_path / "old", tmp_path / "new"
    train(old, 4)
    assert subprocess.run([sys.executable, "-c", DIES, str(old)], check=False).returncode == -signal.SIGKILL
    old.rename(new)
    with easyckpt.Checkpointer(new, {"model": torch.nn.Linear(2, 2)}, **LEASE) as checkpointer:
        assert checkpointer.load().step == 4
    assert "snapshots of this run up to step 5" in caplog.text
    new.rename(old)
    caplog.clear()
    with easyckpt.Checkpointer(old, {"model": torch.nn.Linear(2, 2)}, **LEASE) as checkpointer:
        assert checkpointer.load().step == 5
    assert "another path" not in caplog.text
