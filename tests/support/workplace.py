"""A place for many starts of jobs that are killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def in_memory(name: str) -> Iterator[Path]:
    """A directory in shared memory, where there is any: a kill needs no disk. `name` tells whose it is if one stays."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix=f"easyckpt-{name}-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
