"""Power cuts on a real mounted file system that forgets what was not synced, at calls drawn by a seed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from easyckpt import catalog
from easyckpt.format.layout import NativeNaming
from easyckpt.storage.local import LocalStorage
from easyckpt.verification import verify
from tests.support import fuse_powercut
from tests.support.crashjob import Notes, Starts, leftovers
from tests.support.fuse_powercut import mounted
from tests.support.workplace import in_memory

REASON = fuse_powercut.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SEED = 20240608
#: Changing calls of three starts; cuts are drawn from here, and one past the end is an ordinary end.
CALLS = 220
CUTS = 3
#: Of the whole campaign, and the tests that they are dealt out to.
MACHINES, PARTS = 100, 4
LEASE = {"lease_timeout": 0.3, "lease_interval": 0.1}


@pytest.fixture
def workplace() -> Iterator[Path]:
    with in_memory("fuse") as directory:
        yield directory


class Machine:
    """Its power is cut again and again; after each cut it goes on, until at last it may end in peace."""

    def __init__(self, workplace: Path, seed: int) -> None:
        self.disk, self.mountpoint = workplace / "disk", workplace / "mount"
        self.starts = Starts(workplace / "notes", workplace / "memory")
        self.starts.root = self.mountpoint / "run"
        self.generator = random.Random(seed)
        self.durable = 0
        self.history: list[int] = []
        """Tags of the steps up to `durable`."""
        self.cuts = 0

    def live(self) -> None:
        for _ in range(CUTS):
            cut_after = self.generator.randint(1, CALLS)
            seed = self.generator.choice([0, self.generator.randint(1, 10**6)])
            with mounted(self.mountpoint, self.disk, cut_after=cut_after, seed=seed) as process:
                for steps in (5, 3, 2):
                    self.start(steps)
                    if process.poll() is not None:
                        self.cuts += 1
                        break
            for path in self.starts.memory_dir.iterdir():
                path.unlink()
        with mounted(self.mountpoint, self.disk):
            notes = self.start(2)
            assert notes.values("raised") == []
            assert notes.values("closed") == [True]
            assert leftovers(self.starts.root) == []
            storage = LocalStorage(self.starts.root)
            entries = catalog.scan(storage, NativeNaming()).of_kind("committed")
            assert len(entries) == (2 if notes.restored["restored"] else 1)
            assert all(entry.valid and verify(storage, entry) == [] for entry in entries)
            assert notes.newest("durable") == entries[-1].step

    def start(self, steps: int) -> Notes:
        notes = self.starts.start(steps=steps, settings=LEASE, dies_without_storage=True)
        if not notes.values("restored"):
            return notes  # cut before that
        restored = notes.restored
        assert restored["problem"] is None
        assert restored["restored"] >= self.durable, f"step {self.durable} was durable: {restored}"
        assert restored["history"][: self.durable] == self.history
        durable = notes.newest("durable")
        if durable > self.durable:
            self.durable = durable
            self.history = [*restored["history"], *[notes.tag] * steps][:durable]
        return notes


def one(workplace: Path, seed: int) -> int:
    machine = Machine(workplace, seed)
    try:
        machine.live()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return machine.cuts


@pytest.mark.parametrize("number", range(4))
def test_power_cuts_of_a_mounted_file_system_lose_nothing_durable(workplace, number):
    assert one(workplace, SEED + number) >= 1


def test_the_file_system_forgets_what_was_not_synced_and_keeps_what_was(workplace):
    """Else the tests beside this one would prove nothing."""
    disk, mountpoint = workplace / "disk", workplace / "mount"
    with mounted(mountpoint, disk, cut_after=9):
        descriptor = os.open(mountpoint / "file", os.O_CREAT | os.O_WRONLY)  # 1
        os.write(descriptor, b"durable")  # 2
        os.fsync(descriptor)  # 3
        directory = os.open(mountpoint, os.O_RDONLY)
        os.fsync(directory)  # 4
        os.write(descriptor, b", not")  # 5
        (mountpoint / "directory").mkdir()  # 6
        os.rename(mountpoint / "file", mountpoint / "other")  # 7
        assert (mountpoint / "other").read_bytes() == b"durable, not"
        os.unlink(mountpoint / "other")  # 8
        with pytest.raises(OSError, match=r"not connected|abort"):
            os.fsync(directory)  # 9: never comes
        for left in (descriptor, directory):
            with contextlib.suppress(OSError):
                os.close(left)
    assert [path.name for path in disk.iterdir()] == ["file"]
    assert (disk / "file").read_bytes() == b"durable"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_power_cuts_of_a_mounted_file_system_lose_nothing_durable(workplace, part, campaign_part):
    cuts = 0
    for number in range(part, MACHINES, PARTS):
        directory = workplace / str(number)
        directory.mkdir()
        cuts += one(directory, SEED + 1000 + number)
        shutil.rmtree(directory)
    assert cuts > MACHINES // PARTS  # of CUTS times as many
    campaign_part("power_cut_fuse", seed=SEED, tests=PARTS, machines=MACHINES // PARTS, cuts=cuts)
