"""The arena: who owns it, what is taken over after a crash, which slot is written next, what is done without memory."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import signal
import threading
from pathlib import Path

import pytest
from support.arenas import ARENA, META, MIB, RUN, USER, make
from support.forked import Forked
from support.staged import until
from support.tmpfs import tmpfs

from easyckpt import failpoints
from easyckpt.distributed.ranks import Ranks
from easyckpt.errors import RootInUse, StorageError, UsageError
from easyckpt.format import memory_names
from easyckpt.memory.arena import Arena, OwnerLock, find_slots
from easyckpt.memory.header import HEADER_BYTES
from easyckpt.memory.private_slot import PrivateSlot
from easyckpt.memory.slot import Slot
from easyckpt.wiring import dead_peers

__all__ = ["tmpfs"]

WAIT = 60.0


def slot_path(directory, number: int, rank: int = 0, arena_id: str = ARENA) -> str:
    return os.path.join(str(directory), memory_names.slot_file(USER, arena_id, rank, number))


def write(slot: Slot, step: int, **fields) -> None:
    slot.begin()
    slot.image[:MIB] = bytes([step % 251]) * MIB
    slot.seal(dataclasses.replace(META, step=step, **fields), b"static", b"objects %d" % step)


def save(arena: Arena, step: int, keep_from: int | None, held=(), image_bytes: int = MIB) -> bool:
    slot = arena.acquire(step, image_bytes, keep_from, held)
    if slot is not None:
        write(slot, step)
    return slot is not None


def leave(directory, number: int, step: int, *, rank: int = 0, arena_id: str = ARENA, **fields) -> str:
    """A sealed slot as a dead process leaves it."""
    path = slot_path(directory, number, rank, arena_id)
    slot = Slot.create(path, MIB, 100)
    write(slot, step, rank=rank, arena_id=arena_id, **fields)
    slot.close(unlink=False)
    return path


@pytest.fixture
def directory(memory_dir):
    return memory_dir


@pytest.fixture
def arenas():
    """Makes arenas that are closed at the end."""
    with contextlib.ExitStack() as stack:

        def build(*args, **options) -> Arena:
            arena = make(*args, **options)
            stack.callback(arena.close, remove=True)
            return arena

        yield build


def prepared(arena: Arena, image_bytes: int = MIB) -> Arena:
    arena.ensure(image_bytes, 1000)
    assert arena.wait_ready(WAIT)
    return arena


def nbytes(arena: Arena) -> int:
    return sum(slot.nbytes for slot in arena._all())


def steps(arena: Arena) -> list[int]:
    return [meta.step for meta in arena.sealed()]


# Which slot is written next.


def test_a_slot_that_cannot_be_prepared_is_raised_once_and_tried_again(directory, arenas):
    arena = arenas(directory)
    failpoints.arm("supply.prepared@2=error:EIO")
    arena.ensure(MIB, 1000)
    with pytest.raises(StorageError, match=r"preparing snapshot slots failed: .*Input/output error"):
        arena.wait_ready(WAIT)
    assert arena.wait_ready(WAIT)
    assert all(save(arena, step, None) for step in (1, 2, 3))
    assert [path.name for path in directory.iterdir() if path.suffix == ".3"] == []  # what failed has left nothing


def test_a_thread_that_cannot_be_started_is_waited_for_by_nobody(memory_dir, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    arena = make(memory_dir)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            arena.ensure(MIB, MIB)
    arena.close(remove=True)


def test_a_failure_that_nobody_was_told_of_is_logged_at_the_end(directory, caplog):
    arena = make(directory)
    failpoints.arm("supply.prepared=error:EIO")
    arena.ensure(MIB, 1000)
    assert arena._supply.wait(WAIT)
    arena.close(remove=True)
    assert "preparing snapshot slots failed" in caplog.text


def test_slots_are_made_in_the_background(directory, arenas):
    arena = arenas(directory)
    assert arena.adopt() == []
    assert not arena.ready(MIB)
    assert arena.acquire(1, MIB, None, ()) is None
    prepared(arena)
    assert arena.ready(MIB)
    assert not arena.ready(MIB + 4096)
    assert arena.count == 3
    assert arena.survives
    files = sorted(name for name in os.listdir(directory) if memory_names.is_arena_file(name))
    slots = [memory_names.slot_file(USER, ARENA, 0, number) for number in range(3)]
    assert files == sorted([memory_names.owner_file(USER, ARENA, 0), *slots])
    assert nbytes(arena) == sum(os.stat(slot_path(directory, number)).st_size for number in range(3))


def test_only_slots_that_nobody_needs_are_given(directory, arenas):
    arena = prepared(arenas(directory))
    assert all(save(arena, step, None) for step in (1, 2, 3))
    assert steps(arena) == [1, 2, 3]
    assert arena.acquire(4, MIB, None, ()) is None  # no floor is known: nothing may go
    assert arena.acquire(4, MIB, 1, ()) is None
    assert arena.acquire(4, MIB, 3, {1, 2}) is None
    slot = arena.acquire(4, MIB, 3, {1})
    assert slot.meta.step == 2
    assert steps(arena) == [1, 2, 3]  # until it is begun, the older snapshot stays
    slot.begin()
    assert steps(arena) == [1, 3]
    slot.clear()
    arena.release(slot)
    assert save(arena, 4, None)
    assert steps(arena) == [1, 3, 4]
    assert arena.acquire(5, MIB, 9, ()).meta.step == 1  # the oldest first


def test_a_slot_that_no_flush_needs_is_never_touched(directory, arenas):
    """First touch of a snapshot's memory costs far more than the copy; two whole snapshots stay all the same."""
    arena = prepared(arenas(directory, 4))
    for step in range(1, 11):
        assert save(arena, step, step - 1)
        assert steps(arena)[-2:] == [step - 1, step][-min(step, 2) :]
    assert steps(arena) == [8, 9, 10]
    for step in range(11, 21):  # a flush of 10 takes until then: the fourth comes in
        slot = arena.acquire(step, MIB, step - 1, {10})
        assert slot is not None
        assert {step - 1, step - 2, 10} <= set(steps(arena))
        write(slot, step)
    assert steps(arena) == [10, 18, 19, 20]
    for step in range(21, 31):
        assert save(arena, step, step - 1)
        assert len(steps(arena)) == 4
        assert steps(arena)[-2:] == [step - 1, step]
    assert steps(arena)[0] == 10  # written over when it is needed, not in turn with the others


