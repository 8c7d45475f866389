"""A job that slept while another took its root over: it finds out before each change, and changes nothing there."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.checkpoints import RUN, line, make_view, root_record, write_checkpoint
from torch import nn

import easyckpt
from easyckpt import Checkpointer, catalog
from easyckpt.distributed.ranks import Ranks
from easyckpt.errors import LeaseLost
from easyckpt.format import layout as names
from easyckpt.saving.attempt import Work, attempt_name
from easyckpt.saving.commit import CommitContext
from easyckpt.saving.flusher import Flusher
from easyckpt.saving.line import Origin, open_line
from easyckpt.saving.messages import Flush
from easyckpt.saving.metrics import Metrics
from easyckpt.saving.policy import Policy
from easyckpt.saving.writer import ShardWriter
from easyckpt.storage.local import LocalStorage
from tests.support import jobs
from tests.support.jobs import committed, events
from tests.support.staged import until
from tests.support.zygote import fork_program

NATIVE = names.NativeNaming()
OWN = "0badcafe"


class Watched(LocalStorage):
    """Notes each change, and each look at the lease, which is lost from look number `lost_at` on."""

    def __init__(self, root: Path, lost_at: int = -1) -> None:
        super().__init__(root)
        self.notes: list[tuple[str, str]] = []
        self.lost_at, self.looks = lost_at, 0

    def check(self) -> None:
        self.looks += 1
        self.notes.append(("look", ""))
        if self.looks >= self.lost_at > 0:
            self.notes.append(("lost", ""))
            raise LeaseLost("taken over by another job")

    @property
    def context(self) -> CommitContext:
        return CommitContext(storage=self, naming=NATIVE, check_lease=self.check)


def noting(kind: str) -> Callable[..., object]:
    def method(self, path, *rest):
        if path:  # the root itself is there
            self.notes.append((kind, path))
        return getattr(LocalStorage, kind)(self, path, *rest)

    return method


for changing in ("makedirs", "create", "replace", "append", "rename", "remove_tree", "remove", "link_exclusive"):
    setattr(Watched, changing, noting(changing))


def view(step: int):
    return make_view({"w": torch.tensor([step])}, step=step)


def prepare(root: Path) -> None:
    """Checkpoints, steps past a fork, and what processes leave that die in the middle of everything."""
    storage = LocalStorage(root)
    catalog.write_root(storage, root_record(line("before"), line(parent="before", fork_step=1)))
    for step in (1, 2, 3, 15):
        write_checkpoint(storage, view(step))
    write_checkpoint(storage, view(4), directory=names.stale_dir(4, "main"))
    write_checkpoint(storage, view(12), attempt="dead-000002", directory=names.tmp_dir(12, "dead-000002"))
    for directory in (names.step_dir(12), names.tmp_dir(13, "dead-000001"), names.trash_dir(names.step_dir(1), "x")):
        storage.makedirs(directory)
    storage.replace(names.temp_file(names.LATEST, "dead"), b"")
    storage.append(names.METRICS, b'{"step":15}\n')


def opening(storage: Watched) -> None:
    open_line(storage.context, Origin(12, "main"), Metrics(), incarnation=OWN)


def flusher_of(storage):
    return Flusher(
        storage.context,
        Ranks(0, 1, 0, 1),
        RUN,
        policy=Policy(newest=1),
        writer=ShardWriter(storage),
        emit=lambda event: None,
    )


def flushing(storage: Watched) -> None:
    """All that a flush of step 12 does, a damaged directory in its way, and the rotation that follows."""
    flusher = flusher_of(storage)
    try:
        flush = Flush(attempt=attempt_name(OWN, 1), step=12, due=12, share=True)
        written = flusher.write(flush, view(12), threading.Event())
        files = {} if written.exception() else written.result()
        failed = flusher.commit(Work(kind="commit", flush=flush, files=files), view(12)).result().reason
        flusher.retain(()).result()
    finally:
        flusher.stop(None)
    if failed:
        raise LeaseLost(failed)


def giving_up(storage: Watched) -> None:
    flusher = flusher_of(storage)
    try:
        storage.makedirs(names.tmp_dir(12, attempt_name(OWN, 1)))
        storage.notes.clear()
        flush = Flush(attempt=attempt_name(OWN, 1), step=12, due=12, share=True, abandoned="no answer from rank 1")
        flusher.clean_up(Work(kind="clean up", flush=flush)).result()
    finally:
        flusher.stop(None)


EVERYTHING = {f.__name__: f for f in (opening, flushing, giving_up)}


@pytest.mark.parametrize("doing", EVERYTHING)
def test_before_each_change_it_is_seen_whose_the_root_is(tmp_path, doing):
    prepare(tmp_path / "root")
    storage = Watched(tmp_path / "root")
    EVERYTHING[doing](storage)
    own = names.tmp_dir(12, attempt_name(OWN, 1)) + "/"  # nobody else's until it is whole
    changes = [i for i, (kind, path) in enumerate(storage.notes) if kind != "look" and not path.startswith(own)]
    unseen = [storage.notes[number] for number in changes if storage.notes[number - 1][0] != "look"]
    assert unseen == []
    kinds = {storage.notes[number][0] for number in changes}
    assert kinds >= {"opening": {"rename", "remove_tree", "remove", "replace"}, "flushing": {"rename"}}.get(
        doing, set()
    )


@pytest.mark.parametrize("doing", EVERYTHING)
def test_after_a_take_over_at_any_moment_nothing_is_changed_any_more(tmp_path, doing):
    looks = number = 1
    while number <= looks:
        root = tmp_path / str(number)
        prepare(root)
        storage = Watched(root, lost_at=number)
        with contextlib.suppress(LeaseLost):
            EVERYTHING[doing](storage)
        lost = storage.notes.index(("lost", ""))
        assert {kind for kind, _ in storage.notes[lost:]} <= {"look", "lost"}
        if number == 1:
            again = tmp_path / "all"
            prepare(again)
            EVERYTHING[doing](whole := Watched(again))
            looks = whole.looks
        number += 1
    assert looks > 0


def test_opening_a_line_leaves_the_attempts_of_this_very_job_alone(tmp_path):
    """Each may be running, between two jobs of the flusher's thread: half-written, or whole but for its rename."""
    prepare(tmp_path / "root")
    storage = Watched(tmp_path / "root")
    half, whole_one = (names.tmp_dir(step, attempt_name(OWN, step)) for step in (13, 14))
    storage.makedirs(half)
    write_checkpoint(storage, view(14), attempt=attempt_name(OWN, 14), directory=whole_one)
    open_line(storage.context, Origin(14, "main"), Metrics(), incarnation=OWN)
    found = catalog.scan(storage, NATIVE)
    assert [entry.name for entry in found.of_kind("temporary")] == [half, whole_one]
    assert [entry.valid for entry in found.of_kind("temporary")] == [False, True]
    assert [entry.step for entry in found.committed()] == [1, 2, 3, 12]


