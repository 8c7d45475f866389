"""Exit code 0 means that the last step is durable, also where its snapshot was skipped or discarded. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.jobs import Job, committed, events

STEPS = 12
#: One slot is held by the flush of step 10 and the other one has step 11: there is none for the last step.
SETTINGS = {"slots": 2, "save_storage_interval": 10}
#: Parameters of 100 KB are copied in the background, and small ones are not.
WIDE = "--width=160"
ADVICE = "save(step, wait=True)"


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "run", tmp_path / "notes"


def behind_a_slow_flush(paths: tuple[Path, Path], *arguments: str) -> Job:
    """Run a job whose last steps all pass within the flush of step 10."""
    root, notes = paths
    there = notes.with_name("flushing")
    held = {"EASYCKPT_FAILPOINTS": f"writer.shard.begin=hold:{there}"}
    job = jobs.start(root, notes, WIDE, *arguments, steps=STEPS, settings=SETTINGS, **held)
    job.wait_until(lambda: bool(job.values("digest")), "its last step")
    job.wait_until(there.exists, "the flush of step 10")
    there.with_name("flushing.go").touch()
    job.end()
    assert [event["step"] for event in events(root, 0, "SnapshotSkipped")] == [STEPS]
    return job


def digest_of_the_newest(paths: tuple[Path, Path], ranks: int = 1) -> list[str]:
    root, notes = paths
    again = jobs.run(root, notes, WIDE, steps=STEPS, ranks=ranks, settings=SETTINGS)
    assert again.first("restored") == [STEPS] * ranks
    return again.digest


@pytest.mark.parametrize("with_block", [True, False])
def test_a_skipped_last_snapshot_is_taken_at_the_end(paths, with_block):
    job = behind_a_slow_flush(paths, *([] if with_block else ["--without-with"]))
    assert job.end() == 0, job.stderr
    assert committed(paths[0]) == [10, STEPS]
    assert digest_of_the_newest(paths) == job.digest


@pytest.mark.parametrize(
    ("then", "named"),
    [
        ("buffer", "model.1.running_mean"),
        ("generator", "easyckpt.rng.torch"),
        ("number", "progress"),
        ("parameter", "model.0.weight"),
        ("step", "an optimizer has stepped"),
    ],
)
def test_a_skipped_last_snapshot_that_comes_too_late_is_not_silent(paths, then, named):
    job = behind_a_slow_flush(paths, f"--then={then}")
    assert job.end() == 1
    assert job.last("error") == ["SaveFailed"]
    text = job.values("text")[-1]
    for part in (f"step {STEPS},", "rank 0: no slot is free", named, "newest committed step is 11", ADVICE):
        assert part in text
    assert committed(paths[0]) == [10, 11]


def test_an_end_without_with_that_has_lost_the_last_step_has_an_exit_code(paths):
    job = behind_a_slow_flush(paths, "--without-with", "--then=generator")
    assert job.end() == 1
    assert "NOT durable" in job.stderr
    assert f"step {STEPS}," in job.stderr


def test_a_torn_last_snapshot_is_not_silent(paths):
    root, notes = paths
    job = jobs.run(root, notes, WIDE, f"--tear-at={STEPS}", steps=STEPS, settings=SETTINGS | {"slots": 4}, code=1)
    assert job.last("error") == ["SaveFailed"]
    text = job.values("text")[-1]
    for part in (f"step {STEPS},", "rank 0: its snapshot was discarded", "model.0.weight", ADVICE):
        assert part in text
    assert committed(root)[-1] == STEPS - 1


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_skips_the_last_snapshot_takes_it_at_the_end(paths, rank):
    root, notes = paths
    arguments = [WIDE, f"--skip-at={STEPS}", f"--mischief-rank={rank}", "--until-the-end", "--step-seconds=0.02"]
    job = jobs.run(root, notes, *arguments, steps=STEPS, ranks=2, settings=SETTINGS)
    assert [event["step"] for event in events(root, rank, "SnapshotSkipped")][-1] == STEPS
    assert committed(root)[-1] == STEPS
    assert digest_of_the_newest(paths, ranks=2) == job.digest


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([f"--skip-at={STEPS}", "--until-the-end", "--then=generator"], "no slot is free"),
        ([f"--tear-at={STEPS}"], "its snapshot was discarded"),
    ],
    ids=["skips", "discards"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_raise_what_one_of_them_has_lost(paths, rank, arguments, reason):
    root, notes = paths
    arguments = [WIDE, *arguments, f"--mischief-rank={rank}", "--step-seconds=0.02"]
    job = jobs.start(root, notes, *arguments, steps=STEPS, ranks=2, settings=SETTINGS | {"slots": 4})
    assert job.ends() == [1, 1], job.stderr
    assert job.last("error") == ["SaveFailed"] * 2
    texts = job.last("text")
    assert texts[0] == texts[1]
    assert f"rank {rank}: {reason}" in texts[0]
    assert f"rank {1 - rank}:" not in texts[0]
    assert committed(root)[-1] == STEPS - 1


def test_a_load_begins_anew_and_owes_nothing(paths):
    """Restored and ended at once: there is nothing that was handed over."""
    root, notes = paths
    jobs.run(root, notes, WIDE, f"--save-at={STEPS}", steps=STEPS, settings=SETTINGS)
    jobs.run(root, notes, WIDE, "--then=generator", steps=STEPS, settings=SETTINGS)
    assert committed(root)[-1] == STEPS