def test_a_slot_whose_snapshot_was_given_up_is_written_before_one_never_touched(directory, arenas):
    arena = prepared(arenas(directory))
    assert save(arena, 1, None)
    torn = arena.acquire(2, MIB, 1, ())
    assert torn is not None
    torn.begin()
    arena.release(torn)
    assert arena.acquire(3, MIB, 1, ()) is torn


def test_a_slot_is_given_to_one_only(directory, arenas):
    arena = prepared(arenas(directory, 2))
    first, second = (arena.acquire(step, MIB, 9, ()) for step in (1, 2))
    assert first is not None
    assert second is not None
    assert first is not second
    assert arena.acquire(3, MIB, 9, ()) is None
    first.begin()
    assert arena.acquire(3, MIB, 9, ()) is None
    first.seal(dataclasses.replace(META, step=1), b"", b"")
    assert arena.acquire(3, MIB, 1, ()) is None
    assert arena.acquire(3, MIB, 2, ()) is first
    arena.release(second)
    assert arena.acquire(4, MIB, None, ()) is second


def test_a_slot_is_its_writers_alone_until_it_is_wholly_sealed(directory, arenas, monkeypatch):
    arena = prepared(arenas(directory, 1))
    save(arena, 1, None)
    slot = arena.acquire(2, MIB, 2, ())
    meta, store = Slot.meta.fget, Slot._store

    def begun_once_it_was_looked_at(looked_at):
        seen = meta(looked_at)
        if not slot.writing:
            slot.begin()
        return seen

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "meta", property(begun_once_it_was_looked_at))
        assert arena.acquire(3, MIB, 9, ()) is None
    given = []

    def looked_for_when_stored(stored, *word):
        store(stored, *word)
        given.append(arena.acquire(3, MIB, 2, ()))

    monkeypatch.setattr(Slot, "_store", looked_for_when_stored)
    slot.seal(dataclasses.replace(META, step=2), b"static", b"objects")
    assert given == [None]
    assert steps(arena) == [2]


def test_release_of_a_half_written_slot_gives_it_up(directory, arenas):
    arena = prepared(arenas(directory, 1))
    slot = arena.acquire(1, MIB, None, ())
    slot.begin()
    arena.release(slot)
    assert steps(arena) == []
    assert arena.acquire(2, MIB, None, ()) is slot
    slot.begin()
    slot.seal(dataclasses.replace(META, step=2), b"", b"")
    arena.release(slot)  # a second time, or after the seal: nothing is lost
    assert steps(arena) == [2]


