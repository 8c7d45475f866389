"""Ranks that die, fail, hang or lack something, each at every moment of a save: nobody waits for ever, all agree.

Most groups are forked with torchrun's environment, because torchrun ends all workers when one dies: whether the others
would have waited for it for ever can only be seen without it. The last tests are under torchrun itself.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path

import pytest

from easyckpt.memory.adoption import find_slots
from easyckpt.memory.place import user_name
from easyckpt.memory.slot import SlotMeta
from tests.support import jobs
from tests.support.jobs import committed, events

STEPS = 12
#: Small, so that a test sees them pass; a rank that waits longer than all of them together is found out.
TIMEOUTS = {
    "peer_timeout": 10.0,
    "commit_timeout": 3.0,
    "close_timeout": 3.0,
    "exception_drain_timeout": 1.0,
    "lease_timeout": 10.0,
    "lease_interval": 1.0,
}
SETTINGS = {"save_storage_interval": 5, **TIMEOUTS}
#: For jobs of which none is to be waited for in vain: many ranks start slowly on few cores.
UNHURRIED = {"peer_timeout": 30.0, "commit_timeout": 30.0, "close_timeout": 30.0}
#: What all timeouts may add up to, on a machine that is busy with other things.
PATIENCE = 60.0

ANY_RANK = ["writer.shard.begin", "writer.shard.synced", "writer.index.synced"]
RANK_0 = ["commit.reported", "commit.rename.before", "commit.rename.after", "commit.durable"]
CASES = [(point, who) for point in ANY_RANK for who in ("rank 0", "another", "all")]
CASES += [(point, who) for point in RANK_0 for who in ("rank 0", "all")]
#: What always runs; the others are left to `make soak`.
SAMPLE = {
    2: [
        ("writer.shard.begin", "another"),
        ("writer.shard.synced", "rank 0"),
        ("writer.index.synced", "another"),
        ("writer.index.synced", "all"),
        ("commit.reported", "all"),
        ("commit.rename.before", "rank 0"),
        ("commit.rename.after", "rank 0"),
        ("commit.durable", "all"),
    ],
    4: [("writer.index.synced", "rank 0"), ("commit.rename.after", "rank 0")],
}
MATRIX = [
    pytest.param(
        ranks, point, who, id=f"{ranks}-{who}-{point}", marks=() if (point, who) in SAMPLE[ranks] else pytest.mark.soak
    )
    for ranks in (2, 4)
    for point, who in CASES
]
WITHOUT_RANK_0 = [
    pytest.param("agent", "writer.shard.begin", id="agent-writer.shard.begin"),
    pytest.param("agent", "commit.durable", id="agent-commit.durable"),
    pytest.param("rank 0", "commit.rename.before", id="rank 0-commit.rename.before"),
    pytest.param("rank 0", "commit.rename.after", id="rank 0-commit.rename.after"),
    pytest.param("agent", "commit.rename.before", marks=pytest.mark.soak, id="agent-commit.rename.before"),
    pytest.param("agent", "commit.rename.after", marks=pytest.mark.soak, id="agent-commit.rename.after"),
    pytest.param("rank 0", "writer.shard.begin", marks=pytest.mark.soak, id="rank 0-writer.shard.begin"),
    pytest.param("rank 0", "commit.durable", marks=pytest.mark.soak, id="rank 0-commit.durable"),
]
#: Of `make soak`, which runs no others of these.
SOAK = [case for case in [*MATRIX, *WITHOUT_RANK_0] if case.marks]


@pytest.fixture
def soaked(request, campaign_part):
    """Counts the death if it passes, where it is one of those of `make soak`."""
    if request.node.get_closest_marker("soak"):
        campaign_part("ranks_that_die", seed=None, tests=len(SOAK), deaths=1)


@functools.cache
def straight(directory: Path, ranks: int, width: int = 64) -> tuple[str, ...]:
    """The digests of a run that nothing happens to."""
    name = f"{ranks}-{width}"
    arguments = (f"--width={width}",)
    paths = directory / name, directory / f"notes-{name}"
    return tuple(jobs.run(*paths, *arguments, steps=STEPS, ranks=ranks, settings=SETTINGS).digest)


@pytest.fixture(scope="session")
def straight_directory(tmp_path_factory):
    return tmp_path_factory.mktemp("straight")


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "run", tmp_path / "notes"


def armed(point: str, action: str, rank: int) -> dict[str, str]:
    return {"EASYCKPT_FAILPOINTS": f"{point}={action}", "EASYCKPT_FAILPOINTS_RANK": str(rank)}


def goes_on(root, notes, ranks, least, directory, width=64):
    """Start again: all ranks hold the same step, not below `least`, and end as if nothing had happened."""
    # save() of the last step never skips; on a busy machine a loop without any computing may skip snapshots (counted).
    arguments = [f"--width={width}", f"--save-at={STEPS}"]
    again = jobs.run(root, notes, *arguments, steps=STEPS, ranks=ranks, settings=SETTINGS | UNHURRIED)
    steps, tiers = again.first("restored"), again.first("tier")
    assert len(set(steps)) == len(set(tiers)) == 1
    assert steps[0] >= least, f"restored {steps}, but every rank held {least}"
    assert committed(root)[-1] == STEPS
    assert tuple(again.digest) == straight(directory, ranks, width)
    return steps[0], tiers[0]


def every_rank_finished(job) -> int:
    return min(max(job.values("finished", rank), default=0) for rank in range(job.world_size))


@pytest.mark.parametrize(("ranks", "point", "who"), MATRIX)
def test_who_dies_when(paths, tmp_path, straight_directory, soaked, ranks, point, who):
    """A group that trains together: the others fail in their next collective and end; the restart loses nothing."""
    root, notes = paths
    at = 0 if who == "rank 0" or point in RANK_0 else ranks - 1
    action = f"hold:{tmp_path}/there" if who == "all" else "kill"
    arguments = ["--step-seconds=0.02", *(["--hold-at=11"] if who == "all" else [])]
    job = jobs.start(root, notes, *arguments, steps=STEPS, ranks=ranks, settings=SETTINGS, **armed(point, action, at))
    if who == "all":
        job.wait_until((tmp_path / "there").exists, point)
        job.kill()
    else:
        codes = job.ends(PATIENCE)
        assert codes[at] == -signal.SIGKILL
        assert all(codes), f"a rank ended well in a job whose save died: {codes}"
    durable = point in ("commit.rename.after", "commit.durable")
    assert committed(root) == ([5] if durable else [])
    if durable:
        assert not [text for text in job.last("text") if text and "step 5 was not committed (failed)" in text]
    goes_on(root, notes, ranks, every_rank_finished(job) - 2, straight_directory)


# -- ranks that nothing but easyckpt joins: what it does by itself ----------------------------------------------------


def ends_of_survivors(job, dead):
    codes = job.ends(PATIENCE)
    assert codes[dead] == -signal.SIGKILL
    for rank in range(job.world_size):
        if rank != dead:
            assert codes[rank] == 1
            assert job.last("error")[rank] in ("SaveFailed", "OutcomeUnknown", "PeerTimeout", "PeerError", "PeerFailed")
    return [text for rank, text in enumerate(job.last("text")) if rank != dead]


@pytest.mark.parametrize(("store", "point"), WITHOUT_RANK_0)
def test_without_rank_0_the_others_do_not_wait_for_ever_nor_call_it_failed(paths, soaked, point, store):
    root, notes = paths
    durable = point in ("commit.rename.after", "commit.durable")
    settings = SETTINGS | {"save_storage_interval": 1000}
    arguments = ["--apart", "--save-at=5", "--step-seconds=0.02"]
    fault = armed(point, "kill", 0)
    job = jobs.start(root, notes, *arguments, steps=100_000, ranks=2, settings=settings, STORE=store, **fault)
    texts = ends_of_survivors(job, 0)
    assert committed(root) == ([5] if durable else [])
    if durable:
        assert job.last("saved")[1] == 5  # the rank that is left has looked into the root
    else:
        assert job.last("asked")[1] == 5
        assert job.last("saved")[1] is None
        assert job.last("error")[1] == "OutcomeUnknown", texts
    again = jobs.run(root, notes, "--apart", steps=STEPS, ranks=2, settings=SETTINGS)
    assert again.first("restored") == [5, 5]


@pytest.mark.parametrize("ranks", [2, 4])
def test_without_another_rank_the_others_are_told_who_is_missing(paths, ranks):
    root, notes = paths
    arguments = ["--apart", "--step-seconds=0.02"]
    fault = armed("writer.shard.begin", "kill", ranks - 1)
    job = jobs.start(root, notes, *arguments, steps=100_000, ranks=ranks, settings=SETTINGS, **fault)
    texts = ends_of_survivors(job, ranks - 1)
    assert all(f"rank {ranks - 1}" in text for text in texts), texts
    assert committed(root) == []
    # The attempt was abandoned, and removed; another one may be on its way when the survivors end.
    assert not list(root.glob(".step-00000005.*-000001.tmp"))


@pytest.mark.parametrize("hung", [0, 1])
def test_a_rank_that_hangs_is_waited_for_in_bounds(paths, hung):
    """SIGSTOP: its sockets stay open, its locks stay held."""
    root, notes = paths
    job = jobs.start(root, notes, "--apart", "--step-seconds=0.02", steps=100_000, ranks=2, settings=SETTINGS)
    for rank in range(2):
        job.wait_for("finished", 7, rank)
    os.kill(job.pid(hung), signal.SIGSTOP)
    _, stderr = job.processes[1 - hung].communicate(PATIENCE)
    assert job.last("error")[1 - hung] in ("SaveFailed", "OutcomeUnknown", "PeerTimeout", "PeerError"), stderr
    assert f"rank {hung}" in job.last("text")[1 - hung]
    job.kill()


def test_a_storage_that_hangs_for_good_is_given_up_on_all_ranks(paths, tmp_path):
    root, notes = paths
    settings = SETTINGS | {"save_storage_interval": 1000, "peer_timeout": 6.0, "commit_timeout": 2.0}
    fault = armed("commit.rename.before", f"hold:{tmp_path}/there", 0)
    arguments = ["--save-at=5", "--step-seconds=0.02"]
    job = jobs.start(root, notes, *arguments, steps=100_000, ranks=2, settings=settings, **fault)
    assert job.ends(PATIENCE) == [1, 1]
    assert job.last("error") == ["OutcomeUnknown"] * 2
    assert job.last("at") == [5, 5]


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_io_error_of_one_rank_reaches_all_at_the_same_step(paths, straight_directory, ranks):
    root, notes = paths
    fault = armed("writer.shard.chunk", "error:ENOSPC", ranks - 1)
    arguments = ["--step-seconds=0.02", "--hears-late=0.1", "--mischief-rank=1"]  # steps later than rank 0
    job = jobs.start(root, notes, *arguments, steps=1000, ranks=ranks, settings=SETTINGS, **fault)
    assert job.ends(PATIENCE) == [1] * ranks
    assert job.last("error") == ["SaveFailed"] * ranks
    assert len(set(job.last("at"))) == 1
    assert all(f"rank {ranks - 1}" in text and "No space left" in text for text in job.last("text"))
    assert 5 not in committed(root)
    assert not list(root.glob(".step-00000005*"))
    if job.last("at")[0] < STEPS:  # else it went past the end of the run that it would be compared with
        goes_on(root, notes, ranks, every_rank_finished(job) - 2, straight_directory)


def test_an_attempt_that_is_given_up_before_a_rank_has_looked_is_not_waited_for(paths):
    """Rank 1 is busy with other things and sees the attempt only after it has failed on rank 0.

    With these timeouts nobody would live to see the end if it were waited for.
    """
    root, notes = paths
    settings = {"peer_timeout": 1000.0, "commit_timeout": 1000.0, "close_timeout": 1000.0, "on_failure": "continue"}
    fault = armed("writer.shard.begin", "error:ENOSPC", 0)
    arguments = ["--step-seconds=0.3", "--hears-late=0.5", "--mischief-rank=1"]
    settings |= {"save_storage_interval": 5}
    job = jobs.run(root, notes, *arguments, steps=STEPS, ranks=2, settings=settings, **fault)
    for rank in range(2):
        (failed,) = events(root, rank, "FlushFailed")
        assert "rank 0" in failed["reason"]
        assert "No space left" in failed["reason"]
    assert committed(root)[-1] == STEPS
    assert job.values("finished", 1)[-1] == STEPS


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_validation_after_a_due_save_may_take_longer_than_any_timeout(paths, ranks):
    """The snapshot of the due step is whole only at the next optimizer step. Of two ranks one validates."""
    root, notes = paths
    settings = SETTINGS | {"peer_timeout": 6.0, "commit_timeout": 2.0}
    arguments = ["--width=160", "--step-seconds=0.05", "--pause-at=10", "--pause-seconds=8", "--mischief-rank=0"]
    job = jobs.run(root, notes, *arguments, steps=STEPS, ranks=ranks, settings=settings)
    assert not [event for rank in range(ranks) for event in events(root, rank, "FlushFailed")]
    assert committed(root) == [5, 10, 12]
    assert job.values("finished")[-1] == STEPS


def test_a_rank_without_memory_does_not_wait_for_a_save_that_the_others_skip(paths):
    root, notes = paths
    arguments = ["--no-memory-rank=1", "--skip-at=10", "--mischief-rank=0", "--step-seconds=0.05"]
    job = jobs.run(root, notes, *arguments, steps=STEPS, ranks=2, settings={"save_storage_interval": 5})
    assert [event["step"] for event in events(root, 1, "FlushSkipped")] == [10]
    assert committed(root) == [5, 12]
    assert job.values("finished", 1)[-1] == STEPS


@pytest.mark.parametrize("faulty", [0, 1])
def test_an_io_error_that_is_tolerated_costs_one_checkpoint_on_all_ranks(paths, straight_directory, faulty):
    root, notes = paths
    fault = armed("writer.shard.written", "error:EIO", faulty)
    settings = SETTINGS | {"on_failure": "continue"}
    job = jobs.start(root, notes, "--step-seconds=0.1", steps=STEPS, ranks=2, settings=settings, **fault)
    assert job.ends() == [0, 0], job.stderr
    assert committed(root) == [10, 12]
    assert tuple(job.digest) == straight(straight_directory, 2)
    for rank in range(2):
        assert [event["step"] for event in events(root, rank, "FlushFailed")] == [5]


def test_a_rename_that_may_not_be_durable_is_not_called_failed(paths):
    root, notes = paths
    fault = armed("commit.rename.after", "error:EIO", 0)
    arguments = ["--save-at=5", "--step-seconds=0.02"]
    job = jobs.start(root, notes, *arguments, steps=1000, ranks=2, settings=SETTINGS, **fault)
    assert job.ends(PATIENCE) == [1, 1]
    assert job.last("error") == ["OutcomeUnknown"] * 2
    assert job.last("at") == [5, 5]
    assert committed(root) == [5]


@pytest.mark.parametrize(("mischief", "ranks"), [("tear", 2), ("skip", 2), ("tear", 4)])
def test_one_rank_without_the_due_snapshot_makes_all_flush_another(paths, straight_directory, mischief, ranks):
    root, notes = paths
    width = 160  # small parameters are copied before anybody could write to them
    arguments = [f"--{mischief}-at=5", f"--mischief-rank={ranks - 1}", "--hold-at=8", "--step-seconds=0.1"]
    job = jobs.start(
        root, notes, *arguments, f"--width={width}", steps=STEPS, ranks=ranks, settings=SETTINGS | UNHURRIED
    )
    for rank in range(ranks):
        job.wait_for("finished", 8, rank)
    job.wait_until(lambda: bool(events(root, ranks - 1, "FlushCommitted")), "a commit")
    kind = "SnapshotDiscarded" if mischief == "tear" else "SnapshotSkipped"
    for rank in range(ranks):
        assert [event["step"] for event in events(root, rank, kind)] == ([5] if rank == ranks - 1 else [])
    steps = committed(root)
    assert len(steps) == 1
    assert steps[0] in (3, 4, 6, 7)  # the floor when it was decided: 5 it cannot be
    job.kill()
    assert goes_on(root, notes, ranks, 7, straight_directory, width) == (7, "memory")


def test_what_was_decided_before_a_rank_came_to_it_is_decided_there_too(paths):
    """Rank 0 is ahead, and its flush is still running: it skips steps that are not due on rank 1 yet."""
    root, notes = paths
    settings = SETTINGS | {"save_storage_interval": 1}
    arguments = ["--hurried", "--apart", "--mischief-rank=1", "--lag=0.1", "--wait-at-end=20"]
    fault = armed("writer.shard.chunk@*", "pause:0.3", 0)
    job = jobs.start(root, notes, *arguments, steps=10, ranks=2, settings=settings, **fault)
    assert job.ends() == [0, 0], job.stderr
    ends = [[event["step"] for event in events(root, rank, "FlushSkipped")] for rank in range(2)]
    assert ends[0] == ends[1] != []


def test_the_newest_snapshot_that_one_rank_lacks_is_restored_by_none(paths, straight_directory):
    root, notes = paths
    arguments = ["--skip-at=8", "--mischief-rank=1", "--hold-at=9", "--step-seconds=0.05"]
    job = jobs.start(root, notes, *arguments, steps=STEPS, ranks=2, settings=SETTINGS)
    for rank in range(2):
        job.wait_for("finished", 9, rank)
    job.kill()
    assert goes_on(root, notes, 2, 7, straight_directory) == (7, "memory")


def test_ranks_with_a_single_slot_each_skip_and_are_not_killed(paths):
    root, notes = paths
    settings = SETTINGS | UNHURRIED | {"slots": 1, "save_storage_interval": 7}
    job = jobs.run(root, notes, "--hurried", "--width=300", steps=150, ranks=2, settings=settings)
    assert job.last("counts")[0].get("FlushFailed", 0) == 0
    assert committed(root)[-1] == 150


def test_replicas_that_have_drifted_apart_are_kept_as_they_are_with_a_warning(paths, memory_dir):
    root, notes = paths
    drift = ["--drift-at=3", "--mischief-rank=1", "--save-at=6"]
    first = jobs.run(root, notes, *drift, steps=6, ranks=2, settings=SETTINGS)
    assert first.digest[0] != first.digest[1]
    again = jobs.run(root, notes, steps=6, ranks=2, settings=SETTINGS)
    assert again.first("tier") == ["storage"] * 2
    assert again.digest == first.digest
    warned = [[event["message"] for event in events(root, rank, "Warned")] for rank in range(2)]
    assert sum("should be the same on all ranks" in message for message in warned[0]) == 1
    assert not any("should be the same on all ranks" in message for message in warned[1])


def test_a_rank_whose_storage_is_slow_is_waited_for_as_long_as_it_gets_on(paths, memory_dir, tmp_path):
    """Longer than peer_timeout: for its part at the load, and for what rank 0 rolls forward before the first save."""
    root, notes = paths
    state, there = "--width=3000", tmp_path / "there"
    fault = armed("commit.rename.before", f"hold:{there}", 0)
    job = jobs.start(root, notes, state, "--hold-at=6", steps=6, ranks=2, settings=SETTINGS, **fault)
    job.wait_until(there.exists, "the rename")
    job.kill()
    assert committed(root) == []
    for path, _ in find_slots(str(memory_dir), user_name()):
        os.unlink(path)
    settings = SETTINGS | UNHURRIED | {"peer_timeout": 2.0}
    slow = ["--slow-reads=0.5", "--mischief-rank=0"]
    again = jobs.run(root, notes, state, *slow, "--save-at=6", steps=6, ranks=2, settings=settings)
    assert again.first("restored") == [5, 5]
    assert again.first("tier") == ["storage"] * 2
    assert committed(root) == [5, 6]


# -- damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("damage", ["shard", "index", "gone"])
def test_one_ranks_damaged_shard_makes_all_fall_back_together(paths, straight_directory, damage):
    root, notes = paths
    jobs.run(root, notes, "--step-seconds=0.05", "--save-at=10", steps=10, ranks=2, settings=SETTINGS)
    assert committed(root) == [5, 10]
    path = root / "step-00000010" / f"rank-00001.{'json' if damage == 'index' else 'safetensors'}"
    if damage == "gone":
        path.unlink()
    else:
        flip(path, path.stat().st_size - 40)
    assert goes_on(root, notes, 2, 5, straight_directory) == (5, "storage")
    for rank in range(2):
        warned = [event["message"] for event in events(root, rank, "Warned")]
        assert any("step-00000010" in message and "passed over" in message for message in warned)


@pytest.mark.parametrize("damage", ["header", "objects"])
def test_one_ranks_damaged_memory_makes_all_fall_back_together(paths, memory_dir, straight_directory, damage):
    root, notes = paths
    job = jobs.start(root, notes, "--hold-at=9", "--step-seconds=0.05", steps=STEPS, ranks=2, settings=SETTINGS)
    for rank in range(2):
        job.wait_for("finished", 9, rank)
    job.kill()
    found = find_slots(str(memory_dir), user_name())
    slots = {meta.step: (Path(path), meta) for path, meta in found if isinstance(meta, SlotMeta) and meta.rank == 1}
    path, meta = slots[8]
    capacity = int.from_bytes(path.read_bytes()[24:32], "little")  # of the image; what else there is lies behind it
    flip(path, 80 if damage == "header" else 4096 + capacity + meta.static_bytes + 40)
    assert goes_on(root, notes, 2, 7, straight_directory) == (7, "memory")


# -- under torchrun ---------------------------------------------------------------------------------------------------


def test_torchrun_starts_the_group_again_from_memory_whoever_dies_and_leaves_a_checkpoint(paths, straight_directory):
    """Rank 1 dies, rank 0 dies, torchrun itself is told to end. One job, since torchrun's workers start slowly."""
    root, notes = paths
    settings = SETTINGS | {"save_storage_interval": 1000}
    options = ("--max-restarts=3", "--monitor-interval=0.1")
    arguments = ["--mischief-rank=1", "--die-at=4", "--hold-at=9", "--step-seconds=0.1"]
    job = jobs.start(root, notes, *arguments, steps=STEPS, ranks=2, settings=settings, torchrun=options)
    job.wait_until(lambda: len(job.values("restored")) >= 2, "its second start")
    begun = len(job.values("finished"))
    job.wait_until(lambda: len(job.values("finished")) >= begun + 4, "four steps more")
    os.kill(job.pid(0), signal.SIGKILL)
    for rank in range(2):
        job.wait_until(lambda rank=rank: len(job.values("restored", rank)) >= 3, "its third start")
        job.wait_until(lambda rank=rank: job.values("finished", rank)[-1] == 9, "step 9")
        starts = job.values("restored", rank)
        assert starts[0] == 0
        assert starts[1] in (2, 3, 4)
        assert starts[2] >= starts[1] + 2
        assert job.values("tier", rank)[1:] == ["memory", "memory"]
    assert job.values("restored", 0) == job.values("restored", 1)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.end() != 0
    assert committed(root)[-1] in (8, 9)
    goes_on(root, notes, 2, 8, straight_directory)


def test_nobody_comes(paths):
    """A rank that dies before it meets the others: they give up by their timeout."""
    root, notes = paths
    begun = time.monotonic()
    fault = armed("storage.makedirs.made", "kill", 0)
    job = jobs.start(root, notes, "--apart", steps=STEPS, ranks=2, settings=SETTINGS, **fault)
    ends_of_survivors(job, 0)
    assert job.last("at")[1] == 0
    assert time.monotonic() - begun < PATIENCE
