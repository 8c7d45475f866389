"""Trainings that the Trainer saves by itself, for real: FSDP and two nodes, killed in steps and in saves, damaged."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from easyckpt import catalog
from easyckpt.storage.records_apart import open_place
from easyckpt.verification import verify
from tests.support.staged import until
from tests.trainers.launch import Ended, run

JOB = "tests.trainers.sharded"
FSDP = [("5", "fsdp_full"), ("5", "fsdp_sharded"), ("4", "fsdp_sharded")]


@pytest.fixture(autouse=True)
def soon_taken_for_dead(monkeypatch):
    monkeypatch.setenv("EASYCKPT_LEASE_TIMEOUT", "2")
    monkeypatch.setenv("EASYCKPT_LEASE_INTERVAL", "0.5")


class Sharded:
    """Trainings of one kind, each in a directory below `directory`."""

    def __init__(self, version: str, kind: str, directory: Path, ranks: int = 2) -> None:
        self.version, self.kind, self.directory, self.ranks = version, kind, directory, ranks
        self.out = directory / "out"

    def run(self, name: str, *words: object, out: Path | None = None, fresh: bool = False, **arguments: Any) -> Ended:
        given = [self.kind, "--out", out or self.out, "--record", self.directory / name, *words]
        if arguments:
            given += ["--arguments", json.dumps(arguments)]
        return run(self.version, given, ranks=self.ranks, beside=self.directory / f"{name}.said", fresh=fresh, job=JOB)

    def record(self, name: str) -> list[dict[str, Any]]:
        return [json.loads((self.directory / f"{name}.{rank}").read_text()) for rank in range(self.ranks)]

    def straight(self) -> list[dict[str, Any]]:
        ended = self.run("straight", "--stock", out=self.directory / "straight-out")
        assert ended.codes == [0] * self.ranks, ended.said
        return self.record("straight")

    def killed(self, name: str, *words: object, **arguments: Any) -> Ended:
        ended = self.run(name, *words, **arguments)
        assert set(ended.codes) == {-9}, ended.said
        return ended

    def resumed(
        self, name: str, begins: int, straight: Sequence[dict[str, Any]], *words: object, **arguments: Any
    ) -> str:
        """What a job has said that goes on from the newest, from step `begins` on, to the bit."""
        ended = self.run(name, "--resume", "true", *words, **arguments)
        assert ended.codes == [0] * self.ranks, ended.said
        assert self.record(name) == [{**one, "began": begins} for one in straight]
        return ended.said


def whole(out: Path) -> list[int]:
    """The steps of the checkpoints of which every byte is as it was committed."""
    storage, naming = open_place(out)
    found = [entry for entry in catalog.scan(storage, naming).entries if naming.parse_committed(entry.name) is not None]
    return [entry.step for entry in found if entry.valid and not list(verify(storage, entry))]


def damage(checkpoint: Path) -> None:
    """Flip a bit in the largest file."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


@pytest.fixture(params=FSDP, ids="-".join)
def fsdp(request, tmp_path):
    return Sharded(*request.param, tmp_path)


@pytest.mark.soak
def test_a_killed_training_goes_on_from_the_newest_whole_one(fsdp):
    straight = fsdp.straight()
    said = fsdp.killed("in-a-step", "--until", 5).said
    assert said.count("saved by the Trainer itself") == 1
    assert whole(fsdp.out) == [2, 4]
    fsdp.killed("in-a-save", "--resume", "true", "--until", 6, "--moment", "write")
    assert whole(fsdp.out) == [2, 4]
    said = fsdp.resumed("again", 4, straight)
    assert "checkpoint-6" in said
    assert whole(fsdp.out) == [2, 4, 6, 8]


@pytest.mark.soak
def test_damage_has_the_older_one_taken(fsdp):
    straight = fsdp.straight()
    fsdp.killed("in-a-step", "--until", 5)
    damage(fsdp.out / "checkpoint-4")
    said = fsdp.resumed("again", 2, straight)
    assert said.count("checkpoint-4 cannot be resumed from and is passed over: ") == 1
    assert whole(fsdp.out) == [2, 4, 6, 8]


