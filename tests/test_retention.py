"""Rotation: what goes, what never does, and what a crash or an error in the middle leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from support.checkpoints import line, make_view, root_record, write_checkpoint, write_manifest

import easyckpt
from easyckpt import catalog, failpoints
from easyckpt.errors import UsageError
from easyckpt.format import layout as names
from easyckpt.saving.pins import pin, unpin
from easyckpt.saving.policy import Policy
from easyckpt.saving.retention import apply_retention
from easyckpt.storage import local
from easyckpt.storage.local import LocalStorage

NATIVE = names.NativeNaming()


def steps(entries):
    return [entry.step for entry in entries]


@pytest.fixture
def storage(tmp_path):
    storage = LocalStorage(tmp_path / "root")
    catalog.write_root(storage, root_record())
    return storage


def commit(storage, *wanted, timeline="main"):
    for step in wanted:
        write_checkpoint(storage, make_view({"w": torch.tensor([step])}, step=step, timeline=timeline))


def retain(storage, newest=2, held=(), **policy):
    policy = Policy(newest=newest, **policy)
    return steps(apply_retention(storage, NATIVE, catalog.scan(storage, NATIVE), policy=policy, held=held))


def left(storage):
    return [name for name in storage.listdir("") if name not in (names.ROOT_FILE, names.PINS)]


def test_old_ones_go_for_good(storage):
    commit(storage, 10, 20, 30, 40)
    assert retain(storage) == [10, 20]
    assert left(storage) == ["step-00000030", "step-00000040"]


def test_every_kth_and_the_best_stay_on_storage_too(storage):
    for step, loss in ((10, 0.5), (15, 0.1), (20, 0.9), (25, float("nan")), (30, 0.8)):
        commit(storage, step)
        manifest = catalog.read_manifest(storage, names.step_dir(step))
        write_manifest(storage, names.step_dir(step), replace(manifest, metrics={"loss": loss}))
    assert retain(storage, newest=1, every=20, best=1, metric="loss") == [10, 25]
    assert left(storage) == ["step-00000015", "step-00000020", "step-00000030"]


def test_rotation_goes_by_step_not_by_modification_time(storage):
    commit(storage, 30, 20, 10)
    os.utime(f"{storage.root}/step-00000010", (1, 1))
    os.utime(f"{storage.root}/step-00000030", (0, 0))
    assert retain(storage, newest=1) == [10, 20]


def test_a_total_of_one_never_leaves_none(storage):
    commit(storage, 10, 20)
    failpoints.arm("retention.rename.before=error:EIO")
    with pytest.raises(OSError, match="retention"):
        retain(storage, newest=1)
    assert steps(catalog.scan(storage, NATIVE).committed()) == [10, 20]


def test_damaged_ones_do_not_push_out_whole_ones(storage):
    commit(storage, 10, 20, 30)
    storage.truncate("step-00000030/rank-00000.safetensors", 100)
    assert retain(storage, newest=1) == [10]
    assert steps(catalog.scan(storage, NATIVE).committed()) == [20]


def test_pins_are_found_in_the_root(storage):
    commit(storage, 10, 20, 30)
    storage.makedirs(names.PINS)
    storage.replace(names.pin_file(10), b"")
    storage.replace(f"{names.PINS}/notes.txt", b"")
    assert catalog.pinned_steps(storage) == {10}
    assert retain(storage, newest=1) == [20]


def test_trash_that_a_crash_left_is_removed(storage):
    commit(storage, 10, 20)
    storage.rename("step-00000010", names.trash_dir("step-00000010", "dead"))
    assert retain(storage) == []
    assert left(storage) == ["step-00000020"]


@pytest.mark.parametrize(
    ("point", "still"),
    [
        ("retention.rename.before@2", [20, 30, 40]),
        ("retention.rename.after@2", [30, 40]),
        ("retention.delete", [30, 40]),
    ],
)
def test_after_a_crash_anywhere_each_is_whole_or_trash_and_the_next_retention_finishes(storage, point, still):
    commit(storage, 10, 20, 30, 40)
    failpoints.arm(f"{point}=error:EIO")
    with pytest.raises(OSError, match="retention"):
        retain(storage)
    assert steps(catalog.scan(storage, NATIVE).committed()) == still
    assert all(problem.problem is None for problem in catalog.scan(storage, NATIVE).entries)
    failpoints.arm("")
    retain(storage)
    assert left(storage) == ["step-00000030", "step-00000040"]


def test_nothing_is_deleted_before_all_renames_are_durable(storage, monkeypatch):
    commit(storage, 10, 20, 30)
    calls = []
    for name in ("rename", "sync_dir", "remove_tree"):
        real = getattr(LocalStorage, name)
        monkeypatch.setattr(
            LocalStorage, name, lambda self, *a, name=name, real=real: (calls.append(name), real(self, *a))[1]
        )
    retain(storage, newest=1)
    assert calls == ["rename", "rename", "sync_dir", "remove_tree", "remove_tree"]


def test_one_that_cannot_be_removed_keeps_no_other_from_going(storage, monkeypatch):
    commit(storage, 10, 20, 30)
    real = LocalStorage.remove_tree

    def refuse(self, path):
        if path.endswith("10"):
            raise PermissionError(13, "not yours", path)
        real(self, path)

    monkeypatch.setattr(LocalStorage, "remove_tree", refuse)
    with pytest.raises(PermissionError, match="not yours"):
        retain(storage, newest=1)
    assert [name for name in left(storage) if names.parse_trash_dir(name) is None] == ["step-00000030"]
    assert len(left(storage)) == 2


# Pins that are set while it works.


def at_rename(monkeypatch, number, happens):
    """Have `happens` called just before the `number`-th rename, when retention has long decided."""
    real, calls = LocalStorage.rename, []

    def rename(self, src, dst):
        calls.append(src)
        if len(calls) == number:
            happens()
        real(self, src, dst)

    monkeypatch.setattr(LocalStorage, "rename", rename)


@pytest.mark.parametrize("step", [10, 20])
def test_a_step_that_is_pinned_after_the_decision_stays_all_the_same(storage, monkeypatch, step):
    commit(storage, 10, 20, 30)
    at_rename(monkeypatch, 1, lambda: pin(storage, NATIVE, step))
    assert retain(storage, newest=1) == [30 - step]
    assert left(storage) == [names.step_dir(step), "step-00000030"]
    assert steps(catalog.scan(storage, NATIVE).committed()) == [step, 30]


def test_a_pin_that_comes_after_the_rename_says_that_the_step_is_gone(storage, monkeypatch):
    commit(storage, 10, 20, 30)

    def too_late():
        with pytest.raises(UsageError, match="no checkpoint of step 10 is committed"):
            pin(storage, NATIVE, 10)

    at_rename(monkeypatch, 2, too_late)
    assert retain(storage, newest=1) == [10, 20]
    assert catalog.pinned_steps(storage) == set()


def at_pin(monkeypatch, before=lambda: None, after=lambda: None):
    """Have something done right before, or after, the next pin's file is made."""
    real = LocalStorage.create_empty

    def create_empty(self, path):
        monkeypatch.setattr(LocalStorage, "create_empty", real)
        before()
        made = real(self, path)
        after()
        return made

    monkeypatch.setattr(LocalStorage, "create_empty", create_empty)


