"""cp: the copy is whole or not there, training goes on from it to the bit, and the original never hears of it."""

from __future__ import annotations

import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import easyckpt
from easyckpt import catalog, failpoints
from easyckpt.format import layout
from easyckpt.format.checksum import CHUNK_BYTES
from easyckpt.format.manifest import Timeline
from easyckpt.saving import transfer
from easyckpt.saving.line import new_root
from easyckpt.storage.local import LocalStorage
from easyckpt.verification import verify
from tests.support.commands import everything_in, hits_of, run  # noqa: F401 - a fixture
from tests.support.jobs import committed
from tests.support.zygote import fork_program

NATIVE = layout.NativeNaming()


def train(root: Path, to: int, *, step: int | None = None, **settings) -> tuple[easyckpt.Restored, torch.Tensor]:
    """A real, if small training; each step is committed. Returns what was restored, and the weights at the end."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"save_storage_interval": 1, "max_ckpt_num": None, "back_pressure": "wait"} | settings
    with easyckpt.Checkpointer(root, {"model": model, "optimizer": optimizer}, **settings) as checkpointer:
        restored = checkpointer.load(step=step)
        for number in range(restored.step + 1, to + 1):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            checkpointer.save_if_needed(number)
            checkpointer.wait()
    return restored, torch.cat([p.detach().flatten() for p in model.parameters()])


def all_good(root: Path) -> bool:
    storage = LocalStorage(root)
    return all(verify(storage, entry) == [] for entry in catalog.scan(storage, NATIVE).of_kind("committed"))


@pytest.fixture
def old(tmp_path):
    train(tmp_path / "old", 6)
    return tmp_path / "old"


@pytest.fixture
def new(tmp_path):
    return tmp_path / "archive" / "new"


def test_training_goes_on_from_a_copy_to_the_bit_and_the_original_is_untouched(old, new, run, tmp_path):
    before = everything_in(old)
    ran = run("cp", f"{old}@4", new, "--json")
    assert ran.code == 0
    assert everything_in(old) == before
    assert committed(new) == [4]
    _, straight = train(tmp_path / "straight", 10)
    restored, resumed = train(new, 10)
    assert (restored.step, restored.tier) == (4, "storage")
    assert torch.equal(straight.view(torch.int32), resumed.view(torch.int32))
    assert everything_in(old) == before
    assert committed(new) == [4, 5, 6, 7, 8, 9, 10]


def test_a_copy_is_a_run_of_its_own_that_names_its_parent(old, new, run):
    document = run("cp", f"{old}@4", new, "--json").document
    source, copy = (catalog.read_root(LocalStorage(root)) for root in (old, new))
    assert document["run"] == copy.run != source.run
    assert document["parent"] == copy.parent == f"{source.run}/{source.timelines[-1].id}/4"
    assert document["path"] == str(new / layout.step_dir(4))
    assert (new / layout.LATEST).read_text() == layout.step_dir(4) + "\n"
    train(new, 5)
    assert catalog.read_root(LocalStorage(new)).run == copy.run
    assert copy.parent in " ".join(run("show", f"{new}@5", "--json").document["parent"].split())


def test_every_file_is_copied_as_it_is_and_nothing_else_is_left(old, new, run, memory_dir):
    memory = list(memory_dir.iterdir())
    run("cp", f"{old}@4", new)
    here, there = old / layout.step_dir(4), new / layout.step_dir(4)
    assert sorted(os.listdir(there)) == sorted(os.listdir(here))
    assert all((there / name).read_bytes() == (here / name).read_bytes() for name in os.listdir(here))
    assert sorted(os.listdir(new)) == sorted([layout.ROOT_FILE, layout.LATEST, layout.step_dir(4)])
    assert list(memory_dir.iterdir()) == memory


def test_without_a_step_the_newest_is_copied_and_a_step_directory_will_do_as_well(old, tmp_path, run):
    assert run("cp", old, tmp_path / "one", "--json").document["step"] == 6
    assert run("cp", old / layout.step_dir(2), tmp_path / "two", "--json").document["step"] == 2


DIES = """
import os, signal, sys, torch, easyckpt
checkpointer = easyckpt.Checkpointer(sys.argv[1], {"model": torch.nn.Linear(2, 2)}, save_storage_interval=2)
checkpointer.load()
for step in (1, 2, 3):
    checkpointer.save_if_needed(step)
    checkpointer.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_copy_shares_no_memory_with_its_original(tmp_path, run):
    old, new = tmp_path / "old", tmp_path / "new"
    child = fork_program(DIES, old, directory=tmp_path)
    child.communicate(60)
    assert child.returncode == -signal.SIGKILL
    assert run("cp", old, new).code == 0  # beside what the dead process has left, its lease too
    for root, step, tier in ((new, 2, "storage"), (old, 3, "memory")):
        with easyckpt.Checkpointer(root, {"model": torch.nn.Linear(2, 2)}) as checkpointer:
            restored = checkpointer.load()
        assert (restored.step, restored.tier) == (step, tier)


