"""A second naming scheme runs the whole engine: commit, discovery, retention, lines of training, load, command line.

No directory may get a name of the native scheme on the way: that would be a place that goes past the scheme it was
handed.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import easyckpt
from easyckpt import catalog
from easyckpt.config import CheckpointConfig
from easyckpt.format import layout
from easyckpt.saving import rescue as rescue_module
from easyckpt.storage.local import LocalStorage
from tests.support import training
from tests.support.commands import run  # noqa: F401 - a fixture
from tests.support.naming import CheckpointNaming

NAMING = CheckpointNaming()
NATIVE = layout.NativeNaming()

train = functools.partial(training.train, max_ckpt_num=2)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Iterator[Path]:
    """The path of a root; every directory that gets a name in it, however shortly, is looked at."""
    monkeypatch.setattr(layout, "NativeNaming", CheckpointNaming)  # the default of every entry
    given: list[str] = []
    for method in ("makedirs", "rename"):
        monkeypatch.setattr(LocalStorage, method, noted(getattr(LocalStorage, method), given))
    yield tmp_path / "run"
    assert [name for name in given if is_native(name)] == []


def noted(method, given: list[str]):
    def call(self, *paths):
        given.append(paths[-1])
        return method(self, *paths)

    return call


def is_native(name: str) -> bool:
    parsers = (NATIVE.parse_committed, NATIVE.parse_temporary, NATIVE.parse_stale, NATIVE.parse_trash)
    return any(parse(name) is not None for parse in parsers)


def directories(root: Path) -> list[str]:
    """Those of checkpoints, whatever has become of them."""
    beside = {layout.EVENTS, layout.PINS}
    return sorted(name for name in os.listdir(root) if (root / name).is_dir() and name not in beside)


def test_commit_discovery_and_retention(root, run):
    train(root, 8)
    assert directories(root) == ["checkpoint-6", "checkpoint-8"]
    assert (root / layout.LATEST).read_text() == "checkpoint-8\n"
    assert train(root, 8).path == str(root / "checkpoint-8")
    model = torch.nn.Linear(2, 2)
    assert easyckpt.restore(root, {"model": model}, step=6).path == str(root / "checkpoint-6")
    ran = run("verify", root / "checkpoint-6")
    assert ran.code == 0
    assert "checkpoint-6" in ran.out
    (root / "checkpoint-9").mkdir()  # a checkpoint, and damaged; not a directory that is none of ours
    assert run("verify", root / "checkpoint-9").code == 1


def test_steps_past_a_fork_are_set_aside_and_those_of_a_fallback_go(root):
    train(root, 8)
    train(root, 7, step=6)
    aside = [name for name in directories(root) if name not in ("checkpoint-6", "checkpoint-7")]
    assert [NAMING.parse_stale(name)[0] for name in aside] == [8]
    shard = root / "checkpoint-7" / layout.shard_file(0)
    shard.write_bytes(shard.read_bytes()[:-1])
    assert train(root, 7).step == 6  # an automatic fallback: what it sets aside is replaced by the next commit
    assert directories(root) == ["checkpoint-6", "checkpoint-7", *aside]


def test_what_a_crash_left_is_read_in_place_rolled_forward_or_thrown_away(root):
    train(root, 8)
    storage = LocalStorage(root)
    attempt = catalog.read_manifest(storage, "checkpoint-8").attempt
    os.rename(root / "checkpoint-8", root / NAMING.temporary(8, attempt))  # killed right before the rename
    (root / "checkpoint-8").mkdir()  # damaged, and in the way
    (root / NAMING.temporary(9, "other-1")).mkdir()
    (root / NAMING.trash("checkpoint-2", "n1")).mkdir()
    assert train(root, 10).path == str(root / NAMING.temporary(8, attempt))
    assert directories(root) == ["checkpoint-10", "checkpoint-8"]


def test_a_damaged_directory_in_the_way_of_a_commit_goes_to_the_trash(root):
    with easyckpt.Checkpointer(root, {"numbers": {"a": 1}}) as checkpointer:
        checkpointer.load()
        checkpointer.save(3, wait=True)
        (root / "checkpoint-4").mkdir()
        checkpointer.save(4, wait=True)
    assert directories(root) == ["checkpoint-3", "checkpoint-4"]
    assert catalog.inspect(LocalStorage(root), "checkpoint-4", NAMING).valid


DIES = """
import os, signal, sys, torch, easyckpt
from easyckpt.format import layout
from tests.support import training
from tests.support.commands import run  # noqa: F401 - a fixture
from tests.support.naming import CheckpointNaming
layout.NativeNaming = CheckpointNaming
checkpointer = easyckpt.Checkpointer(sys.argv[1], {"model": torch.nn.Linear(3, 3)}, save_storage_interval=1000)
checkpointer.load()
checkpointer.save_if_needed(5)
checkpointer.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_rescue_commits_under_the_scheme_that_it_is_given(root, memory_dir):
    died = subprocess.run([sys.executable, "-c", DIES, str(root)], capture_output=True, check=False)
    assert died.returncode == -9, died.stderr
    config = CheckpointConfig(memory_dir=str(memory_dir))
    assert [item.path for item in rescue_module.rescue(str(root), config, NAMING)] == [str(root / "checkpoint-5")]
    assert directories(root) == ["checkpoint-5"]
