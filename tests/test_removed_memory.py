"""Files of the memory tier that somebody removes under a running job, as systemd-logind does at a logout."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from easyckpt.errors import RootInUse
from easyckpt.format import memory_names
from easyckpt.memory.adoption import find_slots
from easyckpt.memory.arena import Arena
from easyckpt.memory.header import SlotMeta
from easyckpt.memory.owner import OwnerLock
from tests.support import jobs
from tests.support.arenas import ARENA, META, MIB, USER, make
from tests.support.forked import Forked


@pytest.fixture(params=[1, 2, 4])
def arena(memory_dir: Path, request: pytest.FixtureRequest) -> Iterator[Arena]:
    arena = make(memory_dir, request.param)
    arena.ensure(MIB, 1000)
    arena.wait_ready(60)
    yield arena
    arena.close(remove=True)


def save(arena: Arena, step: int, objects: bytes = b"objects") -> bool:
    """As a rank that is alone does: only the newest snapshot is needed."""
    slot = arena.acquire(step, MIB, step if arena.count == 1 else step - 1, ())
    if slot is None:
        arena.wait_ready(60)
        return False
    slot.begin()
    slot.image[:MIB] = bytes([step]) * MIB
    slot.seal(dataclasses.replace(META, step=step), b"static", objects)
    arena.release(slot)
    return True


def remove_all(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def steps_on_disk(directory: Path) -> list[int]:
    return sorted(meta.step for _, meta in find_slots(str(directory), USER) if isinstance(meta, SlotMeta))


def test_it_is_said_once_and_new_files_are_made(arena, memory_dir, caplog):
    for step in (1, 2, 3):
        assert save(arena, step)
    arena.look_after()
    assert arena.survives
    assert caplog.records == []
    first = 4
    for _ in range(2):
        remove_all(memory_dir)
        arena.look_after()
        assert not arena.survives
        assert arena.sealed()[-1].step == first - 1
        assert bytes(arena.view(first - 1, "t1").image[:2]) == bytes([first - 1]) * 2  # of use to a flush
        skipped = [step for step in range(first, first + 10) if not save(arena, step)]
        assert len(skipped) <= 2  # until new ones are there
        first += 10
        arena.wait_ready(60)
        assert arena.survives
        arena.look_after()
        assert first - 1 in steps_on_disk(memory_dir)
        assert len([path for path in memory_dir.iterdir() if path.suffix != ".owner"]) == arena.count
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "loginctl enable-linger" in warnings[0]
    assert "RemoveIPC=no" in warnings[0]


def test_the_new_files_are_owned(arena, memory_dir):
    """Else a second start of the job would take them over while they are written."""
    remove_all(memory_dir)
    arena.look_after()

    def second(child: Forked) -> None:
        try:
            make(memory_dir, 1)
        except RootInUse:
            child.say("refused")

    with Forked(second) as child:
        assert child.line() == "refused"


def test_files_are_left_to_another_process_that_owns_the_name_now(arena, memory_dir):
    assert save(arena, 1)
    remove_all(memory_dir)
    path = str(memory_dir / memory_names.owner_file(USER, ARENA, 0))

    def other(child: Forked) -> None:
        assert OwnerLock(path).try_acquire()
        child.say("owner")
        child.wait_for_go()

    with Forked(other) as child:
        assert child.line() == "owner"
        arena.look_after()
        for step in range(2, 6):
            save(arena, step)
        assert arena.sealed()[-1].step == 5
        assert os.listdir(memory_dir) == [os.path.basename(path)]


def test_a_tail_can_grow_in_a_slot_without_a_file(arena, memory_dir):
    assert save(arena, 1)
    remove_all(memory_dir)  # not noticed yet
    assert save(arena, 2, objects=b"x" * 100_000)
    assert arena.view(2, "t1").objects == b"x" * 100_000


def test_a_job_whose_memory_was_removed_is_killed_and_goes_on_from_memory(tmp_path, memory_dir):
    root, notes = tmp_path / "run", tmp_path / "notes"
    settings = {"save_storage_interval": 100_000}
    job = jobs.start(root, notes, "--step-seconds=0.02", steps=100_000, settings=settings)
    job.wait_for("finished", 5)
    remove_all(memory_dir)
    job.wait_until(lambda: bool(steps_of_any_user(memory_dir)), "new slots")
    job.wait_for("finished", job.values("finished")[-1] + 10)
    job.kill()
    assert job.stderr.count("loginctl enable-linger") == 1
    last = job.values("finished")[-1]
    again = jobs.run(root, notes, steps=last + 1, settings=settings)
    assert again.first("tier") == ["memory"]
    assert again.first("restored")[0] >= last - 1


def steps_of_any_user(directory: Path) -> list[int]:
    return [meta.step for _, meta in find_slots(str(directory), None) if isinstance(meta, SlotMeta)]