def test_several_copies_of_a_run_can_lie_in_one_root(old, new, run):
    for step in (5, 2, 4):
        assert run("cp", f"{old}@{step}", new).code == 0
    assert committed(new) == [2, 4, 5]
    assert (new / layout.LATEST).read_text() == layout.step_dir(5) + "\n"
    assert train(new, 6)[0].step == 5
    assert train(new, 4, step=2)[0].step == 2


def test_what_was_set_aside_can_be_copied_and_is_a_checkpoint_again(old, new, run):
    train(old, 3, step=2)
    stale = catalog.scan(LocalStorage(old), NATIVE).of_kind("stale")[-1]
    assert run("cp", old / stale.name, new).code == 0
    assert committed(new) == [6]
    assert train(new, 7)[0].step == 6


# What DEST may not be.


def test_a_step_that_is_there_already_is_refused(old, new, run):
    run("cp", f"{old}@4", new)
    os.truncate(new / layout.step_dir(4) / layout.shard_file(0), 5)  # whole or not
    before = everything_in(new)
    ran = run("cp", f"{old}@4", new)
    assert ran.code == 2
    assert "holds a checkpoint of step 4 already" in ran.err
    assert everything_in(new) == before


def a_file(old, new):
    new.write_text("x")


def other_files(old, new):
    new.mkdir()
    (new / "notes.txt").write_text("x")


def another_run(old, new):
    train(new, 2)


def an_older_copy_in_which_training_went_on(old, new):
    new.mkdir()
    shutil.copytree(old / layout.step_dir(2), new / layout.step_dir(2))
    train(new, 3)


def a_copy_of_another_run(old, new):
    train(new.parent / "third", 1)
    new.mkdir()
    shutil.copytree(new.parent / "third" / layout.step_dir(1), new / layout.step_dir(1))


def the_root_itself_copied_whole(old, new):
    shutil.copytree(old, new)
    shutil.rmtree(new / layout.step_dir(4))


def a_copy_in_which_a_line_was_opened_and_nothing_is_committed(old, new):
    storage = LocalStorage(new)
    new.mkdir()
    shutil.copytree(old / layout.step_dir(2), new / layout.step_dir(2))
    record = new_root(storage, NATIVE)
    line = Timeline("0a1b2c3d", record.timelines[-1].id, 2, False, 1.0)
    catalog.write_root(storage, replace(record, timelines=(*record.timelines, line)))


def a_root_whose_record_is_damaged(old, new):
    train(new, 1)
    (new / layout.ROOT_FILE).write_bytes(b"{}")


@pytest.mark.parametrize(
    "makes",
    [
        a_file,
        other_files,
        another_run,
        an_older_copy_in_which_training_went_on,
        a_copy_of_another_run,
        the_root_itself_copied_whole,
        a_copy_in_which_a_line_was_opened_and_nothing_is_committed,
        a_root_whose_record_is_damaged,
    ],
)
def test_where_the_copy_would_be_no_candidate_nothing_is_changed(old, new, run, makes):
    new.parent.mkdir()
    makes(old, new)
    before = everything_in(new.parent)
    assert run("cp", f"{old}@4", new).code == 2
    assert everything_in(new.parent) == before


@pytest.mark.parametrize("where", ["{old}", "{old}/copy", "{old}/step-00000004/copy", "{new}/step-00000009"])
def test_a_place_inside_the_original_and_the_name_of_a_step_are_refused(old, new, run, where):
    before = everything_in(old)
    assert run("cp", f"{old}@4", where.format(old=old, new=new)).code == 2
    assert everything_in(old) == before
    assert not new.exists()


