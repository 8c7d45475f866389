"""Rotation: what goes, what never does, and what a crash or an error in the middle leaves."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import line, make_view, root_record, write_checkpoint

from easyckpt import catalog, failpoints
from easyckpt.catalog import Entry
from easyckpt.format import layout as names
from easyckpt.format.manifest import Manifest
from easyckpt.saving.retention import apply_retention, keep, pinned_steps
from easyckpt.storage.local import LocalStorage

NATIVE = names.NativeNaming()


def entry(step, kind="committed", problem=None):
    manifest = Manifest(run="a" * 32, timeline="main", step=step, world_size=1, attempt="t", created=1.0, files={})
    return Entry(step=step, name=f"{kind}{step}", kind=kind, manifest=manifest, problem=problem, timeline="main")


def steps(entries):
    return [entry.step for entry in entries]


@pytest.fixture(autouse=True)
def nothing_armed():
    yield
    failpoints.arm("")


@pytest.fixture
def storage(tmp_path):
    storage = LocalStorage(tmp_path / "root")
    catalog.write_root(storage, root_record())
    return storage


def commit(storage, *wanted, timeline="main"):
    for step in wanted:
        write_checkpoint(storage, make_view({"w": torch.tensor([step])}, step=step, timeline=timeline))


def retain(storage, newest=2, **settings):
    return steps(apply_retention(storage, NATIVE, catalog.scan(storage, NATIVE), newest=newest, **settings))


def left(storage):
    return [name for name in storage.listdir("") if name not in (names.ROOT_FILE, names.PINS)]


# The pure policy.


def test_the_newest_by_step_number_stay_whatever_their_order():
    assert steps(keep([entry(30), entry(9), entry(100), entry(20)], newest=2)) == [9, 20]


def test_none_keeps_all():
    assert keep([entry(1), entry(2)], newest=None) == []


def test_pinned_steps_stay_and_do_not_count():
    assert steps(keep([entry(1), entry(2), entry(3), entry(4)], newest=2, pinned={2, 4})) == []
    assert steps(keep([entry(1), entry(2), entry(3), entry(4)], newest=1, pinned={4})) == [1, 2]


def test_held_steps_stay_as_long_as_they_are_held():
    assert steps(keep([entry(1), entry(2), entry(3)], newest=1, held={1})) == [2]


def test_only_valid_committed_ones_count():
    mixed = [entry(1), entry(2), entry(3, problem="torn"), entry(4, "stale"), entry(5, "temporary"), entry(6, "trash")]
    assert steps(keep(mixed, newest=2)) == []
    assert steps(keep(mixed, newest=1)) == [1]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.sampled_from(["committed", "stale", "temporary", "trash"]),
            st.sampled_from([None, "torn"]),
        ),
        unique_by=lambda item: item[0],
    ),
    st.integers(0, 5),
    st.sets(st.integers(0, 40)),
    st.sets(st.integers(0, 40)),
)
def test_whatever_the_numbers_the_newest_valid_and_the_protected_stay(items, newest, pinned, held):
    entries = [entry(*item) for item in items]
    going = keep(entries, newest=newest, pinned=pinned, held=held)
    valid = [e for e in entries if e.kind == "committed" and e.problem is None]
    assert all(e in valid for e in going)
    assert not {e.step for e in going} & (pinned | held)
    if valid:
        assert max(valid, key=lambda e: e.step) not in going
    assert len([e for e in valid if e not in going and e.step not in pinned]) >= min(
        newest, len([e for e in valid if e.step not in pinned])
    )


# On storage.


def test_old_ones_go_for_good(storage):
    commit(storage, 10, 20, 30, 40)
    assert retain(storage) == [10, 20]
    assert left(storage) == ["step-00000030", "step-00000040"]


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
    assert pinned_steps(storage) == {10}
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