def test_a_pin_that_meets_the_rename_half_way_never_passes_for_one_that_holds(storage, monkeypatch):
    """The step goes between pin's look at it and the pin: either it comes back, or pin says that it is gone."""
    commit(storage, 10, 20, 30)
    at_pin(monkeypatch, before=lambda: retain(storage, newest=1))
    with pytest.raises(UsageError, match="no checkpoint of step 10 is committed"):
        pin(storage, NATIVE, 10)
    assert catalog.pinned_steps(storage) == set()


def test_a_pin_takes_no_space_and_leaves_nothing_beside_it(storage, monkeypatch):
    """A full disk, or a kill in the middle: nothing is written, so there is nothing that could fail or be left."""
    commit(storage, 10)
    opened, fresh = [], LocalStorage(storage.root)  # has not tried out direct I/O
    monkeypatch.setattr(local, "probe_direct", lambda *_: opened.append("a probe") or False)
    monkeypatch.setattr(LocalStorage, "_write_all", lambda self, descriptor, data: opened.append(data))
    assert pin(fresh, NATIVE, 10) is True
    assert opened == []
    assert storage.listdir(names.PINS) == ["step-10"]


def test_a_step_that_is_renamed_while_pin_looks_at_it_is_not_committed(storage, monkeypatch):
    commit(storage, 10, 20, 30)
    real = catalog.inspect

    def inspect(*arguments):
        monkeypatch.setattr(catalog, "inspect", real)
        retain(storage, newest=1)
        return real(*arguments)

    monkeypatch.setattr(catalog, "inspect", inspect)
    with pytest.raises(UsageError, match="no checkpoint of step 10 is committed"):
        pin(storage, NATIVE, 10)