@pytest.mark.soak
def test_a_first_save_that_was_cut_short_is_none(fsdp):
    straight = fsdp.straight()
    fsdp.killed("in-a-save", "--until", 2, "--moment", "write")
    assert whole(fsdp.out) == []
    fsdp.resumed("again", 0, straight)


@pytest.mark.soak
def test_all_of_it_damaged_is_an_error(fsdp):
    fsdp.killed("in-a-step", "--until", 5)
    damage(fsdp.out / "checkpoint-4")
    (fsdp.out / "checkpoint-2" / "manifest.json").write_text("{")
    ended = fsdp.run("again", "--resume", "true")
    assert ended.codes == [1, 1]
    assert "DamagedCheckpoint" in ended.said


@pytest.mark.soak
def test_what_an_older_training_has_saved_makes_room_for_a_new_one(fsdp):
    """It would else have the higher numbers: the new ones would be rotated away, and `True` would mean the old ones."""
    straight = fsdp.straight()
    fsdp.killed("old", "--until", 7)
    fsdp.killed("new", "--until", 3, save_total_limit=2)
    assert whole(fsdp.out) == [2]
    assert len(list(fsdp.out.glob("_easyckpt-stale-checkpoint-*"))) == 3
    fsdp.resumed("again", 2, straight, save_total_limit=2)
    assert whole(fsdp.out) == [6, 8]


@pytest.mark.soak
def test_a_checkpoint_of_the_model_alone_is_no_state_to_go_on_from(tmp_path):
    fsdp = Sharded("5", "fsdp_full", tmp_path)
    fsdp.killed("in-a-step", "--until", 3, save_only_model=True)
    ended = fsdp.run("again", "--resume", "true")
    assert ended.codes == [1, 1]
    assert "save_only_model" in ended.said


@pytest.fixture
def nodes(tmp_path):
    """On a CPU, transformers 4 cannot read the optimizer of a training by DDP: it looks for a device ``cpu:0``."""
    return Sharded("5", "each_node", tmp_path)


def test_nodes_go_on_from_the_newest_that_is_whole_on_all_of_them(nodes):
    straight = nodes.straight()
    apart = [nodes.directory / f"out-{rank}" for rank in range(2)]
    nodes.out = nodes.directory / "out-RANK"
    nodes.killed("in-a-step", "--nodes", "--until", 7)
    assert [whole(out) for out in apart] == [[2, 4, 6]] * 2
    damage(apart[1] / "checkpoint-6")
    nodes.resumed("again", 4, straight, "--nodes", save_total_limit=2)
    assert [whole(out) for out in apart] == [[6, 8]] * 2
    shutil.rmtree(apart[1])
    ended = nodes.run("lost", "--nodes", "--resume", "true")
    assert ended.codes == [1, 1]
    assert "whole on every node" in ended.said


@pytest.mark.soak
def test_nodes_that_share_a_directory_commit_once(nodes):
    straight = nodes.straight()
    nodes.killed("in-a-step", "--nodes", "--until", 7, save_total_limit=2)
    assert whole(nodes.out) == [4, 6]
    nodes.resumed("again", 6, straight, "--nodes", save_total_limit=2)
    assert whole(nodes.out) == [6, 8]


@pytest.mark.soak
def test_a_second_job_in_the_same_directory_is_refused(fsdp):
    words = ["first", "--waits", fsdp.directory / "go"]
    first = threading.Thread(target=fsdp.run, args=words, kwargs={"fresh": True})
    first.start()
    until((fsdp.out / "checkpoint-2" / "manifest.json").exists)
    second = fsdp.run("second")
    (fsdp.directory / "go").touch()
    first.join()
    assert second.codes == [1, 1]
    assert "RootInUse" in second.said
    assert fsdp.record("first")[0]["steps"] == 8


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "ranks"), [("plain", 1), ("each_node", 2)])
def test_a_relative_directory_stays_where_it_was(kind, ranks, tmp_path):
    trainings = Sharded("5", kind, tmp_path, ranks)
    straight = trainings.straight()
    ended = trainings.run("moves", "--moves", tmp_path, "--resume", "false", out=Path("out"))
    assert ended.codes == [0] * ranks, ended.said
    assert whole(trainings.out) == [2, 4, 6, 8]
    shutil.rmtree(trainings.out / "checkpoint-8")
    trainings.resumed("again", 6, straight)
