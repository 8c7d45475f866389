"""Every named failpoint, hit by SIGKILL, ENOSPC and EIO in a real process; then the catalogue, the bytes, a restart.

Failpoints are found by importing every module, so a new one is covered as soon as some scenario hits it, and a test
fails as long as none does.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import easyckpt
from easyckpt import catalog, failpoints
from easyckpt.format import layout
from easyckpt.storage.local import LocalStorage
from easyckpt.verification import verify
from tests.support.crashjob import Notes, Starts, leftovers
from tests.support.workplace import in_memory

#: They need frameworks that are not installed here, and declare no failpoints of their own.
INTEGRATIONS = "easyckpt.integrations."

for module in pkgutil.walk_packages(easyckpt.__path__, "easyckpt."):
    if not module.name.endswith("__main__") and not module.name.startswith(INTEGRATIONS):
        importlib.import_module(module.name)

SEED = 20240607
KILL, ENOSPC, EIO = "kill", "error:ENOSPC", "error:EIO"
ACTIONS = (KILL, ENOSPC, EIO)
#: Failpoints that no single process on a CPU comes to, and the test that arms them.
ELSEWHERE: dict[str, str] = {}

#: Where the program only stores into memory: no system call is near that could fail. Only a kill is armed there.
ONLY_KILL = {
    "arena.owned",
    "arena.adopted",
    "arena.removing",
    "slot.begin",
    "slot.clear",
    "slot.seal.before",
    "slot.seal.objects",
    "slot.seal.payload",
    "slot.seal.static",
    "slot.seal.after",
}

BUSY = {"steps": 6, "grow_objects_at": 3, "grow_tensors_at": 5, "renew": True}


@dataclass
class Scenario:
    """What the job under test finds, and how it goes on."""

    name: str
    order: dict[str, Any]
    restores: int = 0
    """The step from which the job under test goes on."""
    newest: int = 0
    """The newest good step before it came."""

    def prepare(self, starts: Starts) -> None:
        """Make what the job under test finds."""
        if self.name == "fresh":
            return
        if self.name == "leftovers":
            # 2 and 4 are committed; 6 was whole but for its rename.
            assert starts.start(steps=7, armed="commit.rename.before@4=kill").killed
            storage = starts.root
            assert [path for path in storage.iterdir() if layout.parse_tmp_dir(path.name)]
            (storage / layout.trash_dir("step-00000001", "0")).mkdir()
            (storage / layout.trash_dir("step-00000001", "0") / "rank-00000.json").touch()
            (storage / layout.tmp_dir(5, "half")).mkdir()
            (storage / layout.tmp_dir(5, "half") / "rank-00000.safetensors").write_bytes(b"half")
            (storage / layout.temp_file(layout.LATEST, "0")).touch()
        else:
            starts.start(steps=7, leave=True)
        if self.name != "memory":
            starts.wipe_memory()
        if self.name == "fallback":
            path = starts.root / "step-00000006" / layout.shard_file(0)
            data = bytearray(path.read_bytes())
            data[-100] ^= 1
            path.write_bytes(data)


SCENARIOS = {
    scenario.name: scenario
    for scenario in [
        Scenario("fresh", BUSY),
        Scenario("memory", BUSY, restores=7, newest=7),
        Scenario("storage", BUSY, restores=6, newest=6),
        Scenario("fallback", BUSY, restores=4, newest=4),
        Scenario("explicit", BUSY | {"load_step": 4}, restores=4, newest=6),
        Scenario("leftovers", BUSY, restores=6, newest=6),
    ]
}


class Laboratory:
    """Lays out scenarios, and knows how often each of them comes to each failpoint."""

    def __init__(self, directory: Path) -> None:
        self._place = directory / "place"
        self.hits = {name: self._count(scenario) for name, scenario in SCENARIOS.items()}

    def lay_out(self, scenario: Scenario) -> Starts:
        shutil.rmtree(self._place, ignore_errors=True)
        starts = Starts(self._place, self._place / "memory")
        scenario.prepare(starts)
        return starts

    def run(self, scenario: Scenario, armed: str) -> tuple[Starts, Notes]:
        starts = self.lay_out(scenario)
        return starts, starts.start(**scenario.order, armed=armed)

    def _count(self, scenario: Scenario) -> Counter[str]:
        starts = self.lay_out(scenario)
        path = self._place / "count"
        notes = starts.start(**scenario.order, count=str(path))
        assert notes.values("raised") == [], f"{scenario.name} fails without any failpoint: {notes.all}"
        assert notes.restored["restored"] == scenario.restores
        return Counter(path.read_text().split())


@pytest.fixture(scope="module")
def laboratory() -> Iterator[Laboratory]:
    with in_memory("crash") as directory:
        yield Laboratory(directory)


class Verdict:
    """All that must hold after the job under test has ended, however it ended, and after a restart."""

    def __init__(self, scenario: Scenario, starts: Starts, notes: Notes) -> None:
        self.scenario, self.starts, self.notes = scenario, starts, notes
        self.storage = LocalStorage(starts.root)
        record = catalog.read_root(self.storage) if starts.root.exists() else None
        known = 0 if scenario.name == "fresh" else 1
        self.opened = record is not None and len(record.timelines) > known

    def check(self) -> None:
        self.no_success_was_called_a_failure()
        self.all_committed_are_whole()
        self.the_newest_durable_is_there()
        again = self.starts.start(steps=2, settings={"lease_timeout": 0.5, "lease_interval": 0.2})
        self.the_restart_goes_on_from(again)
        assert leftovers(self.starts.root) == []
        self.all_committed_are_whole(after=True)

    def no_success_was_called_a_failure(self) -> None:
        assert self.notes.values("failed_but_committed") == []
        for note in self.notes.all:
            assert note.get("ours", True) or note["where"] == "construct", f"a raw system error: {note}"

    def all_committed_are_whole(self, after: bool = False) -> None:
        entries = catalog.scan(self.storage, layout.NativeNaming()).of_kind("committed")
        for entry in entries:
            assert entry.valid, f"{entry.name}: {entry.problem}"
            damaged = self.scenario.name == "fallback" and not after and self._is_of_the_first_start(entry)
            if not (damaged and entry.step == 6):
                assert verify(self.storage, entry) == [], entry.name
        if after:
            assert 1 <= len(entries) <= 2

    def _is_of_the_first_start(self, entry: catalog.Entry) -> bool:
        record = catalog.read_root(self.storage)
        return record is not None and entry.timeline == record.timelines[0].id

    def the_newest_durable_is_there(self) -> None:
        durable = self.notes.newest("durable")
        if durable >= 0:
            entry = catalog.inspect(self.storage, layout.step_dir(durable), layout.NativeNaming())
            assert entry.valid, f"step {durable} was reported durable: {entry.problem}"

    def least(self) -> int:
        """No restart may come back to less than this."""
        before = self.scenario.restores if self.opened else self.scenario.newest
        return max(before, self.notes.newest("durable"), self.notes.newest("sealed"))

    def the_restart_goes_on_from(self, again: Notes) -> None:
        assert not again.killed
        assert again.values("raised") == []
        restored = again.restored
        step, history, fork = restored["restored"], restored["history"], self.scenario.restores
        assert restored["problem"] is None
        assert step >= self.least(), f"restored {step}, {self.least()} was durable or sealed"
        assert step <= max([7, *self.notes.values("finished")])
        mine = self.notes.tag
        others = {1}
        if self.opened:
            assert set(history[:fork]) <= others, history
            assert set(history[fork:]) <= {mine}, f"resumed from an abandoned line: {history}"
        else:
            assert set(history) <= others, history
        assert again.newest("durable") == step + 2
        assert again.values("closed") == [True]

    def an_error_was_reported(self) -> None:
        assert self.notes.values("raised") or self.notes.values("logged"), "an error was swallowed"
        assert self.notes.newest("finished") == self.scenario.restores + self.scenario.order["steps"]
        if self.notes.values("closed"):  # cleanly: what is in memory is durable, and what never came there was told
            last = self.notes.newest("finished")
            assert self.notes.newest("durable") == last or self.the_snapshot_never_was(last)
            assert self.notes.newest("durable") >= self.notes.newest("sealed")

    def the_snapshot_never_was(self, last: int) -> bool:
        """Whether it was said that memory never held the snapshot of the last step: by its call, or by the log."""
        never_there = (f"snapshot skipped, step {last},", f"snapshot discarded, step {last},")
        counted = any(words in text for words in never_there for text in self.notes.values("logged"))
        since = self.notes.all[self.notes.all.index({"finished": last}) :]
        return counted or any(note.get("where") in ("save", "save_if_needed") for note in since)


def experiment(laboratory: Laboratory, scenario: Scenario, armed: str) -> None:
    starts, notes = laboratory.run(scenario, armed)
    if not notes.values("hit"):  # how often a background thread comes there is a matter of timing; once it does
        starts, notes = laboratory.run(scenario, re.sub("@[0-9]+", "@1", armed))
    assert notes.values("hit"), f"{scenario.name}: {armed} was not hit"
    killed = armed.endswith(KILL)
    assert notes.killed is killed
    try:
        verdict = Verdict(scenario, starts, notes)
        if not killed:
            verdict.an_error_was_reported()
        verdict.check()
    except AssertionError as error:
        told = "\n".join(str(note)[:300] for note in notes.all)
        raise AssertionError(f"{scenario.name}: {armed}: {error}\n{told}\n{sorted(os.listdir(starts.root))}") from error


def hit_by(laboratory: Laboratory, name: str) -> list[Scenario]:
    return [scenario for scenario in SCENARIOS.values() if laboratory.hits[scenario.name][name]]


@pytest.mark.parametrize("name", sorted(failpoints.NAMES))
def test_a_crash_or_an_error_there_loses_nothing(laboratory, name):
    """A sample: each failpoint with SIGKILL and one of the errors, at a hit and in a scenario drawn by the seed."""
    if name in ELSEWHERE:
        pytest.skip(ELSEWHERE[name])
    generator = random.Random(f"{SEED} {name}")
    scenarios = hit_by(laboratory, name)
    assert scenarios, f"no scenario comes to {name} ({failpoints.NAMES[name]}): add one, or name it in ELSEWHERE"
    for action in [KILL] if name in ONLY_KILL else [KILL, generator.choice(ACTIONS[1:])]:
        scenario = generator.choice(scenarios)
        number = generator.randint(1, laboratory.hits[scenario.name][name])
        experiment(laboratory, scenario, f"{name}@{number}={action}")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(failpoints.NAMES))
def test_a_crash_or_an_error_at_every_hit_loses_nothing(laboratory, name, campaign_part):
    """In full: each failpoint, in every scenario, at every hit, with every action."""
    if name in ELSEWHERE:
        pytest.skip(ELSEWHERE[name])
    kills = errors = 0
    for scenario in hit_by(laboratory, name):
        for number in range(1, laboratory.hits[scenario.name][name] + 1):
            for action in [KILL] if name in ONLY_KILL else ACTIONS:
                experiment(laboratory, scenario, f"{name}@{number}={action}")
                kills, errors = kills + (action == KILL), errors + (action != KILL)
    campaign_part(
        "crash_failpoints", seed=None, tests=len(failpoints.NAMES) - len(ELSEWHERE), failpoints=1, kills=kills,
        errors=errors,
    )  # fmt: skip