SLEEPS = """
import os, sys, time, torch, easyckpt
root, loaded, go = sys.argv[1:]
model = torch.nn.Linear(4, 4)
checkpointer = easyckpt.Checkpointer(root, {"model": model}, lease_interval=200, lease_timeout=600)
checkpointer.load()
open(loaded, "w").close()
while not os.path.exists(go):
    time.sleep(0.01)
for call in (lambda: checkpointer.save_if_needed(6), lambda: checkpointer.save(6, wait=True)):
    try:
        call()
    except easyckpt.EasyckptError as error:
        print(type(error).__name__, flush=True)
os._exit(0)
"""


def train(checkpointer: Checkpointer, model: nn.Linear, *steps: int) -> None:
    for step in steps:
        nn.init.constant_(model.weight, step)
        checkpointer.save(step, wait=True)


def test_the_first_save_of_a_job_that_slept_takes_nothing_back(tmp_path, memory_dir):
    """It has loaded and then not renewed its lease in time; meanwhile another host's job has taken over and trained."""
    root, loaded, go, model = tmp_path / "run", tmp_path / "loaded", tmp_path / "go", nn.Linear(4, 4)
    with Checkpointer(root, {"model": model}) as checkpointer:
        checkpointer.load()
        train(checkpointer, model, 5)
    sleeper = fork_program(SLEEPS, root, loaded, go, directory=tmp_path)
    try:
        until(loaded.exists)
        elsewhere = memory_dir / "elsewhere"
        elsewhere.mkdir()
        settings = {"memory_dir": str(elsewhere), "lease_timeout": 0.5, "lease_interval": 0.1}
        with Checkpointer(root, {"model": model}, **settings) as checkpointer:
            assert checkpointer.load().step == 5
            train(checkpointer, model, 10, 20)
            before = sorted(os.listdir(root))
            go.touch()
            assert sleeper.communicate(60)[0].split() == ["LeaseLost", "LeaseLost"]
            assert sorted(os.listdir(root)) == before
            train(checkpointer, model, 30)
    finally:
        go.touch()
        sleeper.communicate(60)
    assert committed(root) == [5, 10, 20, 30]
    with Checkpointer(root, {"model": model}) as checkpointer:
        assert checkpointer.load().step == 30


