"""Random lives of a job against a model: train, save, fail, die, forget, rot, go back, go on.

The model knows for each step of the line in force by whom it was made, what was reported durable, and what was sealed
in a memory that survived. Whatever happens, a restart gives exactly such a state, and none older than the newest.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from easyckpt import Checkpointer, catalog, failpoints
from easyckpt.errors import EasyckptError, OutcomeUnknown, SaveError
from easyckpt.format import layout
from easyckpt.storage.local import LocalStorage
from easyckpt.verification import verify
from tests.support.crashjob import MAX_STEPS, Notes, Starts, Training, leftovers

WIDTH = 6
SETTINGS = {"save_storage_interval": 4, "max_ckpt_num": 2, "back_pressure": "wait", "signals": (), "slots": 3}
LEASE = {"lease_timeout": 0.2, "lease_interval": 0.05}
PLACES = (
    "line.open.before",
    "line.opened",
    "line.set_aside",
    "writer.shard.chunk",
    "writer.index.synced",
    "commit.reported",
    "commit.manifest.written",
    "commit.rename.before",
    "commit.rename.after",
    "commit.durable",
    "commit.latest.after",
    "retention.rename.before",
    "retention.rename.after",
    "retention.delete",
    "storage.write.before",
    "storage.sync.before",
    "storage.sync_dir.before",
    "storage.rename.before",
    "storage.rename.after",
    "storage.replace.written",
    "storage.remove.before",
    "slot.seal.before",
    "slot.seal.payload",
    "slot.seal.after",
)
SEED = 20_240_611
#: Of the whole campaign, and the tests that they are dealt out to.
LIVES, PARTS = 300, 4
BACKGROUND = [place for place in PLACES if not place.startswith("slot.")]


class Life(RuleBasedStateMachine):
    """`line`: who made each step of the line in force. `live`: the same of the state in the running process."""

    def __init__(self) -> None:
        super().__init__()
        parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.place = Path(tempfile.mkdtemp(prefix="easyckpt-lives-", dir=parent))
        self.starts = Starts(self.place, self.place / "memory")
        self.root = self.starts.root
        self.tag = 0
        self.line: list[int] = []
        self.durable: dict[int, list[int]] = {}
        self.perhaps: dict[int, list[int]] = {}
        """Of unknown outcome: may be restored, need not."""
        self.sealed: dict[int, list[int]] = {}
        self.lines_known = 0
        self.checkpointer: Checkpointer | None = None
        self.training = Training(WIDTH)
        self.live: list[int] = []
        self.fork = 0
        self.tier: str | None = None
        self.failed = False
        """Whether something went wrong in the running process."""
        self.rotten: set[str] = set()
        self.told: list[str] = []

    # -- what is known

    @property
    def storage(self) -> LocalStorage:
        return LocalStorage(self.root)

    def lines_in_root(self) -> int:
        record = catalog.read_root(self.storage) if self.root.exists() else None
        return 0 if record is None else len(record.timelines)

    def note_opened(self, fork: int, live: list[int]) -> None:
        """Whether this process has opened its line: then the steps past the fork are no more."""
        if self.lines_in_root() == self.lines_known:
            return
        self.lines_known = self.lines_in_root()
        for known in (self.durable, self.perhaps, self.sealed):
            for step in [step for step in known if step > fork]:
                del known[step]
        self.line = live[:fork]

    def must(self) -> int:
        return max([0, *self.durable, *self.sealed])

    def check_restored(self, step: int, history: list[int], problem: str | None) -> None:
        assert problem is None
        assert len(history) == step
        assert step >= self.must(), f"restored {step}\n{self.story()}"
        everything = self.durable | self.perhaps | self.sealed
        assert step == 0 or history == everything.get(step, self.line[:step]), f"{history}\n{self.story()}"

    # -- a process of our own

    @initialize()
    def begin(self) -> None:
        self.start()

    @precondition(lambda self: self.checkpointer is None)
    @rule()
    def start(self) -> None:
        self.tag = self.starts.count = self.starts.count + 1
        self.failed = False
        self.training = Training(WIDTH)
        memory = str(self.starts.memory_dir)
        self.checkpointer = Checkpointer(self.root, self.training.state, memory_dir=memory, **SETTINGS, **LEASE)
        restored = self.checkpointer.load()
        self.told.append(f"restored {restored}")
        self.check_restored(restored.step, self.training.history, self.training.problem())
        self.fork, self.live, self.tier = restored.step, self.training.history, restored.tier

    def running(self) -> bool:
        return self.checkpointer is not None and len(self.live) < MAX_STEPS - 8

    @precondition(running)
    @rule(steps=st.integers(1, 5))
    def train(self, steps: int) -> None:
        self.told.append(f"train {steps}")
        assert self.checkpointer is not None
        for _ in range(steps):
            self.step()
            self.checkpointer.save_if_needed(len(self.live))
            self.checkpointer.wait(60)
            self.learn()

    def step(self) -> None:
        self.training.step(len(self.live) + 1, self.tag)
        self.live = [*self.live, self.tag]

    def learn(self) -> None:
        """After a save: what is durable and sealed now."""
        assert self.checkpointer is not None
        self.note_opened(self.fork, self.live)
        parts, identity = self.checkpointer._parts, self.checkpointer._saver.identity
        sealed = [meta.step for meta in parts.arena.sealed() if identity and meta.timeline == identity.timeline]
        # Not out of stats(): those count over all lines of this process.
        for step, known in ((parts.coordinator.committed, self.durable), (max(sealed, default=-1), self.sealed)):
            if self.fork < step <= len(self.live):
                known[step] = self.live[:step]
        self.line = self.live if self.lines_known == self.lines_in_root() and self.opened() else self.line

    def opened(self) -> bool:
        assert self.checkpointer is not None
        return self.checkpointer._saver.identity is not None

    @precondition(running)
    @rule()
    def save(self) -> None:
        self.told.append("save")
        assert self.checkpointer is not None
        self.step()
        self.checkpointer.save(len(self.live), wait=True)
        self.learn()
        assert len(self.live) in self.durable

    @precondition(running)
    @rule(
        place=st.sampled_from(BACKGROUND),
        number=st.integers(1, 3),
        error=st.sampled_from(["ENOSPC", "EIO"]),
    )
    def save_with_an_error(self, place: str, number: int, error: str) -> None:
        self.told.append(f"save with {place}@{number}={error}")
        assert self.checkpointer is not None
        self.step()
        self.failed = True
        step = len(self.live)
        failpoints.arm(f"{place}@{number}=error:{error}")
        failure: Exception | None = None
        try:
            self.checkpointer.save(step, wait=True)
        except (EasyckptError, OSError) as raised:
            failure = raised
        self.checkpointer._parts.flusher.submit(lambda: None).result()  # also what comes after the commit
        failpoints.arm("")
        for _ in range(2):
            try:
                self.checkpointer.wait(60)
                break
            except SaveError:
                assert failure is not None, "a failure of a save that had said it was durable"
        self.told.append(f"{failure!r}")
        self.learn()
        entry = catalog.inspect(self.storage, layout.step_dir(step), layout.NativeNaming())
        if failure is None:
            assert step in self.durable
            assert entry.valid
        elif isinstance(failure, OutcomeUnknown):
            self.perhaps[step] = self.live
        elif entry.valid and self.opened():  # else it is that of the line before, which is still the newest
            assert catalog.read_root(self.storage).timelines[-1].id != entry.timeline, f"{failure}, but it is committed"

    @precondition(running)
    @rule(which=st.integers(0, 9))
    def go_back(self, which: int) -> None:
        """To a checkpoint that the line in force has, by name, in the running process."""
        assert self.checkpointer is not None
        self.checkpointer._parts.flusher.submit(lambda: None).result()  # what is about to be rotated away is gone
        steps = sorted(step for step in self.durable if self.good(step))
        if not steps:
            return
        step = steps[which % len(steps)]
        self.told.append(f"go back to {step}")
        restored = self.checkpointer.load(step=step)
        assert restored.step == step
        assert self.training.problem() is None
        assert self.training.history == self.durable[step]
        self.fork, self.live = step, self.training.history

    def good(self, step: int) -> bool:
        entry = catalog.inspect(self.storage, layout.step_dir(step), layout.NativeNaming())
        return entry.valid and not verify(self.storage, entry)

    # -- its ends

    @precondition(lambda self: self.checkpointer is not None)
    @rule()
    def close(self) -> None:
        self.told.append("close")
        assert self.checkpointer is not None
        opened, checkpointer = self.opened(), self.checkpointer
        checkpointer.close()
        self.checkpointer = None
        newest = checkpointer.stats().last_sealed_step or 0
        if opened and self.fork < newest <= len(self.live):
            self.durable[newest] = self.live[:newest]
        elif not opened and self.tier == "memory" and self.fork > max(self.durable, default=0):
            self.durable[self.fork] = self.live  # restored from memory, and ended at once
        if self.durable:
            assert self.good(max(self.durable))
        if opened and not self.failed:  # what could not be deleted goes after a later commit
            assert leftovers(self.root) == []
        if not [path for path in self.starts.memory_dir.iterdir() if path.suffix not in (".owner", ".lock")]:
            self.sealed = {}

    @precondition(lambda self: self.checkpointer is not None)
    @rule(memory=st.booleans())
    def die(self, memory: bool) -> None:
        self.told.append(f"die, memory {memory}")
        assert self.checkpointer is not None
        self.checkpointer.abandon()
        self.checkpointer = None
        if not memory:
            self.lose_memory()

    def lose_memory(self) -> None:
        self.starts.wipe_memory()
        self.sealed = {}

    @precondition(lambda self: self.checkpointer is None)
    @rule(where=st.floats(0, 1, exclude_max=True))
    def rot_the_newest(self, where: float) -> None:
        """Bytes of the newest checkpoint change, if another good one is left."""
        good = [step for step in self.durable if self.good(step)]
        if len(good) < 2:
            return
        step = max(good)
        if step in self.sealed or any(newer > step for newer in self.perhaps):
            return
        path = self.root / layout.step_dir(step) / layout.shard_file(0)
        content = bytearray(path.read_bytes())
        content[int(where * len(content))] ^= 1
        path.write_bytes(content)
        self.told.append(f"rot {step}")
        self.rotten.add(catalog.read_manifest(self.storage, layout.step_dir(step)).attempt)
        del self.durable[step]

    @precondition(lambda self: self.checkpointer is None and len(self.line) < MAX_STEPS - 16)
    @rule(place=st.sampled_from(PLACES), number=st.integers(1, 6), memory=st.booleans())
    def killed_in_a_child(self, place: str, number: int, memory: bool) -> None:
        notes = self.starts.start(
            steps=6, width=WIDTH, armed=f"{place}@{number}=kill", settings=SETTINGS | LEASE, plain=True, leave=True
        )
        self.told.append(f"killed at {place}@{number}, memory {memory}: {notes.all}")
        if notes.values("restored"):
            self.learn_from(notes)
        if not memory:
            self.lose_memory()

    def learn_from(self, notes: Notes) -> None:
        restored = notes.restored
        self.check_restored(restored["restored"], restored["history"], restored["problem"])
        fork = restored["restored"]
        live = restored["history"] + [notes.tag] * (
            notes.newest("finished") - fork if notes.newest("finished") > 0 else 0
        )
        self.note_opened(fork, live)
        if self.lines_known and notes.newest("finished") > 0:
            self.line = live
        for key, known in (("durable", self.durable), ("sealed", self.sealed)):
            step = notes.newest(key)
            if step > fork:
                known[step] = live[:step]

    # -- always

    def story(self) -> str:
        """What has happened, since a matter of timing may not happen again."""
        known = f"durable {sorted(self.durable)}, sealed {sorted(self.sealed)}, line {self.line}"
        return "\n".join([*self.told, known, str(sorted(os.listdir(self.root)))])

    @invariant()
    def what_is_committed_is_whole(self) -> None:
        if not self.root.exists():
            return
        record = catalog.read_root(self.storage)
        newest, newer = max(self.durable, default=None), False
        for entry in catalog.scan(self.storage, layout.NativeNaming()).of_kind("committed"):
            assert entry.valid, entry.problem
            assert entry.manifest is not None
            whole = entry.manifest.attempt not in self.rotten
            if whole and self.checkpointer is None:
                assert verify(self.storage, entry) == []
            # A job may be killed after a commit that has rotated the known one away, and before it told of it.
            newer |= whole and newest is not None and entry.step > newest
        if newest is not None and not newer:
            entry = catalog.inspect(self.storage, layout.step_dir(newest), layout.NativeNaming())
            assert entry.valid, f"step {newest} was durable: {entry.problem}\n{self.story()}"
            assert record is not None
            assert record.on_ancestry(str(entry.timeline), newest)

    def teardown(self) -> None:
        failpoints.arm("")
        if self.checkpointer is not None:
            self.checkpointer.abandon()
        shutil.rmtree(self.place, ignore_errors=True)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="easyckpt")


COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": False}


def test_a_restart_always_finds_the_newest_that_was_whole():
    run_state_machine_as_test(
        Life, settings=settings(max_examples=8, stateful_step_count=14, derandomize=True, **COMMON)
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_restart_always_finds_the_newest_that_was_whole_in_long_lives(part, campaign_part):
    class Long(Life):
        lives = 0

        def teardown(self) -> None:
            Long.lives += 1
            super().teardown()

    options = settings(max_examples=LIVES // PARTS, stateful_step_count=40, database=None, **COMMON)
    run_state_machine_as_test(seed(SEED + part)(Long), settings=options)
    campaign_part("random_histories", seed=SEED, tests=PARTS, lives=Long.lives)
