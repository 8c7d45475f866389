"""A wrapped Trainer killed at moments chosen by chance, inside writes and steps, goes on as if it never was.

Each history kills several starts of one training, one after the other, and then lets it end.
"""

from __future__ import annotations

import random

import pytest

from tests.trainers.launch import VERSIONS
from tests.trainers.matrix import Record, Trial, differences, lose_snapshots
from tests.trainers.scenarios import TABLE

#: Failpoint -> how often a start comes to it, about.
WRITES = {
    "writer.shard.begin": 30, "writer.shard.chunk": 30, "writer.shard.written": 30, "writer.shard.synced": 30,
    "commit.reported": 3, "commit.manifest.written": 3, "commit.rename.before": 3, "commit.rename.after": 3,
    "commit.durable": 3, "commit.latest.after": 3, "storage.rename.after": 3, "storage.sync_dir.before": 8,
    "storage.remove.after": 3, "line.opened": 1, "storage.replace.written": 4,
}  # fmt: skip
SNAPSHOTS = {
    "slot.begin": 9,
    "slot.seal.before": 9,
    "slot.seal.objects": 9,
    "slot.seal.payload": 9,
    "slot.seal.after": 9,
}
MOMENTS = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log")
KILLS, STEPS = 3, 20


def a_moment(chance: random.Random, begun: int) -> list[object]:
    """Arguments of a job that dies somewhere, if it comes there."""
    kind = chance.choice(["write", "write", "snapshot", "step"])
    if kind == "step":
        return ["--until", chance.randint(begun, STEPS - 1), "--moment", chance.choice(MOMENTS)]
    points = WRITES if kind == "write" else SNAPSHOTS
    name = chance.choice(sorted(points))
    return ["--armed", f"{name}@{chance.randint(1, points[name])}=kill"]


def history(seed: int, trial: Trial, straight: list[Record]) -> int:
    """Returns how many starts were really killed."""
    chance, out, killed = random.Random(seed), trial.directory / f"history-{seed}", 0
    told: list[str] = []
    for number in range(KILLS):
        how = a_moment(chance, 1 + 4 * number)
        name = f"history-{seed}-{number}"
        ended = trial.run(out, name, "--mode", "wrapped", "--resume", *how)
        told.append(f"{' '.join(map(str, how))}: {ended.codes}")
        if trial.records(name):
            break  # it came to its end before that moment
        assert set(ended.codes) == {-9}, f"{told} {ended.complaint}"
        killed += 1
        if chance.random() < 0.2:
            lose_snapshots()
            told.append("memory lost")
    assert differences(straight, trial.resumed(out, f"history-{seed}-last")) == [], told
    return killed


@pytest.mark.parametrize(("version", "seeds"), [("4", range(2)), ("5", range(2, 4))])
def test_some_histories(version, seeds, tmp_path):
    trial = Trial(TABLE["mlm_ga2"], version, tmp_path)
    straight = trial.straight()
    killed = sum(history(seed, trial, straight) for seed in seeds)
    assert killed >= len(seeds)


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["mlm_ga2", "iter_multi", "eval_epoch", "ddp_mlm"])
def test_many_histories(name, version, tmp_path, campaign_part):
    trial = Trial(TABLE[name], version, tmp_path)
    straight = trial.straight()
    killed = sum(history(seed, trial, straight) for seed in range(10))
    campaign_part("transformers_kills", seed=0, kills=killed, cases=[f"{name} on transformers {version}"])
