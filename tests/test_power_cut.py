"""Power cuts at every system call of a whole job: several starts, rotation, a fallback, an explicit step back.

A Checkpointer runs over the recording storage. For every prefix of its system calls, and every way in which a file
system may keep or forget what was not synced, the root is built anew and looked at: what was reported durable is
found and restored, and nothing half-written is taken for good.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import easyckpt
from easyckpt import Checkpointer, catalog, dialects, failpoints
from easyckpt.errors import EasyckptError, ForeignFormat, NoCheckpoint, SaveError
from easyckpt.format import layout
from easyckpt.storage.local import LocalStorage
from easyckpt.verification import verify
from tests.support.crashjob import Training, leftovers
from tests.support.recording import EVERYTHING, METADATA_ZEROS, NOTHING_UNSYNCED, RANDOM, VARIANTS, RecordingStorage
from tests.support.workplace import in_memory

WIDTH = 6
SETTINGS = {
    "save_storage_interval": 2,
    "max_ckpt_num": 2,
    "back_pressure": "wait",
    "signals": (),
    "lease_timeout": 0.2,
    "lease_interval": 0.05,
}

#: A renewal syncs the root, and would make durable what a commit has forgotten to.
NO_RENEWAL = {"lease_timeout": 1000.0, "lease_interval": 400.0}


@dataclass
class Line:
    """What one start of the job knows: where it went on from, and what was reported durable when."""

    fork: int
    tag: int
    history: list[int]
    """Tags up to the fork."""
    durable: list[tuple[int, int]] = field(default_factory=list)
    """(system calls so far, step)"""

    def history_at(self, step: int) -> list[int]:
        return self.history[:step] + [self.tag] * max(0, step - self.fork)


class Died(Exception):
    """Stands for a kill: nobody handles it, and what it leaves is left."""


class Recording:
    """Some starts on one root. Between them the memory is lost."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root = directory / "run"
        root.mkdir()
        self.directory = directory
        self.monkeypatch = monkeypatch
        self.storage = RecordingStorage(root)
        self.lines: list[Line] = []
        self.rot: float = math.inf
        """System calls before step 6 of the first line rotted."""
        monkeypatch.setattr(dialects, "LocalStorage", lambda root, direct_io: self.storage)

    def falls_back_and_steps_back(self) -> None:
        """Rotation, an automatic fallback to 4 since 6 is rotten, an explicit load of 8 although 9 is there."""
        self._start(steps=6)
        self._rot("step-00000006")
        self._start(steps=5)
        self._start(steps=3, load_step=8)
        assert [line.fork for line in self.lines] == [0, 4, 8]

    def cannot_rewrite_latest(self) -> None:
        """So that nothing but the commit itself makes the commit durable."""
        failpoints.arm("commit.durable@*=error:EIO")
        try:
            self._start(steps=6)
        finally:
            failpoints.arm("")

    def dies_before_the_manifest_is_synced(self) -> None:
        self._dies("storage.sync.before", 9)

    def dies_before_the_manifests_directory_is_synced(self) -> None:
        self._dies("commit.manifest.written", 3)

    def dies_before_the_rename_is_synced(self) -> None:
        self._dies("commit.rename.after", 3)

    def _dies(self, name: str, nth: int) -> None:
        """Dies in the commit of step 6; the next start finds it whole, and says so when asked for it."""
        left = nth

        def hit(here: str) -> None:
            nonlocal left
            left -= here == name
            if here == name and left == 0:
                raise Died

        with self.monkeypatch.context() as patched:
            patched.setattr(failpoints, "hit", hit)
            with pytest.raises(SaveError):
                self._start(steps=6)
        self._start(steps=3, save_again=True)
        assert [line.fork for line in self.lines] == [0, 6]

    def _start(self, *, steps: int, load_step: int | None = None, save_again: bool = False) -> None:
        training, number = Training(WIDTH), len(self.lines) + 1
        memory = self.directory / f"memory.{number}"
        memory.mkdir()
        settings = SETTINGS | NO_RENEWAL
        with Checkpointer(self.storage.root, training.state, memory_dir=str(memory), **settings) as checkpointer:
            restored = checkpointer.load(step=load_step)
            line = Line(restored.step, number, training.history)
            self.lines.append(line)
            if save_again:  # a step that was committed before: durable at once
                checkpointer.save(restored.step, wait=True)
                line.durable.append((len(self.storage.operations), restored.step))
            for step in range(restored.step + 1, restored.step + steps + 1):
                training.step(step, number)
                checkpointer.save_if_needed(step)
                if step % 2 == 0:
                    checkpointer.wait(60)
                    assert checkpointer.stats().last_committed_step == step
                    line.durable.append((len(self.storage.operations), step))
        line.durable.append((len(self.storage.operations), restored.step + steps))

    def _rot(self, name: str) -> None:
        assert name in os.listdir(self.storage.root)
        recorder = self.storage.recorder
        descriptor = recorder.open(f"{self.storage.root}/{name}/{layout.shard_file(0)}", os.O_RDWR)
        end = os.fstat(descriptor).st_size
        recorder.pwrite(descriptor, b"rot", end - 3)
        self.rot = len(self.storage.operations)
        recorder.fsync(descriptor)
        os.close(descriptor)


@pytest.fixture(scope="module")
def workplace() -> Iterator[Path]:
    with in_memory("cut") as directory:
        yield directory


