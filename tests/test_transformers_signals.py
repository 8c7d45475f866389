"""Signals to a whole process group at moments chosen by chance: the job ends, all is whole, and it goes on exactly."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.test_transformers_sharded import JOB, Sharded, whole
from tests.trainers.launch import started, surroundings

STEPS, TRIALS = 24, 3
#: Flushes take a while, so that signals come into them, and into the drain at the end.
SLOW = "writer.shard.chunk@*=pause:0.02;commit.manifest.written@*=pause:0.02"
SIGNALS = {"term": [signal.SIGTERM], "int": [signal.SIGINT], "term-term": [signal.SIGTERM] * 2}


def signalled(trainings: Sharded, name: str, chance: random.Random, signals: list[int], longest: float) -> str:
    """What a job has said that was sent `signals`, one soon after the other, and has ended by itself."""
    record = trainings.directory / name
    begun = Path(f"{record}.begun")
    words = [trainings.kind, "--out", trainings.out, "--record", record, "--armed", SLOW, "--begun", begun]
    words += ["--arguments", json.dumps({"max_steps": STEPS})]
    beside = trainings.directory / f"{name}.said"
    children = started(trainings.version, JOB, list(map(str, words)), surroundings(), trainings.ranks, beside)
    while not begun.exists() and children[0].poll() is None:
        time.sleep(0.002)
    time.sleep(chance.uniform(0, longest))
    for number in signals:
        if children[0].poll() is None:
            os.killpg(children[0].pid, number)
        time.sleep(chance.uniform(0, 0.1))
    return "\n".join(child.communicate()[1] for child in children)


@pytest.mark.soak
@pytest.mark.parametrize("signals", SIGNALS)
@pytest.mark.parametrize(
    ("version", "kind", "ranks"), [("5", "plain", 1), ("5", "plain", 2), ("4", "plain", 2), ("5", "each_node", 2)]
)
def test_signalled_jobs_end_and_go_on_exactly(version, kind, ranks, signals, tmp_path):
    trainings = Sharded(version, kind, tmp_path, ranks)
    ended = trainings.run("straight", "--stock", out=tmp_path / "straight-out", max_steps=STEPS)
    assert ended.codes == [0] * ranks
    straight, chance = trainings.record("straight"), random.Random(f"{kind}-{ranks}-{signals}")
    signalled(trainings, "undisturbed", chance, [], 0.0)
    longest = (tmp_path / "undisturbed.0").stat().st_mtime - (tmp_path / "undisturbed.begun").stat().st_mtime
    for number in range(TRIALS):
        trainings.out = tmp_path / f"out-{number}"
        said = signalled(trainings, f"start-{number}", chance, SIGNALS[signals], longest)
        assert "Fatal Python error" not in said
        if kind == "plain":  # what the Trainer saves by itself stands under its name while it is written
            assert all((path / "manifest.json").exists() for path in trainings.out.glob("checkpoint-*")), said
            assert len(whole(trainings.out)) == len(list(trainings.out.glob("checkpoint-*"))), said
        last = trainings.run(f"last-{number}", "--resume", "true", max_steps=STEPS)
        assert last.codes == [0] * ranks, last.said
        assert [{**one, "began": 0} for one in trainings.record(f"last-{number}")] == straight, said
