"""A small tmpfs of a test's own, like the 64 MiB that a container gets as /dev/shm."""

from __future__ import annotations

import subprocess

import pytest

TMPFS_BYTES = 64 << 20


@pytest.fixture
def tmpfs(tmp_path):
    """The directory of a mounted tmpfs of TMPFS_BYTES; skips where mounting is not allowed."""
    directory = tmp_path / "shm"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount command: {error}")
    if done.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield str(directory)
    subprocess.run(["umount", "--lazy", str(directory)], check=True)
