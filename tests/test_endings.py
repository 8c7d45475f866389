"""How a job ends: cleanly, by an exception, a signal, or without saying goodbye. Real processes throughout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.jobs import committed, events

SETTINGS = {"save_storage_interval": 1000}
FAILING_STORAGE = {"EASYCKPT_FAILPOINTS": "writer.shard.chunk@*=error:ENOSPC"}


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "run", tmp_path / "notes"


def test_an_end_without_with_is_drained(paths):
    root, notes = paths
    jobs.run(root, notes, "--without-with", steps=7, settings=SETTINGS)
    assert committed(root) == [7]


def test_an_end_without_with_whose_save_fails_has_an_exit_code(paths):
    root, notes = paths
    job = jobs.run(root, notes, "--without-with", steps=7, settings=SETTINGS, code=1, **FAILING_STORAGE)
    assert "NOT durable" in job.stderr
    assert committed(root) == []
    again = jobs.run(root, notes, steps=8, settings=SETTINGS)
    assert again.notes()[0]["tier"] == "memory"
    assert committed(root) == [8]


def test_a_with_block_whose_last_save_fails_has_an_exit_code(paths):
    root, notes = paths
    job = jobs.run(root, notes, steps=7, settings=SETTINGS, code=1, **FAILING_STORAGE)
    assert "SaveFailed" in job.stderr


@pytest.mark.parametrize("with_block", [True, False])
def test_an_exception_keeps_the_memory_and_is_not_replaced(paths, with_block):
    root, notes = paths
    arguments = [] if with_block else ["--without-with"]
    job = jobs.run(root, notes, "--raise-at=7", *arguments, steps=9, settings=SETTINGS, code=1, **FAILING_STORAGE)
    assert "RuntimeError: the training has failed" in job.stderr
    assert job.stderr.count("Traceback") == 1
    assert committed(root) == []
    again = jobs.run(root, notes, steps=9, settings=SETTINGS)
    assert (again.notes()[0]["restored"], again.notes()[0]["tier"]) == (7, "memory")


@pytest.mark.parametrize("with_block", [True, False])
def test_sys_exit_zero_is_a_clean_end(paths, with_block):
    root, notes = paths
    arguments = [] if with_block else ["--without-with"]
    jobs.run(root, notes, "--exit-at=7", *arguments, steps=9, settings=SETTINGS)
    assert committed(root) == [7]


def test_ctrl_c_keeps_the_memory(paths):
    root, notes = paths
    job = jobs.start(root, notes, "--step-seconds=0.01", steps=100_000, settings=SETTINGS)
    job.wait_for("finished", 5)
    os.kill(job.process.pid, signal.SIGINT)
    assert job.end() in (1, 130, -signal.SIGINT)
    assert "KeyboardInterrupt" in job.stderr
    (said,) = [line for line in job.stderr.splitlines() if "ended by" in line]
    pattern = (
        r"rank 0: ended by KeyboardInterrupt: the snapshots of steps \d+ to (\d+) stay in memory, the newest committed "
        rf"step is none; start again on this machine, or commit with `easyckpt rescue {root}`"
    )
    last = job.values("finished")[-1]
    assert last - 1 <= int(re.fullmatch(pattern, said)[1]) <= last
    again = jobs.run(root, notes, steps=last + 1, settings=SETTINGS)
    assert again.notes()[0]["tier"] == "memory"
    assert last - 1 <= again.notes()[0]["restored"] <= last


def test_what_an_exception_takes_along_is_said(paths):
    root, notes = paths
    settings = SETTINGS | {"memory_dir": str(root.parent / "no such directory")}
    job = jobs.run(root, notes, "--raise-at=7", steps=9, settings=settings, code=1)
    said = [line for line in job.stderr.splitlines() if "ended by" in line]
    assert len(said) == 1
    assert "rank 0: ended by RuntimeError: the snapshots of steps " in said[0]
    assert said[0].endswith(" are lost with this process's private memory; the newest committed step is none")


@pytest.mark.parametrize("kept", ["all is committed", "nothing is in memory"])
def test_an_exception_that_leaves_nothing_in_memory_alone_is_not_commented_on(paths, kept):
    root, notes = paths
    ends = "--save-at=7" if kept == "all is committed" else "--no-memory-rank=0"
    job = jobs.run(root, notes, "--raise-at=7", ends, steps=9, settings=SETTINGS, code=1)
    assert "ended by" not in job.stderr


def test_sigterm_flushes_the_newest_snapshot_while_the_main_thread_is_away(paths):
    root, notes = paths
    # The job's main thread sleeps for ever behind a lock held in C.
    job = jobs.start(root, notes, "--hold-at=7", steps=100, settings=SETTINGS)
    job.wait_for("finished", 7)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.end() == -signal.SIGTERM
    assert committed(root) in ([6], [7])  # 7 is sealed only by the next optimizer step


def test_sigterm_gives_a_loop_that_watches_time_to_end_cleanly(paths):
    root, notes = paths
    job = jobs.start(root, notes, "--watch-preempted", "--step-seconds=0.01", steps=100_000, settings=SETTINGS)
    job.wait_for("finished", 5)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.end() == 0, job.stderr
    last = job.values("preempted")[0]
    assert committed(root)[-1] == last == job.values("finished")[-1]


@pytest.mark.parametrize(("ranks", "with_block"), [(1, True), (2, True), (2, False)])
def test_a_signal_that_ends_the_loaders_workers_too_leaves_the_newest_snapshot_durable(paths, ranks, with_block):
    """Launchers signal whole process groups; torch then raises in the training loop.

    Here it always does before rank 0 has come to begin the flush, and while the other rank is in a collective.
    """
    root, notes = paths
    late = ["--pause-at=7", "--pause-seconds=60", "--leads-late=0.5", f"--mischief-rank={ranks - 1}"]
    arguments = ["--watch-preempted", "--workers=2", *late, *([] if with_block else ["--without-with"])]
    job = jobs.start(root, notes, *arguments, "--step-seconds=0.05", steps=100, ranks=ranks, settings=SETTINGS)
    job.wait_for("pauses", 7, ranks - 1)
    for rank in range(ranks):
        job.wait_until(lambda rank=rank: 6 in [e["step"] for e in events(root, rank, "SnapshotSealed")], "step 6", rank)
    os.killpg((job.store or job.process).pid, signal.SIGTERM)
    assert all(job.ends())
    assert "DataLoader worker" in job.values("text", ranks - 1)[0]
    (step,) = committed(root)
    assert 5 <= step <= 7
    for rank in range(ranks):
        assert f"rank {rank}: SIGTERM has come" in job.stderr
    assert f"rank 0: the newest committed step is {step}" in job.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_to_the_whole_process_group_ends_a_job_with_its_newest_snapshot_durable(paths, ranks):
    root, notes = paths
    arguments = ["--watch-preempted", "--workers=2", "--step-seconds=0.01"]
    job = jobs.start(root, notes, *arguments, steps=100_000, ranks=ranks, settings=SETTINGS)
    for rank in range(ranks):
        job.wait_for("finished", 7, rank)
        job.wait_until(lambda rank=rank: 6 in [e["step"] for e in events(root, rank, "SnapshotSealed")], "step 6", rank)
    os.killpg((job.store or job.process).pid, signal.SIGTERM)
    job.ends()
    assert committed(root)


@pytest.mark.parametrize("dies", ["before the signal", "while it is flushed for"])
def test_after_an_exception_a_signals_flush_that_needs_a_dead_rank_is_not_waited_for(paths, dies):
    root, notes = paths
    settings = SETTINGS | {"signal_deadline": 600, "exception_drain_timeout": 0.1}
    late = ["--pause-at=7", "--pause-seconds=60", "--leads-late=0.5", "--mischief-rank=0"]
    arguments = ["--watch-preempted", "--workers=1", *late, "--step-seconds=0.05"]
    job = jobs.start(root, notes, *arguments, steps=100, ranks=2, settings=settings)
    job.wait_for("pauses", 7)
    for rank in range(2):
        job.wait_until(lambda rank=rank: 6 in [e["step"] for e in events(root, rank, "SnapshotSealed")], "step 6", rank)
    first = signal.SIGKILL if dies == "before the signal" else signal.SIGSTOP
    os.kill(job.pid(1), first)
    if first == signal.SIGKILL:
        job.processes[1].communicate(jobs.WAIT_SECONDS)
    os.killpg(job.store.pid, signal.SIGTERM)
    if first == signal.SIGSTOP:
        job.wait_until(lambda: bool(events(root, 0, "FlushBegun")), "the flush")
        os.kill(job.pid(1), signal.SIGKILL)
    assert job.ends() == [1, -signal.SIGKILL]
    assert "the emergency flush is given up: rank 1 has died" in job.stderr
    assert "rank 0: ended by RuntimeError: the snapshots of steps" in job.stderr


@pytest.mark.parametrize("settings", [SETTINGS, {"save_storage_interval": 1}])
def test_a_loop_that_watches_and_hangs_on_a_dead_rank_is_not_given_until_the_deadline(paths, settings):
    """torchrun restarts the group as soon as the last rank has ended. The flush is given up, or there is none to do."""
    root, notes = paths
    arguments = ("--apart", "--watch-preempted", "--hold-at=7", "--step-seconds=0.05")
    job = jobs.start(root, notes, *arguments, steps=9, ranks=2, settings=settings | {"signal_deadline": 600})
    kind = "SnapshotSealed" if settings is SETTINGS else "FlushCommitted"
    for rank in range(2):
        job.wait_for("finished", 7, rank)
        job.wait_until(lambda rank=rank: 6 in [e["step"] for e in events(root, rank, kind)], f"{kind} 6", rank)
    os.kill(job.pid(1), signal.SIGKILL)
    job.processes[1].communicate(jobs.WAIT_SECONDS)
    os.kill(job.pid(0), signal.SIGTERM)
    assert job.ends() == [-signal.SIGTERM, -signal.SIGKILL]
    if settings is SETTINGS:
        assert "rank 0: the emergency flush is given up: rank 1 has died" in job.stderr
        said = job.stderr.partition("rank 0: the newest committed step is none; ")[2]
        assert "in memory for a restart on this machine" in said
        assert committed(root) == []
    again = jobs.run(root, notes, "--apart", steps=9, ranks=2, settings=settings)
    assert again.first("tier") == ["memory"] * 2


def test_a_signal_of_the_users_choice_flushes_too(paths):
    root, notes = paths
    job = jobs.start(root, notes, "--hold-at=7", steps=100, settings=SETTINGS | {"signals": ["SIGUSR1"]})
    job.wait_for("finished", 7)
    os.kill(job.process.pid, signal.SIGUSR1)
    assert job.end() == -signal.SIGUSR1
    assert committed(root) in ([6], [7])


def test_two_ranks_flush_together_when_one_gets_the_signal_and_when_all_do(paths):
    root, notes = paths
    job = jobs.start(root, notes, "--hold-at=7", "--step-seconds=0.05", steps=100, ranks=2, settings=SETTINGS)
    for rank in range(2):
        job.wait_for("finished", 7, rank)
        # The log is written behind the snapshot: by then rank 0 knows of it, and a signal flushes it.
        job.wait_until(lambda rank=rank: 6 in [e["step"] for e in events(root, rank, "SnapshotSealed")], "step 6")
    os.kill(job.pid(1), signal.SIGTERM)
    job.processes[1].communicate(jobs.WAIT_SECONDS)
    assert job.processes[1].returncode == -signal.SIGTERM
    assert committed(root) in ([6], [7])  # durable before the rank that was told to end has ended
    assert job.processes[0].poll() is None  # nobody has told this one; under torchrun the agent does
    job.kill()
    job = jobs.start(root, notes, "--hold-at=12", "--step-seconds=0.05", steps=100, ranks=2, settings=SETTINGS)
    for rank in range(2):
        job.wait_for("finished", 12, rank)
        job.wait_until(lambda rank=rank: 11 in [e["step"] for e in events(root, rank, "SnapshotSealed")], "step 11")
    for rank in range(2):
        os.kill(job.pid(rank), signal.SIGTERM)
    assert job.ends() == [-signal.SIGTERM] * 2
    assert committed(root)[-1] in (11, 12)
    assert job.first("tier") == ["memory"] * 2


def test_a_process_group_destroyed_before_close_does_no_harm(paths):
    root, notes = paths
    arguments = ["--destroy-group", "--step-seconds=0.05"]
    job = jobs.run(root, notes, *arguments, steps=12, ranks=2, settings={"save_storage_interval": 5})
    assert committed(root)[-1] == 12
    assert len(job.digest) == 2


def test_a_second_job_on_the_same_root_is_refused_while_the_first_lives(paths, tmp_path):
    root, notes = paths
    job = jobs.start(root, notes, "--hold-at=3", steps=100, settings=SETTINGS)
    job.wait_for("finished", 3)
    second = jobs.run(root, tmp_path / "other", steps=5, settings=SETTINGS, code=1)
    assert "RootInUse" in second.stderr
    assert f"{root} is in use: " in second.stderr
    assert f"belongs to the live process {job.processes[0].pid} " in second.stderr
    job.kill()
    third = jobs.run(root, notes, steps=5, settings=SETTINGS)  # at once: the owner is proven dead
    assert third.notes()[0]["tier"] == "memory"


@pytest.mark.parametrize(("covered", "error"), [("run", "SaveFailed"), (".", "StorageError")])
def test_a_root_that_the_nodes_do_not_share_is_told_before_anything_is_relied_on(paths, covered, error):
    """At the first save, where the other node has a directory of that name; at once where it has none."""
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0:
        pytest.skip("no mount namespace of its own is allowed here")
    root, notes = paths
    arguments = (f"--other-disk={root.parent / covered}", "--mischief-rank=1", "--step-seconds=0.05")
    job = jobs.start(root, notes, *arguments, steps=20, ranks=2, settings=SETTINGS)
    assert job.ends() == [1, 1]
    assert job.last("error")[1] == error
    assert all("on a file system that all nodes share?" in text for text in job.last("text"))
    assert committed(root) == []


@pytest.mark.parametrize("who", [0, 1])
def test_an_exception_on_one_rank_alone_waits_for_nothing_that_does_not_run(paths, who):
    """The others are in their loops, and say nothing about the end: only a flush would be worth waiting for."""
    root, notes = paths
    arguments = ("--raise-at=7", f"--mischief-rank={who}", "--hold-at=7")
    job = jobs.start(root, notes, *arguments, steps=9, ranks=2, settings=SETTINGS)
    job.wait_until(lambda: bool(job.values("error", who)), "the exception", who)
    job.kill()
    assert job.values("error", who) == ["RuntimeError"]
    assert "still running" not in job.stderr


def test_whoever_waits_for_a_save_that_an_exception_has_overtaken_is_told(paths):
    """The snapshot of rank 1 is not whole before a step that does not come, and rank 0 has left meanwhile."""
    root, notes = paths
    arguments = ("--width=160", "--ask-at=7", "--raise-at=7", "--mischief-rank=0", "--hold-at=7")
    job = jobs.start(root, notes, *arguments, steps=9, ranks=2, settings=SETTINGS)
    job.wait_until(lambda: bool(job.values("error", 0)), "the exception", 0)
    job.kill()
    assert job.values("error", 0) == ["RuntimeError"]
    assert job.values("answer", 0) == ["SaveFailed"]


def test_an_interrupt_while_a_snapshot_is_sealed_ends_the_job(paths):
    """Wherever it comes, nobody may wait for the seal that never comes now."""
    root, notes = paths
    job = jobs.start(root, notes, "--interrupt-seal-of=7", steps=20, settings=SETTINGS)
    assert job.end() in (1, 130, -signal.SIGINT)
    assert "KeyboardInterrupt" in job.stderr
    again = jobs.run(root, notes, steps=20, settings=SETTINGS)
    assert again.notes()[0]["tier"] == "memory"
    assert again.notes()[0]["restored"] in (6, 7)