def test_release_without_a_begin_keeps_the_older_snapshot(directory, arenas):
    arena = prepared(arenas(directory, 1))
    save(arena, 1, None)
    slot = arena.acquire(2, MIB, 2, ())
    arena.release(slot)
    assert steps(arena) == [1]
    assert arena.view(1, "t1").image == bytes([1]) * MIB


def test_view_and_drop(directory, arenas):
    arena = prepared(arenas(directory))
    for step in (1, 2, 3):
        save(arena, step, None)
    view = arena.view(2, "t1")
    assert (view.objects, view.image[0]) == (b"objects 2", 2)
    for step, timeline in ((4, "t1"), (2, "t2")):
        with pytest.raises(UsageError, match=f"step {step} on timeline {timeline}"):
            arena.view(step, timeline)
    assert [meta.step for meta in arena.drop(lambda meta: meta.step > 1)] == [2, 3]
    assert steps(arena) == [1]
    assert not view.still_sealed()
    assert save(arena, 5, None)


def test_a_snapshot_is_found_while_training_begins_to_write_over_another(directory, arenas, monkeypatch):
    arena = prepared(arenas(directory))
    for step in (1, 2, 3):
        save(arena, step, None)
    meta = Slot.meta.fget

    def begun_once_it_was_looked_at(slot):
        seen = meta(slot)
        if seen is not None and seen.step == 1:
            slot.begin()
        return seen

    monkeypatch.setattr(Slot, "meta", property(begun_once_it_was_looked_at))
    assert arena.view(3, "t1").objects == b"objects 3"


def test_many_snapshots_leave_files_and_threads_flat(directory, arenas):
    arena = prepared(arenas(directory, 2))
    before = (len(os.listdir("/proc/self/fd")), sorted(os.listdir(directory)), threading.active_count())
    for step in range(300):
        assert save(arena, step, step - 1)
    assert (len(os.listdir("/proc/self/fd")), sorted(os.listdir(directory)), threading.active_count()) == before


# Growing.


def test_growth_of_the_image_keeps_what_is_needed(directory, arenas):
    arena = prepared(arenas(directory))
    for step in (1, 2, 3):
        save(arena, step, None)
    prepared(arena, 3 * MIB)
    assert steps(arena) == [1, 2, 3]  # all slots hold something: none can grow yet
    assert arena.acquire(4, 3 * MIB, 3, {2}) is None  # but now 1 is given up
    assert arena.wait_ready(WAIT)
    assert steps(arena) == [2, 3]
    slot = arena.acquire(4, 3 * MIB, 3, {2})
    assert slot.image_capacity == 3 * MIB
    write(slot, 4, image_bytes=3 * MIB)
    assert steps(arena) == [2, 3, 4]
    assert arena.view(2, "t1").image == bytes([2]) * MIB
    assert arena.acquire(5, 3 * MIB, 9, ()) is slot