def test_of_two_pins_at_once_one_has_set_it(storage, monkeypatch):
    commit(storage, 10)
    others = []
    at_pin(monkeypatch, before=lambda: others.append(pin(storage, NATIVE, 10)))
    assert pin(storage, NATIVE, 10) is False
    assert others == [True]
    assert catalog.pinned_steps(storage) == {10}


def test_of_two_unpins_at_once_one_has_taken_it_away(storage, monkeypatch):
    commit(storage, 10)
    pin(storage, NATIVE, 10)
    real, others = LocalStorage.remove, []

    def remove(self, path):
        monkeypatch.setattr(LocalStorage, "remove", real)
        others.append(unpin(storage, 10))
        real(self, path)

    monkeypatch.setattr(LocalStorage, "remove", remove)
    assert unpin(storage, 10) is False
    assert others == [True]


def test_a_pin_that_finds_the_step_in_the_trash_takes_no_other_pin_away(storage, monkeypatch):
    """Retention decides; two pins come; one is told that it holds, the other one meets the step in the trash."""
    commit(storage, 10, 20, 30)
    decided, renamed, rename, go_on = (threading.Event() for _ in range(4))
    looks = iter([(decided, rename), (renamed, go_on)])

    def check_lease():  # before each rename
        reached, let_go = next(looks, (None, None))
        if reached is not None and let_go is not None:
            reached.set()
            assert let_go.wait(30)

    def retention():
        found = catalog.scan(storage, NATIVE)
        apply_retention(storage, NATIVE, found, policy=Policy(newest=1), check_lease=check_lease)

    others = []

    def another_pin_then_the_rename():
        others.append(pin(storage, NATIVE, 10))
        rename.set()
        assert renamed.wait(30)

    real = LocalStorage.listdir

    def listdir(self, path):  # by a pin that looks into the trash
        names_there = real(self, path)
        if renamed.is_set():
            go_on.set()
        return names_there

    thread = threading.Thread(target=retention)
    thread.start()
    try:
        assert decided.wait(30)
        monkeypatch.setattr(LocalStorage, "listdir", listdir)
        at_pin(monkeypatch, after=another_pin_then_the_rename)
        assert pin(storage, NATIVE, 10) is True
        assert others == [False]
    finally:
        rename.set()
        go_on.set()
        thread.join()
    assert catalog.pinned_steps(storage) == {10}
    assert steps(catalog.scan(storage, NATIVE).committed()) == [10, 30]


# Timelines.


def fallback(storage, explicit):
    """Fell back to 20 while 30 existed; nothing of the new line is committed yet."""
    commit(storage, 10, 20, 30)
    catalog.write_root(storage, root_record(line(), line("next", "main", 20, explicit)))
    storage.rename("step-00000030", names.stale_dir(30, "next"))


def test_what_an_automatic_fallback_set_aside_goes_after_the_next_commit(storage):
    fallback(storage, explicit=False)
    assert retain(storage, newest=5) == []
    commit(storage, 25, timeline="next")
    assert retain(storage, newest=5) == [30]
    assert left(storage) == ["step-00000010", "step-00000020", "step-00000025"]


def test_what_an_automatic_fallback_set_aside_stays_while_it_is_pinned(storage):
    commit(storage, 10, 20, 30)
    pin(storage, NATIVE, 30)
    catalog.write_root(storage, root_record(line(), line("next", "main", 20)))
    storage.rename("step-00000030", names.stale_dir(30, "next"))
    commit(storage, 25, timeline="next")
    assert retain(storage, newest=5) == []
    assert names.stale_dir(30, "next") in left(storage)


def test_what_an_explicit_load_set_aside_stays_and_does_not_count(storage):
    fallback(storage, explicit=True)
    commit(storage, 25, timeline="next")
    assert retain(storage) == [10]
    assert left(storage) == ["step-00000020", "step-00000025", "step-00000030.stale-next"]


def test_an_abandoned_line_that_was_not_renamed_yet_neither_counts_nor_goes(storage):
    commit(storage, 10, 20, 30)
    catalog.write_root(storage, root_record(line(), line("next", "main", 10)))
    commit(storage, 15, timeline="next")
    assert retain(storage, newest=2) == []
    assert retain(storage, newest=1) == [10]
    assert steps(catalog.scan(storage, NATIVE).committed()) == [15, 20, 30]


# By the engine.