HISTORIES = (
    "falls_back_and_steps_back",
    "cannot_rewrite_latest",
    "dies_before_the_manifest_is_synced",
    "dies_before_the_manifests_directory_is_synced",
    "dies_before_the_rename_is_synced",
)


@pytest.fixture(params=HISTORIES)
def recording(request, workplace, monkeypatch) -> Iterator[Recording]:
    directory = Path(tempfile.mkdtemp(dir=workplace))
    recording = Recording(directory, monkeypatch)
    getattr(recording, request.param)()
    monkeypatch.setattr(dialects, "LocalStorage", LocalStorage)
    yield recording
    shutil.rmtree(directory)


def build(tree: dict[str, bytes | None], root: Path) -> None:
    for path, content in tree.items():
        if content is None:
            os.mkdir(f"{root}{path}")
        else:
            Path(f"{root}{path}").write_bytes(content)


def digest_of(tree: dict[str, bytes | None], facts: object) -> bytes:
    """Of what matters: event logs and the like differ in every tree."""
    digest = hashlib.sha256(repr(facts).encode())
    for path, content in sorted(tree.items()):
        if not path.startswith("/events") and path != "/lease.json":
            digest.update(repr((path, content)).encode())
    return digest.digest()


def facts_at(recording: Recording, k: int) -> list[list[int]]:
    """Steps that each line has reported durable before the cut."""
    return [[step for when, step in line.durable if when <= k] for line in recording.lines]


def check(recording: Recording, root: Path, k: int) -> int:
    """Look at a root after the cut; returns the step that is restored (-1: nothing)."""
    storage = LocalStorage(root)
    facts = facts_at(recording, k)
    record = catalog.read_root(storage)
    known = len(record.timelines) if record is not None else 0
    assert known >= max((number + 1 for number, steps in enumerate(facts) if steps), default=0), "a line is forgotten"
    first = record.timelines[0].id if record is not None and known else None
    committed = catalog.scan(storage, layout.NativeNaming()).committed()
    if known and facts[known - 1]:  # under its name, not as a leftover to be rolled forward
        assert max(facts[known - 1]) in [entry.step for entry in committed], "what was durable is no checkpoint"
    for entry in committed:
        rotten = k >= recording.rot and entry.step == 6 and entry.timeline == first
        assert rotten or verify(storage, entry) == [], f"{entry.name} is taken for good"
    training = Training(WIDTH)
    try:
        restored = easyckpt.restore(root, training.state)
    except (NoCheckpoint, ForeignFormat):
        if any(facts):
            raise
        return -1
    assert training.problem() is None
    line = recording.lines[known - 1]
    least = max([line.fork, *facts[known - 1]])
    if known == 1 and recording.rot <= k:
        least = 4
    assert restored.step >= least, f"step {restored.step} is restored, {least} was durable"
    assert training.history == line.history_at(restored.step), "restored from an abandoned line"
    return restored.step


def go_on(root: Path, memory: Path, step: int) -> None:
    """A real restart after the cut: it goes on, ends well, and leaves nothing behind."""
    memory.mkdir()
    training = Training(WIDTH)
    with Checkpointer(root, training.state, memory_dir=str(memory), **SETTINGS) as checkpointer:
        assert checkpointer.load().step == max(0, step)
        for number in range(max(0, step) + 1, max(0, step) + 3):
            training.step(number, 9)
            checkpointer.save_if_needed(number)
    assert leftovers(root) == []
    storage = LocalStorage(root)
    entries = catalog.scan(storage, layout.NativeNaming()).of_kind("committed")
    assert entries[-1].step == max(0, step) + 2
    assert all(entry.valid and verify(storage, entry) == [] for entry in entries[-2:])


def campaign(recording: Recording, workplace: Path, variants: tuple[str, ...], restart_each: int) -> tuple[int, int]:
    seen: set[bytes] = set()
    cuts = 0
    for k, variant, tree in recording.storage.cuts(variants):
        cuts += 1
        digest = digest_of(tree, (facts_at(recording, k), k >= recording.rot))
        if digest in seen:
            continue
        seen.add(digest)
        directory = Path(tempfile.mkdtemp(dir=workplace))
        root = directory / "run"
        build(tree, root)
        try:
            step = check(recording, root, k)
            if len(seen) % restart_each == 0:
                go_on(root, directory / "memory", step)
        except (AssertionError, EasyckptError, OSError) as error:
            done = "\n".join(str(operation) for operation in recording.storage.operations[max(0, k - 12) : k])
            raise AssertionError(f"power cut after {k} calls, {variant}: {error}\n{done}\n{sorted(tree)}") from error
        shutil.rmtree(directory)
    return cuts, len(seen)


def test_a_power_cut_anywhere_keeps_what_was_reported_durable(recording, workplace):
    cuts, different = campaign(
        recording, workplace, (NOTHING_UNSYNCED, METADATA_ZEROS, EVERYTHING, RANDOM[0]), restart_each=60
    )
    assert cuts == 4 * (len(recording.storage.operations) + 1)
    assert different > 50


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_power_cut_anywhere_in_every_variant_and_a_restart_after_each(recording, workplace, campaign_part):
    cuts, different = campaign(
        recording, workplace, (*VARIANTS, *(f"random:{seed}" for seed in range(100, 130))), restart_each=1
    )
    calls = len(recording.storage.operations)
    assert cuts == (len(VARIANTS) + 30) * (calls + 1)
    campaign_part(
        "power_cut", seed=None, tests=len(HISTORIES), system_calls=calls, cuts=cuts, different_roots=different,
        restarts=different,
    )  # fmt: skip
