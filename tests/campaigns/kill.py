"""kill -9 of all ranks at random moments, again and again: what is restored, and what comes out at the end.

A chain is one training: started, killed at a random moment, started again, killed again, until it has been killed often
enough or comes to its end. Its end state must equal that of a run that nobody killed, so it stands for all its kills.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from easyckpt.format import memory_names
from easyckpt.memory.adoption import find_slots
from easyckpt.memory.place import user_name
from easyckpt.memory.slot import SlotMeta
from tests.support import jobs

STEPS = 40
#: Seconds a step takes at least: agreement must get its share of two busy cores.
STEP_SECONDS = {1: 0.03, 2: 0.06, 4: 0.12}
#: How far behind what all ranks had finished a restart may be, by design.
ALLOWED = {1: 1, 2: 2, 4: 2}
KILLS_A_CHAIN = 8
SLOW_STORAGE = "writer.shard.chunk@*=pause:0.3"


@dataclass
class Figures:
    """What came of one case."""

    ranks: int
    storage: str
    kills: int = 0
    chains: int = 0
    chains_equal: int = 0
    under_torchrun: int = 0
    behind: Counter[int] = field(default_factory=Counter)
    """Steps between what all ranks had finished and what was restored -> how often."""
    below_sealed: int = 0
    skipped: int = 0
    discarded: int = 0
    kills_in_a_flush: int = 0
    faults: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "behind"}
        return values | {
            "steps_behind": {str(steps): times for steps, times in sorted(self.behind.items())},
            "worst_steps_behind": max(self.behind, default=None),
        }


class Chain:
    """One training and what is known of it. What is not as promised is added to the figures' faults."""

    def __init__(self, directory: Path, figures: Figures, rng: random.Random, torchrun: bool = False) -> None:
        self.root, self.notes = directory / "run", directory / "notes"
        directory.mkdir()
        self.figures, self.rng, self.torchrun = figures, rng, torchrun
        self.ranks = figures.ranks
        self.sealed = 0  # newest step that is sealed on every rank, by the event logs and by the memory left behind
        self.finished = 0  # newest step that every rank has noted as finished

    def run(self, kills: int) -> list[str] | None:
        """Kill it up to `kills` times. Returns the digests of its end."""
        for number in range(kills):
            job = self.start()
            if not self.lived_until_its_moment(job, first=number == 0):
                break
            job.kill()
            self.figures.kills += 1
            self.figures.under_torchrun += self.torchrun
            self.look_at(job)
        else:
            job = self.start()
        code = job.end()
        self.look_at(job)
        if code:
            self.fault(f"a start ended with {code}: {job.stderr[-500:]}")
            return None
        return job.digest

    def start(self) -> jobs.Job:
        slow = self.figures.storage == "slow"
        return jobs.start(
            self.root,
            self.notes,
            "--width=32",
            f"--step-seconds={STEP_SECONDS[self.ranks]}",
            *(["--hurried"] if slow else []),
            steps=STEPS,
            ranks=self.ranks,
            settings={"save_storage_interval": 1 if slow else 5, "max_ckpt_num": 2},
            torchrun=() if self.torchrun else None,
            **({"EASYCKPT_FAILPOINTS": SLOW_STORAGE} if slow else {}),
        )

    def lived_until_its_moment(self, job: jobs.Job, *, first: bool) -> bool:
        """Wait until `job` is to be killed; False when it has ended before."""
        if first:
            for rank in range(self.ranks):
                job.wait_for("finished", 2, rank)  # so the first is sealed
        elif self.rng.random() < 0.7:
            while not job.values("finished") and job.process.poll() is None:
                time.sleep(0.002)
        # else at any moment of a start: while it meets, loads, opens its line of training
        moment = time.monotonic() + self.rng.uniform(0, 1)
        while time.monotonic() < moment and job.process.poll() is None:
            time.sleep(0.002)
        return job.process.poll() is None

    def look_at(self, job: jobs.Job) -> None:
        """Compare what a start has restored with what was known before it, then learn what it has come to."""
        steps = [step for step in job.first("restored") if step is not None]
        if len(set(steps)) > 1:
            self.fault(f"the ranks restored {steps}")
        elif steps and self.sealed:
            behind = self.finished - steps[0]
            self.figures.behind[max(behind, 0)] += 1
            if steps[0] < self.sealed:
                self.figures.below_sealed += 1
                self.fault(f"restored {steps[0]}, but {self.sealed} was sealed on all ranks")
            if behind > ALLOWED[self.ranks]:
                self.fault(f"restored {steps[0]}, but all ranks had finished {self.finished}")
        logs = [{event["step"] for event in jobs.events(self.root, rank, "SnapshotSealed")} for rank in self.all()]
        self.sealed = max(self.sealed, max(set.intersection(*logs), default=0), self.sealed_in_memory())
        self.finished = max(self.finished, min(max(job.values("finished", rank), default=0) for rank in self.all()))
        begun, ended = (
            {event["attempt"] for kind in kinds for event in jobs.events(self.root, 0, kind)}
            for kinds in (("FlushBegun",), ("FlushCommitted", "FlushFailed"))
        )
        self.in_flush = len(begun - ended)

    def sealed_in_memory(self) -> int:
        """Newest step that lies sealed in every rank's memory: what the logs, written later, may not say yet."""
        root = str(self.root.resolve())
        held: dict[int, set[int]] = {rank: set() for rank in self.all()}
        for _, meta in find_slots(os.environ["EASYCKPT_MEMORY_DIR"], user_name()):
            if isinstance(meta, SlotMeta) and meta.arena_id == memory_names.arena_id(meta.run, root):
                held[meta.rank].add(meta.step)
        return max(set.intersection(*held.values()), default=0)

    def end(self) -> None:
        """Count what the logs of all its starts say."""
        self.figures.chains += 1
        self.figures.kills_in_a_flush += self.in_flush
        for rank in self.all():
            for kind, name in (("SnapshotSkipped", "skipped"), ("SnapshotDiscarded", "discarded")):
                found = jobs.events(self.root, rank, kind)
                setattr(self.figures, name, getattr(self.figures, name) + len(found))
                for event in found:
                    self.fault(f"rank {rank} has {name} step {event['step']}: {event['reason']}")

    def all(self) -> range:
        return range(self.ranks)

    def fault(self, text: str) -> None:
        self.figures.faults.append(text)


def campaign(
    directory: Path,
    ranks: int,
    kills: int,
    seed: int,
    *,
    slow: bool = False,
    torchrun_chains: int = 0,
    progress: Callable[[Figures], None] = lambda figures: None,
) -> Figures:
    """Kill trainings of `ranks` ranks `kills` times; the first `torchrun_chains` chains run under torchrun itself."""
    rng = random.Random(f"{seed}/{ranks}/{slow}")
    figures = Figures(ranks, "slow" if slow else "as it is")
    straight = jobs.run(directory / "straight", directory / "notes", "--width=32", steps=STEPS, ranks=ranks).digest
    while figures.kills < kills:
        chain = Chain(directory / f"chain-{figures.chains}", figures, rng, figures.chains < torchrun_chains)
        digests = chain.run(min(KILLS_A_CHAIN, kills - figures.kills))
        chain.end()
        if digests == straight:
            figures.chains_equal += 1
        elif digests is not None:
            chain.fault("the end differs from that of an uninterrupted run")
        progress(figures)
    return figures