def train(root, losses, **settings):
    """One step for each loss, each committed."""
    model = torch.nn.Linear(1, 1)
    settings = {"save_storage_interval": 1, "max_ckpt_num": 1, "back_pressure": "wait"} | settings
    with easyckpt.Checkpointer(root, {"model": model}, **settings) as checkpointer:
        start = checkpointer.load().step
        for step, loss in enumerate(losses, start + 1):
            if loss is not None:
                checkpointer.log(loss=loss)
            checkpointer.save_if_needed(step)
            checkpointer.wait()


def test_a_job_keeps_what_its_settings_say(tmp_path):
    losses = [3.0, 0.5, float("nan"), 2.0, 1.0, 4.0, 5.0]
    train(tmp_path, losses, keep_every=4, keep_best=2, best_metric="loss")
    assert steps(catalog.scan(LocalStorage(tmp_path), NATIVE).committed()) == [2, 4, 5, 7]
    pin(LocalStorage(tmp_path), NATIVE, 5)
    train(tmp_path, [9.0], keep_best=1, best_metric="loss", best_mode="max")
    assert steps(catalog.scan(LocalStorage(tmp_path), NATIVE).committed()) == [5, 8]


def test_a_metric_that_is_never_logged_is_said_once(tmp_path, caplog):
    train(tmp_path, [3.0, 2.0, 1.0, 0.5], keep_best=1, best_metric="lss")
    assert caplog.text.count("none has a number under best_metric='lss'") == 1


def pinned_in_the_trash(storage, step):
    """What retention leaves that dies before it gives a step its name back that was pinned after the decision."""
    died, asked = RuntimeError("died"), []

    def dies_before_the_name_is_given_back():
        asked.append(None)
        if len(asked) == 1:
            assert pin(storage, NATIVE, step)
        if names.step_dir(step) not in storage.listdir("") and len(asked) > 2:
            raise died

    with pytest.raises(RuntimeError, match="died"):
        apply_retention(
            storage,
            NATIVE,
            catalog.scan(storage, NATIVE),
            policy=Policy(newest=1),
            check_lease=dies_before_the_name_is_given_back,
        )
    assert [entry.step for entry in catalog.scan(storage, NATIVE).of_kind("trash")] == [10, 20]


def by_retention(storage):
    retain(storage, newest=1)


def by_prune(storage):
    command = [sys.executable, "-m", "easyckpt", "prune", storage.root, "--keep", "1"]
    subprocess.run(command, check=True, capture_output=True)


def by_the_next_job(storage):
    with easyckpt.Checkpointer(storage.root, {"w": {"w": torch.zeros(1)}}, signals=()) as ckpt:
        ckpt.load(strict=False)
        ckpt.save(31, wait=True)


@pytest.mark.parametrize("emptied", [by_retention, by_prune, by_the_next_job])
def test_a_pinned_step_comes_back_out_of_the_trash_after_a_crash(storage, emptied):
    commit(storage, 10, 20, 30)
    pinned_in_the_trash(storage, 10)
    emptied(storage)
    assert 10 in steps(catalog.scan(storage, NATIVE).committed())
    assert not catalog.scan(storage, NATIVE).of_kind("trash")
    assert "step-00000020" not in left(storage)


def test_a_name_that_is_in_use_again_is_not_given_back(storage):
    commit(storage, 10, 20, 30)
    pinned_in_the_trash(storage, 10)
    commit(storage, 10)
    retain(storage, newest=1)
    assert left(storage) == ["step-00000010", "step-00000030"]


def test_what_was_half_deleted_does_not_come_back_for_a_pin_that_was_never_reported(storage):
    commit(storage, 10, 20, 30)
    pinned_in_the_trash(storage, 10)
    storage.remove(f"{catalog.scan(storage, NATIVE).of_kind('trash')[0].name}/rank-00000.safetensors")
    retain(storage, newest=1)
    assert left(storage) == ["step-00000030"]


def test_a_name_that_cannot_be_given_back_keeps_the_step_and_no_other(storage, monkeypatch):
    commit(storage, 10, 20, 30)
    pinned_in_the_trash(storage, 10)

    def broken(self, *_):
        raise OSError("no renames")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "rename", broken)
        with pytest.raises(OSError, match="no renames"):
            retain(storage, newest=1)
    assert steps(catalog.scan(storage, NATIVE).of_kind("trash")) == [10]
    retain(storage, newest=1)
    assert left(storage) == ["step-00000010", "step-00000030"]