@pytest.mark.parametrize("which", ["{old}@9", "{old}-nothing@3", "{old}/step-00000004@4"])
def test_what_is_not_there_is_bad_input(old, new, run, which):
    assert run("cp", which.format(old=old), new).code == 2
    assert not new.parent.exists()


def test_a_root_that_a_job_has_just_opened_is_refused_by_its_owner(old, new, run):
    with easyckpt.Checkpointer(new, {"model": torch.nn.Linear(2, 2)}):
        ran = run("cp", f"{old}@4", new)
        assert ran.code == 2
        assert "is in use by another Checkpointer of this process" in ran.err
    assert committed(new) == []


def test_the_run_of_a_job_that_waits_for_the_root_is_kept(old, new, run, monkeypatch):
    """Its constructor makes the root's record before it asks for the lease."""
    waiting = []

    def as_a_job_does(*arguments):
        storage = LocalStorage(new)
        waiting.append(new_root(storage, NATIVE))
        assert storage.link_exclusive(layout.ROOT_FILE, waiting[0].to_bytes())
        return real(*arguments)

    real = transfer.commit
    monkeypatch.setattr(transfer, "commit", as_a_job_does)
    document = run("cp", f"{old}@4", new, "--json").document
    record = catalog.read_root(LocalStorage(new))
    assert document["run"] == record.run == waiting[0].run
    assert record.parent.endswith("/4")


# Damage.


def test_a_flipped_bit_anywhere_in_the_original_is_found_and_nothing_is_committed(old, new, run):
    step = old / layout.step_dir(4)
    generator = random.Random(3)
    for name in (layout.shard_file(0), layout.index_file(0)):
        path = step / name
        good = path.read_bytes()
        for place in [0, len(good) - 1, *generator.sample(range(len(good)), 20)]:
            bad = bytearray(good)
            bad[place] ^= 1 << generator.randrange(8)
            path.write_bytes(bad)
            ran = run("cp", f"{old}@4", new, "--json")
            assert (ran.code, ran.document["error"]["kind"]) == (1, "DamagedCheckpoint"), (name, place)
            assert f"{old}: {layout.step_dir(4)}/{name} is not what was committed" in ran.err
            assert not new.exists(), "something was left"
        path.write_bytes(good)
    assert run("cp", f"{old}@4", new).code == 0


@pytest.mark.parametrize("harm", [lambda path: os.truncate(path, 9), os.unlink])
@pytest.mark.parametrize("name", [layout.shard_file(0), layout.index_file(0), layout.MANIFEST])
def test_a_checkpoint_that_is_not_valid_is_not_copied(old, new, run, name, harm):
    harm(old / layout.step_dir(4) / name)
    assert run("cp", f"{old}@4", new).code == 1
    assert not new.exists()


def test_bytes_that_storage_gives_back_otherwise_are_not_committed(old, new, run, monkeypatch):
    real = LocalStorage.sync_dir

    def rots(self, path):
        real(self, path)
        if layout.parse_tmp_dir(path):
            shard = new / path / layout.shard_file(0)
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 1
            shard.write_bytes(data)

    monkeypatch.setattr(LocalStorage, "sync_dir", rots)
    ran = run("cp", f"{old}@4", new)
    assert ran.code == 1
    assert "reads back otherwise than it was written" in ran.err
    assert not new.exists()


def test_a_checkpoint_that_is_rotated_away_meanwhile_is_no_copy(old, new, run, monkeypatch):
    real = LocalStorage.create

    def rotates(self, path):
        shutil.rmtree(old / layout.step_dir(4), ignore_errors=True)
        return real(self, path)

    monkeypatch.setattr(LocalStorage, "create", rotates)
    ran = run("cp", f"{old}@4", new)
    assert ran.code == 2
    assert "pin the step first" in ran.err
    assert not new.exists()


def test_a_target_that_goes_away_is_not_told_as_a_source_that_did(old, new, run, monkeypatch):
    real = LocalStorage.create

    def loses_the_target(self, path):
        shutil.rmtree(new)
        return real(self, path)

    monkeypatch.setattr(LocalStorage, "create", loses_the_target)
    ran = run("cp", f"{old}@4", new)
    assert ran.code != 0
    assert "pin the step first" not in ran.err


