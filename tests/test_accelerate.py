"""accelerate without a Trainer: a loop that is killed and resumed is the straight one to the bit, whatever it reads.

`trainers/loops.py` has the table. Each loop is killed by SIGKILL and resumed twice from what it has left: with its
memory, and without; in a process that was seeded otherwise. CI runs a sample, `make soak` all of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.trainers import launch
from tests.trainers.launch import VERSIONS
from tests.trainers.loops import LOOPS, SAVE
from tests.trainers.matrix import lose_snapshots

KILLED = -9
JOB = "tests.trainers.loop"
SAMPLE = ("mlm_accumulated", "noise_w2_pers", "drawn_w2", "ddp_drawn_end", "ddp_seedable")
CASES = (
    "nothing_prepared_is_forgotten",
    "a_save_in_mid_accumulation_is_refused",
    "another_loader_is_refused",
    "passes_go_forward",
    "sharded_training_is_refused",
)
#: What a resumed job has only from the step on at which it began.
BY_STEP = ("batches", "losses")
Record = dict[str, Any]


@dataclass
class Trial:
    """One loop in one environment."""

    name: str
    version: str
    directory: Path
    fresh: bool = False

    def run(self, root: str, record: str, *words: object) -> launch.Ended:
        path = self.directory / record
        arguments = [self.name, "--root", self.directory / root, "--record", path, *words]
        ranks = LOOPS[self.name].ranks
        return launch.run(self.version, arguments, ranks=ranks, beside=path, fresh=self.fresh, job=JOB)

    def records(self, record: str) -> list[Record]:
        paths = (self.directory / f"{record}.{rank}" for rank in range(LOOPS[self.name].ranks))
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    def finished(self, root: str, record: str, *words: object) -> list[Record]:
        ended = self.run(root, record, *words)
        assert not any(ended.codes), ended.said
        return self.records(record)

    def killed(self, root: str) -> None:
        until = LOOPS[self.name].until
        ended = self.run(root, f"{root}-killed", "--until", until, "--committed", newest(until))
        assert all(ended.codes), ended.said
        assert self.fresh or set(ended.codes) == {KILLED}, ended.said
        assert self.records(f"{root}-killed") == []

    def killed_and_resumed(self, straight: list[Record]) -> None:
        """Kill it, and hold what comes of going on against `straight`: with its memory, and without."""
        loop = LOOPS[self.name]
        self.killed("memory")
        from_memory = self.finished("memory", "memory-resumed", "--seed", "8")
        assert differences(straight, from_memory) == []
        assert {loop.until - record["began"] for record in from_memory} <= set(range(loop.ranks + 1))
        assert {record["tier"] for record in from_memory} == {"memory"}
        self.killed("storage")
        lose_snapshots()
        from_storage = self.finished("storage", "storage-resumed", "--seed", "9")
        assert differences(straight, from_storage) == []
        assert {(record["began"], record["tier"]) for record in from_storage} == {(newest(loop.until), "storage")}


def newest(until: int) -> int:
    """The newest step that is in storage for certain when step `until` has ended."""
    return (until - 1) // SAVE * SAVE


def differences(straight: list[Record], other: list[Record]) -> list[str]:
    """What is not equal, from where `other` has begun on."""
    assert len(straight) == len(other)
    found = []
    for rank, (one, two) in enumerate(zip(straight, other, strict=True)):
        for key in one.keys() - {"began", "tier"}:
            expected = [line for line in one[key] if line[0] > two["began"]] if key in BY_STEP else one[key]
            if expected != two[key]:
                found.append(f"rank {rank}: {key}{first_of(expected, two[key]) if key in BY_STEP else ''}")
    return found


def first_of(expected: list[Any], found: list[Any]) -> str:
    different = (line[0] for line, other in zip(expected, found, strict=False) if line != other)
    return f" from step {next(different, 'of the shorter one')} on"


def is_exact(name: str, version: str, directory: Path, *, fresh: bool = False) -> None:
    trial = Trial(name, version, directory, fresh)
    straight = trial.finished("straight", "straight")
    if LOOPS[name].like_plain:
        assert differences(straight, trial.finished("none", "plain", "--mode", "plain")) == [], "without easyckpt"
    trial.killed_and_resumed(straight)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_loops(name, tmp_path):
    is_exact(name, VERSIONS[-1], tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_what_it_does_besides(case, tmp_path):
    ended = launch.run(
        VERSIONS[-1], [case, tmp_path / "root"], ranks=1, beside=tmp_path / "case", job="tests.trainers.loop_cases"
    )
    assert ended.codes == [0], ended.said


def test_accelerate_alone_is_not_exact(tmp_path):
    """The traps are real: else the tests above could not fail."""
    trial = Trial("mlm", VERSIONS[-1], tmp_path)
    straight = trial.finished("none", "straight", "--mode", "plain")
    until = LOOPS["mlm"].until
    assert trial.run("stock", "killed", "--mode", "stock", "--until", until).codes == [KILLED]
    resumed = trial.finished("stock", "resumed", "--mode", "stock", "--began", until)
    assert any("batches" in difference for difference in differences(straight, resumed))


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", LOOPS)
def test_all_loops(name, version, tmp_path, campaign_part):
    is_exact(name, version, tmp_path)
    tests = len(LOOPS) * len(VERSIONS)
    campaign_part("accelerate_exact", seed=None, tests=tests, cases=[f"{name} beside transformers {version}"])


@pytest.mark.soak
@pytest.mark.parametrize("name", ["mlm", "ddp_mlm"])
def test_in_new_interpreters(name, tmp_path):
    """Ranks are under torchrun here."""
    is_exact(name, VERSIONS[-1], tmp_path, fresh=True)
