"""Storage that hangs for good, or for longer than the end of a job waits: told in bounded time, and told truly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from easyckpt import catalog
from easyckpt.format.layout import NativeNaming
from easyckpt.storage.local import LocalStorage
from easyckpt.verification import verify
from tests.support.zygote import fork_program

PROGRAM = """
import json, pathlib, sys, threading, time
import torch
from torch import nn
import easyckpt, easyckpt.farewell
from easyckpt import failpoints
from easyckpt.memory.owner import OwnerLock
from easyckpt.storage.local import LocalStorage

easyckpt.farewell.FAREWELL_SECONDS = 1.0
root, case = sys.argv[1:]
hangs, never, here = False, threading.Event(), threading.main_thread()

def hang(name):
    method = getattr(LocalStorage, name)
    def call(self, *arguments, **named):
        if hangs:
            never.wait()
        return method(self, *arguments, **named)
    setattr(LocalStorage, name, call)

model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
limits = dict(commit_timeout=1.0, peer_timeout=1.0, close_timeout=2.0, exception_drain_timeout=1.0)
checkpointer = easyckpt.Checkpointer(
    root, {"model": model, "optimizer": optimizer}, save_storage_interval=5, lease_interval=0.05, **limits
)
futures = []

def train(steps):
    for step in steps:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        checkpointer.save_if_needed(step)
        time.sleep(0.01)

def tell(error):
    told = {"error": type(error).__name__, "text": str(error)}
    told["futures"] = [type(future.exception()).__name__ if future.done() else "pending" for future in futures]
    told["owns"] = pathlib.Path(root, "lease.json").exists(), OwnerLock.is_free(checkpointer._opened.arena._owner.path)
    print(json.dumps(told), flush=True)

checkpointer.load()
"""


def run(root: Path, body: str, case: str = "") -> tuple[int, dict[str, object], str]:
    """(exit code, what was told, standard error) of a program."""
    child = fork_program(PROGRAM + body, root, case, directory=root.parent)
    printed, stderr = child.communicate(100)
    return int(child.returncode or 0), json.loads(printed), stderr


METHODS = "read replace append listdir stat_size exists rename create makedirs sync_dir remove remove_tree free_bytes"

HANGS_WHILE_IT_TRAINS = """
for name in case.split():
    hang(name)
try:
    with checkpointer:
        train(range(1, 13))
        checkpointer.wait()
        hangs = True
        futures.append(checkpointer.save(13))
        train(range(14, 1_000_000))
except Exception as error:
    tell(error)
    raise
"""


@pytest.mark.parametrize("methods", [METHODS, "rename", "sync_dir"])
def test_training_beside_storage_that_hangs_is_told_and_the_process_ends(root, methods):
    """Each step shows that training goes on, and each due step is skipped: neither says that storage lives."""
    code, told, _ = run(root, HANGS_WHILE_IT_TRAINS, methods)
    assert code == 1
    assert told["error"] in ("OutcomeUnknown", "PeerTimeout")
    assert "storage has not answered rank 0 for 3 s" in str(told["text"])
    assert told["futures"] == ["OutcomeUnknown"]


LOG_HANGS = """
hang("append")
with checkpointer:
    train(range(1, 13))
    checkpointer.wait()
    hangs = True
    train(range(13, 18))
tell(None)
"""


def test_a_log_that_hangs_keeps_no_job_from_ending(root):
    code, _, stderr = run(root, LOG_HANGS)
    assert code == 0, stderr
    assert catalog.scan(LocalStorage(root), NativeNaming()).committed()[-1].step == 17
    assert "storage does not answer after 1 s" in stderr


CLOSES_DURING_A_COMMIT = """
try:
    with checkpointer:
        train(range(1, 4))
        failpoints.arm(case)
        futures.append(checkpointer.save(3))
except Exception as error:
    tell(error)
    pathlib.Path(case.partition(":")[2] + ".go").touch()
    while not pathlib.Path(root, "latest").exists():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("point", ["commit.rename.before", "commit.rename.after"])
def test_a_commit_that_outlives_the_close_is_not_called_failed(root, tmp_path, point):
    """It goes on after close() has given up waiting, and becomes a checkpoint."""
    code, told, stderr = run(root, CLOSES_DURING_A_COMMIT, f"{point}=hold:{tmp_path}/held")
    assert code == 0, stderr
    assert "a flush is still running after 1 s" in stderr
    assert told["error"] == "PeerTimeout"
    assert "the flush of step 3" in str(told["text"])
    assert told["owns"] == [True, False]  # the rename that is to come is covered by the lease
    assert told["futures"] == ["NoneType" if point == "commit.rename.after" else "OutcomeUnknown"]
    storage = LocalStorage(root)
    entries = catalog.scan(storage, NativeNaming()).committed()
    assert [entry.step for entry in entries] == [3]
    assert not any(verify(storage, entry) for entry in entries)