def test_an_error_leaves_a_directory_that_was_there_before(old, new, run):
    new.mkdir(parents=True)
    (old / layout.step_dir(2) / layout.shard_file(0)).write_bytes(
        bytes((old / layout.step_dir(2) / layout.shard_file(0)).stat().st_size)
    )
    assert run("cp", f"{old}@2", new).code == 1
    assert os.listdir(new) == []


def test_without_room_nothing_is_left(old, new, run, monkeypatch):
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 1)
    assert run("cp", f"{old}@4", new).code == 2
    assert not new.exists()


def test_a_shard_of_many_chunks_is_copied_exactly(tmp_path, run):
    old, new = tmp_path / "old", tmp_path / "new"
    model = torch.nn.Linear(2 * CHUNK_BYTES // 4 + 3, 1, bias=False)
    with easyckpt.Checkpointer(old, {"model": model}) as checkpointer:
        checkpointer.save(1, wait=True)
    document = run("cp", old, new, "--json").document
    assert document["bytes"] > 2 * CHUNK_BYTES
    assert all_good(new)
    again = torch.nn.Linear(2 * CHUNK_BYTES // 4 + 3, 1, bias=False)
    easyckpt.restore(new, {"model": again})
    assert torch.equal(model.weight, again.weight)


# Kills and errors.


@pytest.mark.parametrize("command", ["cp", "verify"])
def test_an_interrupt_in_the_middle_of_a_read_or_write_ends_it_as_an_interrupt(old, new, run, monkeypatch, command):
    def interrupted(name):
        if name == "storage.write.after":
            raise KeyboardInterrupt

    def reads(descriptor, views, offset):
        raise KeyboardInterrupt

    monkeypatch.setattr(failpoints, "hit", interrupted)
    if command == "verify":
        monkeypatch.setattr(os, "preadv", reads)
    ran = run(*(("cp", f"{old}@4", new) if command == "cp" else ("verify", f"{old}@4")))
    assert (ran.code, ran.err) == (130, "easyckpt: interrupted\n")
    assert command == "verify" or not new.exists()


COPIES = """
import sys
from easyckpt.cli import app
app(["cp", sys.argv[1], sys.argv[2]])
"""


def crash(old: Path, place: Path, run, armed: str, *, resumes: bool) -> None:
    """One copy that is killed or fails, one that is not, and what must hold in between and after it."""
    source = f"{old}@4"
    child = fork_program(COPIES, source, place, directory=place.parent, **{failpoints.ENVIRONMENT_VARIABLE: armed})
    where = f"{armed}: {child.communicate(60)}"
    assert child.returncode in ((-signal.SIGKILL,) if armed.endswith("kill") else (0, 2)), where
    there = committed(place) == [4]
    assert there or committed(place) == [], where
    assert there or child.returncode != 0, where
    assert all_good(place), where
    assert run("cp", source, place).code == (2 if there else 0), where
    assert committed(place) == [4], where
    assert catalog.scan(LocalStorage(place), NATIVE).of_kind("temporary") == [], where
    if resumes:
        assert train(place, 5)[0].step == 4, where


def test_a_kill_or_an_error_leaves_no_half_copy_and_the_next_one_succeeds(old, new, run, tmp_path):
    """A sample of each failpoint that a copy comes to."""
    before = everything_in(old)
    hits = hits_of(COPIES, f"{old}@4", new, directory=tmp_path)
    assert hits["storage.write.before"] >= 3
    for name, count in sorted(hits.items()):
        for number in {1, count}:
            crash(old, tmp_path / f"{name}-{number}", run, f"{name}@{number}=kill", resumes=number == count)
        error = random.Random(name).choice(("ENOSPC", "EIO"))
        crash(old, tmp_path / f"{name}-error", run, f"{name}@{(count + 1) // 2}=error:{error}", resumes=False)
    assert everything_in(old) == before


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("action", ["kill", "error:ENOSPC", "error:EIO"])
def test_a_kill_or_an_error_at_every_hit_leaves_no_half_copy(old, new, run, tmp_path, action):
    for name, count in sorted(hits_of(COPIES, f"{old}@4", new, directory=tmp_path).items()):
        for number in range(1, count + 1):
            crash(old, tmp_path / f"{name}-{number}", run, f"{name}@{number}={action}", resumes=True)
