"""What a wrapped Trainer's arguments, files and callbacks mean; test_transformers_semantics.py runs it.

Every test trains for real, in this process, from the files that are on storage: each run's memory ends with it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from easyckpt import failpoints


@pytest.fixture(autouse=True)
def own_memory(tmp_path_factory, monkeypatch):
    memory = Path("/dev/shm") / f"easyckpt-test-{os.getpid()}-semantics"
    memory.mkdir(exist_ok=True)
    monkeypatch.setenv("EASYCKPT_MEMORY_DIR", str(memory))
    monkeypatch.setenv("EASYCKPT_LEASE_TIMEOUT", "2")
    monkeypatch.setenv("EASYCKPT_LEASE_INTERVAL", "0.5")
    yield
    shutil.rmtree(memory, ignore_errors=True)
    failpoints.arm("")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def sharded(monkeypatch):
    """As if the state were sharded: what the Trainer itself writes is committed."""
    monkeypatch.setattr("easyckpt.integrations.transformers.synchronous.why", lambda trainer, trial: "a test")