def test_growth_waits_for_room_within_the_budget(directory, arenas):
    slot_bytes = HEADER_BYTES + MIB + 4096
    arena = prepared(arenas(directory, budget_bytes=3 * slot_bytes + MIB))
    for step in (1, 2, 3):
        save(arena, step, None)
    prepared(arena, MIB + MIB // 2)
    assert arena.count == 2
    peak = 0
    for step in range(4, 30):
        save(arena, step, step - 1, image_bytes=MIB + MIB // 2)
        arena.wait_ready(WAIT)
        peak = max(peak, nbytes(arena))
    assert peak <= 3 * slot_bytes + MIB
    assert steps(arena) == [28, 29]
    assert all(arena.view(step, "t1").image[0] == step for step in (28, 29))


@pytest.mark.parametrize(("budget_images", "most_skips"), [(1000, 12), (32, 40)])
def test_what_grows_at_each_step_is_not_skipped_at_each_step(directory, arenas, budget_images, most_skips):
    arena = prepared(arenas(directory, budget_bytes=budget_images * MIB))
    skipped = 0
    for step in range(1, 81):
        image_bytes = MIB + step * MIB // 16
        if not arena.ready(image_bytes):
            arena.ensure(image_bytes, 4096)
        skipped += not save(arena, step, step - 1, image_bytes=image_bytes)
        assert arena.wait_ready(WAIT)
        assert nbytes(arena) <= budget_images * MIB
    assert skipped <= most_skips
    assert steps(arena)[-1] >= 75


def test_a_smaller_layout_uses_the_larger_slots(directory, arenas):
    arena = prepared(arenas(directory, 2), 2 * MIB)
    before = nbytes(arena)
    prepared(arena, MIB)
    assert nbytes(arena) == before
    assert save(arena, 1, None)


def test_larger_slots_of_before_count_in_the_budget(directory, arenas):
    larger = Slot.create(slot_path(directory, 0), 4 * MIB, 100)
    write(larger, 1)
    larger.close(unlink=False)
    arena = arenas(directory, 4, budget_bytes=6 * MIB)
    arena.adopt()
    prepared(arena, MIB)
    assert 5 * MIB < sum(path.stat().st_size for path in directory.iterdir()) <= 6 * MIB


class Gate:
    """Holds the making of each slot up until it is let through, or the gate is opened."""

    def __init__(self, monkeypatch) -> None:
        self._passes, self._waiting, self._open = 0, 0, False
        self._changed = threading.Condition()
        populate = Slot.populate

        def slowly(slot, *arguments, **options):
            with self._changed:
                self._waiting += 1
                self._changed.wait_for(lambda: self._passes or self._open)
                self._waiting -= 1
                self._passes -= not self._open
            populate(slot, *arguments, **options)

        monkeypatch.setattr(Slot, "populate", slowly)

    def let_one_through(self, arena: Arena) -> None:
        with self._changed:
            if not self._waiting:
                return
            self._passes += 1
            self._changed.notify_all()
        until(lambda: not self._passes and (self._waiting or arena._supply.wait(0)))

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()


@pytest.mark.parametrize("seed", range(8))
def test_what_has_grown_many_times_while_slots_were_being_made_is_snapshotted_again(
    directory, arenas, monkeypatch, seed
):
    odd = random.Random(seed)
    arena, gate = arenas(directory, 4), Gate(monkeypatch)
    image_bytes, step = MIB, 0

    def next_step() -> None:
        nonlocal step
        step += 1
        if not arena.ready(image_bytes):
            arena.ensure(image_bytes, 4096)
        save(arena, step, max(steps(arena), default=None), image_bytes=image_bytes)

    try:
        for _ in range(60):
            image_bytes += odd.choice((0, 0, 1, 2)) * MIB // 100
            next_step()
            for _ in range(odd.choice((0, 0, 1, 2))):
                gate.let_one_through(arena)
    finally:
        gate.open()
    for _ in range(10):
        next_step()
        assert arena.wait_ready(WAIT)
    assert steps(arena)[-3:] == [step - 2, step - 1, step]


def test_budget_bounds_the_number_of_slots(directory, arenas, caplog):
    arena = prepared(arenas(directory, 4, budget_bytes=2 * (MIB + 8192) + 4096))
    assert arena.count == 2
    assert arena.survives
    assert "2 snapshot slots instead of 4" in caplog.text
    assert "no new snapshots" in caplog.text
    assert len([name for name in os.listdir(directory) if memory_names.is_arena_file(name)]) == 3


# After a crash.


def test_adopted_snapshots_are_whole_and_their_slots_are_used_again(directory, arenas):
    leave(directory, 0, 11)
    leave(directory, 1, 10)
    half = Slot.create(slot_path(directory, 2), MIB, 100)
    half.begin()
    half.close(unlink=False)
    arena = arenas(directory)
    views = arena.adopt()
    assert [view.meta.step for view in views] == [10, 11]
    assert [view.objects for view in views] == [b"objects 10", b"objects 11"]
    assert all(view.image == bytes([view.meta.step]) * MIB for view in views)
    assert views[0].meta.incarnation == "first"
    assert steps(arena) == [10, 11]
    prepared(arena)
    assert save(arena, 12, 10)  # into the slot that was left half-written
    assert steps(arena) == [10, 11, 12]
    assert save(arena, 13, 11)
    assert steps(arena) == [11, 12, 13]
    assert len(find_slots(str(directory), USER)) == 3


def test_slots_of_another_size_are_adopted_then_replaced(directory, arenas):
    leave(directory, 0, 10)
    arena = arenas(directory, 2)
    assert [view.meta.step for view in arena.adopt()] == [10]
    prepared(arena, 4 * MIB)
    assert save(arena, 11, 10, image_bytes=4 * MIB)
    assert steps(arena) == [10, 11]
    assert not save(arena, 12, 11, image_bytes=4 * MIB)
    assert arena.wait_ready(WAIT)
    assert save(arena, 12, 11, image_bytes=4 * MIB)
    assert steps(arena) == [11, 12]


def test_more_slots_than_wanted_shrink(directory, arenas):
    for number in range(4):
        leave(directory, number, 10 + number)
    arena = arenas(directory, 2)
    assert len(arena.adopt()) == 4
    prepared(arena)
    assert steps(arena) == [10, 11, 12, 13]
    assert save(arena, 14, 13)
    assert arena.wait_ready(WAIT)
    assert len(find_slots(str(directory), USER)) == 2
    assert steps(arena) == [13, 14]


def test_found_by_their_headers_never_by_their_names(directory, arenas):
    moved = slot_path(directory, 0, rank=5)
    os.rename(leave(directory, 0, 10), moved)
    foreign = [
        leave(directory, 1, 20, run="cd" * 16),
        leave(directory, 2, 21, rank=1),
        leave(directory, 3, 22, arena_id=memory_names.arena_id(RUN, "/a/copied/root")),
    ]
    os.rename(foreign[1], slot_path(directory, 2))
    foreign[1] = slot_path(directory, 2)
    contents = [Path(path).read_bytes() for path in foreign]
    arena = arenas(directory, 3)
    assert [view.meta.step for view in arena.adopt()] == [10]
    prepared(arena)
    for step in range(30, 36):
        assert save(arena, step, step - 1)
    arena.close(remove=True)
    assert [Path(path).read_bytes() for path in foreign] == contents


def test_damaged_slots_of_this_arena_are_named_and_replaced(directory, arenas, caplog):
    damaged = leave(directory, 0, 10)
    with open(damaged, "r+b") as file:
        file.seek(100)
        file.write(b"?")
    rotten = leave(directory, 1, 11)
    with open(rotten, "r+b") as file:
        file.seek(HEADER_BYTES + MIB + 8)
        file.write(b"?")
    empty = slot_path(directory, 2)
    os.close(os.open(empty, os.O_CREAT | os.O_WRONLY, 0o600))
    leave(directory, 3, 12)
    arena = arenas(directory, 4)
    assert [view.meta.step for view in arena.adopt()] == [12]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for path in (damaged, rotten, empty):
        assert any(path in warning for warning in warnings)
        assert not os.path.exists(path)
    prepared(arena)
    assert all(save(arena, step, None) for step in (13, 14, 15))


def test_what_others_own_is_never_touched(directory, arenas, caplog):
    """Damaged, linked, open to others, another user's, newer: each is left exactly as it is, and worked around."""
    victim = os.path.join(directory, "victim")
    with open(victim, "wb") as file:
        file.write(b"precious")
    os.symlink(victim, slot_path(directory, 0))
    os.chmod(leave(directory, 1, 10), 0o666)
    os.link(leave(directory, 2, 11), os.path.join(directory, "second name"))
    other_rank = leave(directory, 0, 12, rank=1)
    with open(other_rank, "r+b") as file:
        file.write(b"garbage!")
    newer = leave(directory, 3, 13)
    with open(newer, "r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(4, "little"))
    os.mkfifo(slot_path(directory, 4), 0o600)
    os.mkdir(slot_path(directory, 5))
    if os.geteuid() == 0:
        os.chown(leave(directory, 6, 14), 4242, 4242)

    def everything():
        found = {}
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            found[name] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns)
        return found

    before = everything()
    arena = arenas(directory, 2)
    assert arena.adopt() == []
    prepared(arena)
    assert save(arena, 20, None)
    arena.close(remove=True)
    assert everything() == before
    with open(victim, "rb") as file:
        assert file.read() == b"precious"
    for number in (0, 1, 2, 3, 4, 5, *((6,) if os.geteuid() == 0 else ())):
        assert slot_path(directory, number) in caplog.text


def test_find_slots_reports_everything(directory, arenas):
    leave(directory, 0, 10)
    leave(directory, 1, 11, rank=1)
    with open(leave(directory, 2, 12), "r+b") as file:
        file.write(b"?")
    Slot.create(slot_path(directory, 3), MIB, 1).close(unlink=False)
    arenas(directory)
    found = dict(find_slots(str(directory), USER))
    assert found[slot_path(directory, 0)].step == 10
    assert found[slot_path(directory, 1, rank=1)].rank == 1
    assert "not a snapshot slot" in found[slot_path(directory, 2)]
    assert "not sealed" in found[slot_path(directory, 3)]
    assert len(found) == 4
    assert find_slots(str(directory), "somebody") == []
    assert len(find_slots(str(directory), None)) == 4
    assert find_slots(str(directory / "nowhere"), USER) == []


# Real processes that are killed.


def job(directory, child: Forked, *, remove: bool = False, orphan: bool = False) -> None:
    """Adopts, saves steps 100 to 105, says each, then waits to be told to close."""
    arena = make(directory, 3)
    arena.adopt()
    prepared(arena)
    if orphan:
        grandchild = os.fork()
        if grandchild == 0:
            signal.pause()
        child.say(f"grandchild {grandchild}")
    for step in range(100, 106):
        assert save(arena, step, step - 1), step
        child.say(step)
    child.say("ready")
    child.wait_for_go()
    arena.close(remove=remove)


def test_killed_between_saves(directory, arenas):
    owner = os.path.join(directory, memory_names.owner_file(USER, ARENA, 0))
    with Forked(lambda child: job(directory, child)) as child:
        assert child.read("ready")[-1] == "ready"
        assert OwnerLock.is_free(owner) is False
        with pytest.raises(RootInUse, match=f"rank 0 of this run belongs to the live process {child.pid} "):
            make(directory)
        assert child.kill() == -signal.SIGKILL
    assert OwnerLock.is_free(owner) is True
    arena = arenas(directory)
    assert [view.meta.step for view in arena.adopt()] == [103, 104, 105]


CRASHES = sorted(
    name for name in failpoints.NAMES if name.startswith(("slot.", "arena.", "supply.")) and name != "slot.clear"
)


@pytest.mark.parametrize("point", CRASHES)
def test_killed_at_every_failpoint_the_newest_whole_snapshots_are_there(directory, arenas, point):
    """The third save dies at `point`, or what comes before or after the saves."""
    count = 3 if point.startswith("slot.seal") or point == "slot.begin" else 1
    with Forked(lambda child: job(directory, child, remove=True), f"{point}@{count}=kill") as child:
        child.go()
        said = child.read()
        status = child.wait()
    if status == 0:
        assert point in ("slot.seal.grow", "slot.seal.static", "supply.removed")  # (not hit three times here)
        return
    assert status == -signal.SIGKILL
    done = [int(line) for line in said if line.isdigit()]
    arena = arenas(directory)
    views = arena.adopt()
    expected = done[-3:] if point != "arena.removing" else []
    if point == "slot.seal.after":
        expected = [*done, done[-1] + 1]
    assert [view.meta.step for view in views] == expected
    for view in views:
        assert view.image == bytes([view.meta.step]) * MIB
        assert view.objects == b"objects %d" % view.meta.step
    prepared(arena)
    assert all(save(arena, 200 + step, 199 + step) for step in range(4))
    assert arena.count == 3
    assert len(find_slots(str(directory), USER)) == 3


def test_an_orphaned_grandchild_does_not_hold_the_arena(tmpfs, arenas):
    with Forked(lambda child: job(tmpfs, child, orphan=True)) as child:
        grandchild = int(child.read("ready")[0].split()[1])
        try:
            assert child.kill() == -signal.SIGKILL
            os.kill(grandchild, 0)  # it lives
            arena = arenas(tmpfs)
            assert [view.meta.step for view in arena.adopt()] == [103, 104, 105]
            prepared(arena)
            assert save(arena, 106, 105)
            arena.close(remove=True)
            space = os.statvfs(tmpfs)
            assert space.f_bavail == space.f_blocks  # nor does it keep the memory
            os.kill(grandchild, 0)
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_forked_child_is_inert(directory, arenas):
    arena = prepared(arenas(directory))
    save(arena, 1, None)
    read, written = os.pipe()
    arena._lock.acquire()  # as if another thread held it at the fork
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert arena.sealed() == []
            assert arena.acquire(2, MIB, 9, ()) is None
            assert not arena.ready(MIB)
            assert arena.wait_ready(1) is False
            assert arena.drop(lambda _: True) == []
            assert arena.adopt() == []
            arena.ensure(2 * MIB, 10)
            with pytest.raises(UsageError):
                arena.view(1, "t1")
            arena.close(remove=True)
            assert OwnerLock.is_free(arena._owner.path) is False
            with pytest.raises(RootInUse):
                make(directory)
            status = 0
        finally:
            os._exit(status)
    arena._lock.release()
    assert os.waitpid(child, 0)[1] == 0
    os.close(read)
    os.close(written)
    assert steps(arena) == [1]
    assert OwnerLock.is_free(arena._owner.path) is False
    assert save(arena, 2, None)


# Ownership.


def test_two_arenas_of_one_process_cannot_share(directory, arenas):
    arena = arenas(directory)
    with pytest.raises(RootInUse):
        make(directory)
    other = arenas(directory, rank=1)
    other.close(remove=True)
    arena.close(remove=False)
    arenas(directory)


def test_asking_does_not_lose_the_lock(directory):
    path = str(directory / "owner")
    lock = OwnerLock(path)
    assert OwnerLock.is_free(path) is None
    assert lock.try_acquire()
    assert lock.held
    assert not lock.try_acquire()
    assert not OwnerLock(path).try_acquire()
    assert OwnerLock.is_free(path) is False

    def others_see() -> str:
        with Forked(lambda child: child.say(OwnerLock.is_free(path))) as child:
            return child.read()[0]

    assert others_see() == "False"
    lock.release()
    assert others_see() == "True"
    assert OwnerLock.is_free(path) is True
    assert not lock.held
    assert lock.try_acquire()
    lock.release(unlink=True)
    assert OwnerLock.is_free(path) is None


def test_a_lock_on_a_removed_file_is_not_taken_for_the_lock(directory, monkeypatch):
    path = str(directory / "owner")
    opened = OwnerLock._open
    removed = []

    def open_then_lose(self):
        fd = opened(self)
        if not removed:
            os.unlink(path)
            removed.append(True)
        return fd

    monkeypatch.setattr(OwnerLock, "_open", open_then_lose)
    lock = OwnerLock(path)
    assert lock.try_acquire()
    assert os.path.exists(path)
    assert OwnerLock.is_free(path) is False
    lock.release(unlink=True)


def test_an_owner_file_that_is_not_ours_is_refused(directory):
    path = os.path.join(directory, memory_names.owner_file(USER, ARENA, 0))
    os.symlink("/etc/hostname", path)
    with pytest.raises(StorageError, match="symbolic link"):
        make(directory)
    assert OwnerLock.is_free(path) is None
    os.unlink(path)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    os.chmod(path, 0o666)
    with pytest.raises(StorageError, match="others may open it"):
        make(directory)
    assert OwnerLock.is_free(path) is None


# Too little memory.


def test_small_shared_memory_falls_back_to_private_memory(tmpfs, arenas, caplog):
    arena = arenas(tmpfs, 2, budget_bytes=1 << 40, private_budget_bytes=1 << 40)
    prepared(arena, 65 * MIB)
    assert arena.count == 2
    assert not arena.survives
    assert "do not survive the death of this process" in caplog.text
    assert "shm-size" in caplog.text
    assert save(arena, 1, None, image_bytes=65 * MIB)
    assert save(arena, 2, 1, image_bytes=65 * MIB)
    assert steps(arena) == [1, 2]
    assert arena.view(2, "t1").image == bytes([2]) * MIB
    assert [name for name in os.listdir(tmpfs) if not name.endswith("owner")] == []


def test_small_shared_memory_gives_fewer_slots(tmpfs, arenas, caplog):
    arena = prepared(arenas(tmpfs, 4, budget_bytes=1 << 40), 25 * MIB)
    assert arena.count == 2
    assert arena.survives
    assert "2 snapshot slots instead of 4" in caplog.text
    assert all(save(arena, step, step - 1) for step in range(5))


def test_budget_too_small_for_shared_memory(directory, arenas, caplog):
    arena = prepared(arenas(directory, budget_bytes=MIB // 2, private_budget_bytes=3 * MIB))
    assert not arena.survives
    assert arena.count == 2
    assert "2 snapshot slots instead of 3" in caplog.text
    assert save(arena, 1, None)


def test_no_memory_at_all_leaves_blocking_saves(directory, arenas, caplog):
    arena = prepared(arenas(directory, budget_bytes=MIB // 2, private_budget_bytes=MIB // 2))
    assert arena.count == 0
    assert not arena.ready(MIB)
    assert arena.acquire(1, MIB, None, ()) is None
    assert "every save blocks" in caplog.text


def test_without_a_directory(tmp_path, arenas, caplog):
    arena = arenas(tmp_path / "nowhere", private_budget_bytes=1 << 30)
    assert arena.adopt() == []
    prepared(arena)
    assert arena.count == 3
    assert not arena.survives
    assert isinstance(arena.acquire(1, MIB, None, ()), PrivateSlot)
    assert "is not a directory" in caplog.text


def test_private_memory_is_measured_by_default(directory, arenas):
    assert prepared(arenas(directory, budget_bytes=0)).count == 3


def test_room_that_older_slots_free_is_used_before_private_memory(tmpfs, arenas):
    """Shared memory is full of slots that are too small by now: they make room one after another."""
    arena = prepared(arenas(tmpfs, 3, budget_bytes=1 << 40), 20 * MIB)
    assert all(save(arena, step, None) for step in (1, 2, 3))
    prepared(arena, 27 * MIB)
    assert not save(arena, 4, 2, image_bytes=27 * MIB)  # 1 is given up; its room alone is too little
    assert arena.wait_ready(WAIT)
    assert arena.survives
    for step in range(5, 12):
        save(arena, step, max(3, step - 1), image_bytes=27 * MIB)
        assert arena.wait_ready(WAIT)
    assert arena.survives
    assert arena.count == 2
    assert steps(arena) == [10, 11]


# Errors and the end.


def test_errors_of_the_background_work_are_raised_by_the_next_call(directory, arenas):
    failpoints.arm("slot.create=error:EIO")
    try:
        arena = arenas(directory)
        arena.ensure(MIB, 1)
        with pytest.raises(StorageError, match="preparing snapshot slots failed"):
            arena.wait_ready(WAIT)
    finally:
        failpoints.arm("")
    prepared(arena)  # and then it goes on
    assert arena.count == 3


def test_close_keeps_or_removes(directory):
    arena = prepared(make(directory))
    save(arena, 1, None)
    arena.close(remove=False)
    arena.close(remove=True)  # closed is closed
    again = make(directory)
    assert [view.meta.step for view in again.adopt()] == [1]
    again.close(remove=True)
    assert os.listdir(directory) == []
    for call in (lambda: again.ensure(1, 1), lambda: again.acquire(1, 1, None, ())):
        with pytest.raises(UsageError, match="closed"):
            call()
    assert again.sealed() == []


def test_close_does_not_wait_for_all_slots(directory):
    arena = make(directory, 50)
    arena.ensure(4 * MIB, 1)
    arena.close(remove=True)
    assert os.listdir(directory) == []


def test_pinning(directory, arenas, monkeypatch, caplog):
    from easyckpt.memory import pinned

    leave(directory, 0, 5)
    calls = []
    monkeypatch.setattr(pinned, "register", lambda address, nbytes: calls.append(nbytes) or True)
    monkeypatch.setattr(pinned, "unregister", lambda _: calls.append(-1))
    arena = arenas(directory, 2, pin=True)
    views = arena.adopt()
    prepared(arena)
    assert calls == [MIB, MIB]  # the adopted one, too
    del views
    arena.close(remove=True)
    assert calls == [MIB, MIB, -1, -1]


def test_pinning_that_fails_is_a_warning(directory, arenas, monkeypatch, caplog):
    from easyckpt.memory import pinned

    def refuse(address, nbytes):
        raise StorageError("locked memory is short")

    monkeypatch.setattr(pinned, "register", refuse)
    arena = prepared(arenas(directory, 2, pin=True))
    assert arena.count == 2
    assert caplog.text.count("locked memory is short") == 1


def test_only_ranks_that_share_this_memory_can_be_found_dead_in_it(memory_dir):
    """What an earlier start has left here of a rank that runs on another node now says nothing about that one."""
    arena_id = memory_names.arena_id("0" * 32, "/run")
    arena = Arena(str(memory_dir), "u", arena_id, 0, 1, run="0" * 32, incarnation="1" * 8, budget_bytes=1 << 20)
    for rank in (1, 3):
        left = OwnerLock(os.path.join(memory_dir, memory_names.owner_file("u", arena_id, rank)))
        assert left.try_acquire()
        left.release()
    ranks = Ranks(0, 4, 0, 2, neighbours=(1,))
    assert dead_peers(arena, ranks) == [1]
    arena.close(remove=True)
