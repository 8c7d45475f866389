"""Lines of training: going back, by itself or when told to, and going on. Real processes, killed where it hurts.

The first start of a job makes steps 1 to 60 and commits 40, 50 and 60 (every tenth); the state tells by whom each of
its steps was made, so an abandoned line can be seen in whatever is restored.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from easyckpt import catalog
from easyckpt.format import layout
from easyckpt.storage.local import LocalStorage
from easyckpt.verification import verify
from tests.support.crashjob import Notes, Starts, leftovers
from tests.support.workplace import in_memory

SETTINGS = {"save_storage_interval": 10, "max_ckpt_num": 3}


class Root(Starts):
    """Starts with this module's settings; a job leaves without a word, as if killed, unless it is to `close`."""

    def go(self, steps: int, *, close: bool = False, **order) -> Notes:
        settings = SETTINGS | order.pop("settings", {})
        notes = self.start(steps=steps, plain=True, leave=not close, settings=settings, **order)
        for restored in notes.values("problem"):
            assert restored is None
        return notes

    @property
    def storage(self) -> LocalStorage:
        return LocalStorage(self.root)

    def committed(self) -> list[int]:
        return [entry.step for entry in catalog.scan(self.storage, layout.NativeNaming()).of_kind("committed")]

    def stale(self) -> list[int]:
        return [entry.step for entry in catalog.scan(self.storage, layout.NativeNaming()).of_kind("stale")]

    def rot(self, step: int) -> None:
        path = self.root / layout.step_dir(step) / layout.shard_file(0)
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)

    def tear_manifest(self, step: int) -> None:
        path = self.root / layout.step_dir(step) / layout.MANIFEST
        path.write_bytes(path.read_bytes()[:-40])

    def slots(self) -> list[Path]:
        return [path for path in self.memory_dir.iterdir() if not path.name.endswith((".owner", ".lock"))]


@pytest.fixture
def place() -> Iterator[Path]:
    with in_memory("lines") as directory:
        yield directory


@pytest.fixture
def root(place) -> Root:
    return fresh(place)


def fresh(place: Path) -> Root:
    shutil.rmtree(place / "job", ignore_errors=True)
    root = Root(place / "job", place / "job" / "memory")
    assert root.go(60).newest("durable") == 60
    assert root.committed() == [40, 50, 60]
    return root


def history(notes: Notes) -> Counter[int]:
    """How many steps of the restored state were made by which start."""
    return Counter(notes.restored["history"])


# By itself, since 50 and 60 are damaged.


def test_a_fallback_goes_on_past_the_damaged_steps_and_they_go_after_the_next_commit(root):
    root.rot(60)
    root.tear_manifest(50)
    root.wipe_memory()
    second = root.go(9)
    assert (second.restored["restored"], second.restored["tier"]) == (40, "storage")
    assert root.committed() == [40]
    assert root.stale() == [50, 60]  # nothing is deleted as long as nothing has taken its place
    third = root.go(6)
    assert history(third) == {1: 40, 2: 9}
    assert root.committed() == [40, 50]
    root.wipe_memory()
    fourth = root.go(2, close=True)
    assert history(fourth) == {1: 40, 2: 9, 3: 1}
    assert root.stale() == []
    assert root.committed() == [40, 50, 52]


def test_a_fallback_that_dies_before_its_first_commit_leaves_the_only_good_one(root):
    for step in (50, 60):
        root.rot(step)
    for _ in range(3):  # again and again
        root.wipe_memory()
        notes = root.go(9, settings={"max_ckpt_num": 1})
        assert (notes.restored["restored"], notes.restored["tier"]) == (40, "storage")
        assert root.committed() == [40]


def test_all_damaged_is_an_error_and_nothing_is_touched(root):
    for step in (40, 50, 60):
        root.rot(step)
    root.wipe_memory()
    notes = root.go(5)
    assert {note["raised"] for note in notes.all if "raised" in note} == {"DamagedCheckpoint"}
    assert root.committed() == [40, 50, 60]


def test_a_snapshot_in_memory_newer_than_every_whole_checkpoint_is_not_thrown_away(place):
    """The newest commit is rotten, memory holds a step before it: a clean end at once must make that one durable."""
    root = Root(place / "job", place / "job" / "memory")
    root.go(57)
    kept = place / "kept"
    kept.mkdir()
    for path in root.slots():
        shutil.copy2(path, kept)
    assert root.go(3).newest("durable") == 60
    root.rot(60)
    for path in root.slots():
        path.unlink()
    for path in kept.iterdir():
        shutil.copy2(path, root.memory_dir)
    notes = root.go(0, close=True)
    assert (notes.restored["restored"], notes.restored["tier"]) == (57, "memory")
    assert notes.values("closed") == [True]
    root.wipe_memory()
    assert root.go(1).restored["restored"] == 57


# Told to: load(step=40).


def test_after_an_explicit_step_back_the_steps_set_aside_stay(root):
    second = root.go(15, load_step=40)
    assert second.restored["restored"] == 40
    assert root.committed() == [40, 50]
    assert root.stale() == [50, 60]
    third = root.go(15)
    assert history(third) == {1: 40, 2: 15}
    root.wipe_memory()
    fourth = root.go(20, close=True)
    assert history(fourth) == {1: 40, 2: 15, 3: 15}
    assert root.stale() == [50, 60]
    assert root.committed() == [70, 80, 90]
    for entry in catalog.scan(root.storage, layout.NativeNaming()).of_kind("stale"):
        assert verify(root.storage, entry) == []


