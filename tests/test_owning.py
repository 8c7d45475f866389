"""Owning a root without a job leaves the owner files of others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from easyckpt.memory.owner import OwnerLock
from easyckpt.saving.owning import owned_arenas
from easyckpt.storage.local import LocalStorage


@pytest.fixture
def storage(tmp_path):
    (tmp_path / "root").mkdir()
    return LocalStorage(tmp_path / "root")


def test_an_owner_file_that_was_made_for_this_is_removed(storage, tmp_path):
    with owned_arenas([str(tmp_path / "owner")], storage):
        assert (tmp_path / "owner").exists()
    assert not (tmp_path / "owner").exists()


def test_the_owner_file_of_a_job_that_starts_and_dies_meanwhile_stays(storage, tmp_path, monkeypatch):
    """A restart sees by it that the job is dead."""
    real = OwnerLock.try_acquire
    job = "import sys; from easyckpt.memory.owner import OwnerLock; assert OwnerLock(sys.argv[1], b'job').try_acquire()"

    def after_a_job(self):
        subprocess.run([sys.executable, "-c", job, self.path], check=True)
        return real(self)

    monkeypatch.setattr(OwnerLock, "try_acquire", after_a_job)
    with owned_arenas([str(tmp_path / "owner")], storage):
        pass
    assert (tmp_path / "owner").read_bytes() == b"job"