def test_a_checkpoint_beside_the_line_that_the_root_goes_on_from_does_not_pass_for_a_save(tmp_path):
    model = nn.Linear(4, 4)
    with pytest.raises(easyckpt.SaveFailed), Checkpointer(tmp_path, {"model": model}) as checkpointer:
        checkpointer.load()
        train(checkpointer, model, 1, 2)
        storage = LocalStorage(tmp_path)
        record = catalog.read_root(storage)
        assert record is not None
        other = line("other", parent=record.timelines[-1].id, fork_step=2)
        catalog.write_root(storage, root_record(*record.timelines, other, run=record.run))
        with pytest.raises(easyckpt.SaveFailed, match="goes on from another one"):
            train(checkpointer, model, 3)
        train(checkpointer, model, 4)
    assert committed(tmp_path) == [1, 2]


def test_all_ranks_of_a_job_that_was_frozen_raise_at_the_same_step(tmp_path, memory_dir):
    root, model = tmp_path / "run", nn.Linear(4, 4)
    settings = {"save_storage_interval": 100_000, "lease_interval": 0.2, "lease_timeout": 30.0}
    arguments = ("--step-seconds=0.01", "--save-at=10")
    job = jobs.start(root, tmp_path / "notes", *arguments, steps=100_000, ranks=2, settings=settings)
    job.wait_for("finished", 20, rank=1)
    for rank in range(2):
        os.kill(job.pid(rank), signal.SIGSTOP)
    elsewhere = memory_dir / "elsewhere"
    elsewhere.mkdir()
    with Checkpointer(root, {"model": model}, memory_dir=str(elsewhere), lease_timeout=0.5, lease_interval=0.1):
        before = whole(root)
        assert committed(root) == [10]
        for rank in range(2):
            os.kill(job.pid(rank), signal.SIGCONT)
        assert all(job.ends())
        assert whole(root) == before
    assert job.last("error") == ["LeaseLost", "LeaseLost"]
    assert "taken over" in job.last("text")[1]
    assert len(set(job.last("at"))) == 1
    for rank in range(2):
        newest = max(event["step"] or 0 for event in events(root, rank))
        assert newest < job.last("at")[rank] - 2, "said after all had heard of the loss"


def whole(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if not name.startswith("."))


def sizes(root: Path) -> dict[str, int]:
    return {name: os.path.getsize(root / name) for name in (names.METRICS, names.events_file(0))}


def test_after_the_loss_of_the_lease_neither_metrics_nor_events_are_appended(tmp_path):
    model = nn.Linear(4, 4)
    with pytest.raises(LeaseLost, match="lost its lease"), Checkpointer(tmp_path, {"model": model}) as checkpointer:
        checkpointer.load()
        checkpointer.log(loss=1.0)
        train(checkpointer, model, 1)
        assert checkpointer._housekeeper.write_now(60)
        assert checkpointer._metrics.unwritten == 0
        (tmp_path / names.LEASE).unlink()
        with pytest.raises(
            (easyckpt.SaveFailed, LeaseLost), match="lost its lease"
        ):  # it is found before the next renewal is due
            train(checkpointer, model, 2)
        until(lambda: checkpointer._parts.coordinator.ledger.fatal)
        before = sizes(tmp_path)
        checkpointer.log(loss=3.0)
        checkpointer.save_if_needed(3)
        assert checkpointer._housekeeper.write_now(60)
        with pytest.raises(LeaseLost, match="lost its lease"):
            train(checkpointer, model, 4)
    assert sizes(tmp_path) == before
    assert catalog.scan(LocalStorage(tmp_path), NATIVE).of_kind("committed")[-1].step == 1