def test_an_explicit_step_back_without_training_on_changes_nothing(root):
    root.go(0, load_step=40, close=True)
    assert root.committed() == [40, 50, 60]
    again = root.go(1)
    assert history(again) == {1: 60}


def test_a_step_of_an_abandoned_line_cannot_be_asked_for(root):
    root.go(5, load_step=40)
    notes = root.go(0, load_step=60)
    assert {note["raised"] for note in notes.all if "raised" in note} == {"NoCheckpoint"}


def test_steps_back_from_steps_back_keep_each_line_apart(root):
    root.go(15, load_step=40)  # 41 to 55 by the second start, 50 committed
    root.go(15, load_step=50)  # 51 to 65 by the third, 60 committed
    fourth = root.go(1, load_step=60)
    assert history(fourth) == {1: 40, 2: 10, 3: 10}
    root.go(2, load_step=40)
    last = root.go(1)
    assert history(last) == {1: 40, 5: 2}


def test_the_memory_of_an_abandoned_line_is_never_resumed(root):
    """Steps 58 to 60 are in memory when the job is told to go back, and dies before its first snapshot."""
    assert root.go(5, load_step=40, armed="slot.seal.before=kill").killed
    assert history(root.go(1)) == {1: 40}


# A node that was away.


@pytest.mark.parametrize("beside", [False, True], ids=["in place of the new", "beside the new"])
def test_the_memory_of_a_node_that_was_away_is_not_resumed(root, place, beside):
    away = place / "away"
    away.mkdir()
    for path in root.slots():
        shutil.copy2(path, away)
    second = root.go(17, load_step=40)
    assert second.newest("durable") == 50
    new = root.slots()
    for number, path in enumerate(sorted(away.iterdir())):
        stem = path.name.rpartition(".")[0]
        shutil.copy2(path, root.memory_dir / (f"{stem}.{100 + number}" if beside else path.name))
    if not beside:
        for path in new:
            if not (away / path.name).exists():
                path.unlink()
    third = root.go(10)
    assert history(third) == ({1: 40, 2: 17} if beside else {1: 40, 2: 10})
    assert third.restored["tier"] == ("memory" if beside else "storage")


def test_the_memory_of_a_node_that_was_away_does_not_win_after_a_fallback(root, place):
    away = place / "away"
    away.mkdir()
    for path in root.slots():
        shutil.copy2(path, away)
    root.rot(60)
    root.rot(50)
    root.wipe_memory()
    assert root.go(12).newest("durable") == 50
    root.wipe_memory()
    for path in away.iterdir():
        shutil.copy2(path, root.memory_dir)
    assert history(root.go(1)) == {1: 40, 2: 10}


# Killed at each point of opening a line.


def points_of_opening(root: Root, **order) -> list[str]:
    """`name@n` for each failpoint from the beginning of the first save to the first snapshot."""
    count = root.directory / "count"
    root.go(1, count=str(count), **order)
    names = count.read_text().split()
    begin = names.index("line.open.before")
    end = names.index("slot.begin", begin)
    return [f"{name}@{names[: number + 1].count(name)}" for number, name in enumerate(names) if begin <= number < end]


def step_back(root: Root, explicit: bool) -> dict[str, int]:
    """What makes the next start go back to 40."""
    if explicit:
        return {"load_step": 40}
    root.rot(50)
    root.rot(60)
    root.wipe_memory()
    return {}


def crash_while_opening(place: Path, explicit: bool, armed: str) -> None:
    root = fresh(place)
    order = step_back(root, explicit)
    killed = root.go(9, armed=f"{armed}=kill", **order)
    assert killed.killed, f"{armed} was not hit"
    record = catalog.read_root(root.storage)
    assert record is not None
    opened = len(record.timelines) == 2
    again = root.go(11)
    if explicit and not opened:  # nothing had happened yet: the step back was only a wish
        assert history(again) == {1: 60}
        return
    assert history(again) == {1: 40}, "resumed from an abandoned line"
    assert root.committed() == [40, 50]
    assert root.stale() == ([50, 60] if explicit else [])
    assert leftovers(root.root) == []
    root.wipe_memory()
    assert history(root.go(1)) == {1: 40, 3: 10}


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "fallback"])
def test_a_kill_at_each_point_of_opening_a_line(place, explicit):
    root = fresh(place)
    points = points_of_opening(root, **step_back(root, explicit))
    assert {"line.open.before@1", "line.opened@1", "line.set_aside@1", "line.set_aside@2"} <= set(points)
    for point in [point for point in points if point.startswith("line.")]:  # all of them: make soak
        crash_while_opening(place, explicit, point)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "fallback"])
def test_a_kill_at_every_failpoint_of_opening_a_line(place, explicit, campaign_part):
    root = fresh(place)
    points = points_of_opening(root, **step_back(root, explicit))
    for point in points:
        crash_while_opening(place, explicit, point)
    campaign_part("timelines", seed=None, tests=2, kills=len(points))
