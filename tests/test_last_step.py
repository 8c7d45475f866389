"""Exit code 0 means that the last step is durable, also where its snapshot was skipped or discarded. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import easyckpt
from easyckpt.errors import SaveFailed
from easyckpt.memory import budget
from tests.support import jobs
from tests.support.job import digest_of, leave_no_slot
from tests.support.jobs import Job, committed, events

STEPS = 12
#: One slot is held by the flush of step 10 and the other one has step 11: there is none for the last step.
SETTINGS = {"slots": 2, "save_storage_interval": 10}
#: Parameters of 100 KB are copied in the background, and small ones are not.
WIDE = "--width=160"
#: A state of this size is not looked at as a whole before save_if_needed returns.
LARGE = "--width=1200"
ADVICE = "save(step, wait=True)"


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "run", tmp_path / "notes"


def behind_a_slow_flush(paths: tuple[Path, Path], *arguments: str) -> Job:
    """Run a job whose last steps all pass within the flush of step 10."""
    root, notes = paths
    there = notes.with_name("flushing")
    held = {"EASYCKPT_FAILPOINTS": f"writer.shard.begin=hold:{there}"}
    job = jobs.start(root, notes, WIDE, "--hurried", *arguments, steps=STEPS, settings=SETTINGS, **held)
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
        ("element", "model.0.weight"),
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


@pytest.mark.parametrize("width", [WIDE, LARGE])
def test_averaged_weights_are_not_saved_as_the_last_step(paths, width):
    """They are swapped in for an evaluation, in a way that raises no version counter."""
    job = behind_a_slow_flush(paths, width, "--then=average")
    assert job.end() == 1
    assert "model.0.weight" in job.values("text")[-1]
    assert committed(paths[0]) == [10, 11]


@pytest.mark.parametrize(
    ("then", "width"),
    [(then, WIDE) for then in ("number", "parameter", "buffer", "generator", "evaluation")] + [("number", LARGE)],
)
def test_a_skipped_last_snapshot_is_of_the_step_and_not_of_the_end(paths, then, width):
    """What is small is saved as it was handed over, and a tensor that was written to may be what it was."""
    job = behind_a_slow_flush(paths, width, f"--then={then}")
    assert job.end() == 0, job.stderr
    assert committed(paths[0]) == [10, STEPS]
    root, notes = paths
    again = jobs.run(root, notes, width, steps=STEPS, settings=SETTINGS)
    assert again.first("restored") == [STEPS]
    assert again.first("seen") == [8 * STEPS]
    whole = jobs.run(root.with_name("straight"), notes.with_name("straight.notes"), width, steps=STEPS)
    assert again.digest == whole.digest


def test_an_end_without_with_that_has_lost_the_last_step_has_an_exit_code(paths):
    job = behind_a_slow_flush(paths, "--without-with", "--then=element")
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
    arguments = [WIDE, f"--skip-at={STEPS}", f"--mischief-rank={rank}", "--step-seconds=0.02"]
    job = jobs.run(root, notes, *arguments, steps=STEPS, ranks=2, settings=SETTINGS)
    assert [event["step"] for event in events(root, rank, "SnapshotSkipped")][-1] == STEPS
    assert committed(root)[-1] == STEPS
    assert digest_of_the_newest(paths, ranks=2) == job.digest


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([f"--skip-at={STEPS}", "--then=element"], "no slot is free"),
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
    jobs.run(root, notes, WIDE, "--then=element", steps=STEPS, settings=SETTINGS)
    assert committed(root)[-1] == STEPS


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_without_room_for_more_text_on_one_rank_leaves_no_rank_alone(paths, rank):
    """Training goes on, on all ranks, without what that rank cannot snapshot; at the end all say so."""
    job = without_room(paths, rank, "text")
    assert job.ends() == [1, 1], job.stderr
    texts = job.last("text")
    assert texts[0] == texts[1]
    for part in (f"step {STEPS},", f"rank {rank}: its snapshot was discarded", "No space left on device"):
        assert part in texts[0]
    assert f"rank {1 - rank}:" not in texts[0]
    assert [job.values("finished", each)[-1] for each in (0, 1)] == [STEPS] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_without_room_for_larger_snapshots_on_one_rank_leaves_no_rank_alone(paths, rank):
    """The last step needs no memory: at its end the training lends the state itself."""
    job = without_room(paths, rank, "tensor")
    assert job.ends() == [0, 0], job.stderr
    assert committed(paths[0])[-1] == STEPS
    assert digest_of_the_newest(paths, ranks=2) == job.digest
    reasons = {event["reason"] for event in events(paths[0], rank, "SnapshotSkipped")}
    assert any("No space left on device" in reason for reason in reasons)


def without_room(paths: tuple[Path, Path], rank: int, grows: str) -> Job:
    """Start a job whose state grows at step 5, and whose memory does not on one rank."""
    root, notes = paths
    arguments = [WIDE, "--hurried", f"--mischief-rank={rank}", "--grow-at=5", f"--grows={grows}", "--step-seconds=0.02"]
    settings = {"slots": 4, "save_storage_interval": 4}
    return jobs.start(root, notes, *arguments, steps=STEPS, ranks=2, settings=settings)


class Loop:
    """The loop of the README, over a data set of 40 examples; optionally no slot is free for one step."""

    def __init__(self, root: Path, *, workers: int = 0, total: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        data = torch.utils.data.TensorDataset(torch.randn(40, 8))
        sampler = easyckpt.SkipBatchSampler(40, batch_size=4, seed=0)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=workers)
        self.loader = loader if total else Unsized(loader)
        state = {"model": self.model, "optimizer": self.optimizer}
        self.ckpt = easyckpt.Checkpointer(root, state, save_storage_interval=1000)

    def run(self, epochs: int, *, skip_at: int = -1) -> int:
        """Train and close; returns the step that was restored."""
        with self.ckpt as ckpt:
            leave_no_slot(ckpt, skip_at)
            first = step = ckpt.load().step
            for epoch in range(epochs):
                for (batch,) in ckpt.batches(self.loader, epoch):
                    self.optimizer.zero_grad()
                    self.model(batch).pow(2).sum().backward()
                    self.optimizer.step()
                    step += 1
                    ckpt.save_if_needed(step)
        return first

    def digest(self) -> str:
        return digest_of(self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state())


class Unsized:
    """A loader that nobody knows the length of."""

    def __init__(self, loader: torch.utils.data.DataLoader) -> None:
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"total": False}], ids=["plain", "workers", "iterable"])
def test_the_end_of_the_data_does_not_stand_in_the_way_of_the_last_step(tmp_path, memory_dir, options):
    straight = Loop(tmp_path / "straight", **options)
    straight.run(3)
    Loop(tmp_path / "run", **options).run(2, skip_at=20)
    assert committed(tmp_path / "run") == [20]
    resumed = Loop(tmp_path / "run", **options)
    assert resumed.run(3) == 20
    assert resumed.digest() == straight.digest()


def test_a_step_that_training_has_left_behind_is_not_saved_with_a_later_state(tmp_path, memory_dir):
    """Without an optimizer of torch's, and with writes that no version counter sees."""
    box = {"weight": torch.zeros(50_000)}
    ckpt = easyckpt.Checkpointer(tmp_path / "run", {"box": box}, save_mem_interval=10, save_storage_interval=1000)
    leave_no_slot(ckpt, 20)
    ckpt.load()
    for step in range(1, 26):
        box["weight"].data[step] = 1.0
        ckpt.save_if_needed(step)
    with pytest.raises(SaveFailed, match=r"step 20, .* training has gone on to step 25.* newest committed step is 10"):
        ckpt.close()
    assert committed(tmp_path / "run") == [10]


def test_skips_for_lack_of_memory_are_counted_and_the_last_one_is_made_up_for(tmp_path, memory_dir, monkeypatch):
    monkeypatch.setattr(budget, "available", lambda directory: budget.Budget(100, 0, 10))
    box = {"weight": torch.zeros(100)}
    with easyckpt.Checkpointer(tmp_path / "run", {"box": box}, save_storage_interval=4) as ckpt:
        ckpt.load()
        for step in range(1, 8):
            box["weight"] += 1
            ckpt.save_if_needed(step)
        stats = ckpt.stats()
    assert stats.counts["SnapshotSkipped"] == 6
    assert stats.reasons == {"SnapshotSkipped: there is no memory for a snapshot": 6}
    found = {"weight": torch.zeros(100)}
    assert easyckpt.restore(tmp_path / "run", {"box": found}).step == 7
    assert torch.equal(found["weight"], torch.full((100,), 7.0))
