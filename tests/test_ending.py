"""Exit code 0 means that the newest step is durable, whatever a program does at its end. Real programs throughout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import committed
from tests.support.zygote import fork_program

PREAMBLE = """
import os, signal, sys, threading, time
import torch
from torch import nn
import easyckpt
from easyckpt import failpoints

def make(steps=3, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"save_storage_interval": 1000, **settings}
    checkpointer = easyckpt.Checkpointer(sys.argv[1], {"model": model, "optimizer": optimizer}, **settings)
    first = checkpointer.load().step
    for step in range(first + 1, first + steps + 1):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save_if_needed(step)
    return checkpointer

def until(condition):
    while not condition():
        time.sleep(0.001)
"""


def run(root: Path, body: str, **environment: str) -> tuple[int, str, str]:
    """(exit code, what was printed, what went to standard error) of a program."""
    child = fork_program(PREAMBLE + body, root, directory=root.parent, **environment)
    printed, said = child.communicate(100)
    return int(child.returncode or 0), printed, said


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


LOSES = {
    "no thread can be started any more": """
        class NoWorker(coordinator_thread.Worker):
            def __init__(self, name):
                raise RuntimeError("can't start new thread at interpreter shutdown")
        coordinator_thread.Worker = NoWorker
    """,
    "the look fails with anything": """
        def look(flush):
            raise ValueError("no such thing")
        object.__setattr__(thread._parts, "committed_by", look)
    """,
    "the thread dies where it ends all": """
        def lost(error):
            raise MemoryError
        thread._lost = lost
    """,
    "the thread dies by what is no error": """
        def gone(self):
            raise SystemExit
    """,
}


@pytest.mark.parametrize("how", LOSES)
def test_a_coordinator_that_is_lost_in_whatever_way_is_no_end_that_was_agreed(root, how):
    body = f"""
import textwrap
from easyckpt.distributed import mailbox
from easyckpt.errors import PeerError
from easyckpt.saving import coordinator_thread
held = sys.argv[1] + ".held"
failpoints.arm(f"writer.shard.written=hold:{{held}}")
checkpointer = make()
coordinator = checkpointer._parts.coordinator
thread = coordinator._thread
checkpointer._parts.stager.end_window("wait")
coordinator.due(3, forced=True)
until(lambda: os.path.exists(held) and thread.board.flush is not None)

def gone(self):
    raise PeerError("the store is gone")

exec(textwrap.dedent({LOSES[how]!r}))
mailbox.LocalMailbox.posts = gone
until(lambda: not thread._thread.is_alive())
print(coordinator.emergency(60))
failpoints.arm("writer.shard.synced=error:EIO")
open(held + ".go", "w")
"""
    code, printed, said = run(root, body)
    assert (code, printed) == (1, "True\n"), said
    assert "NOT durable" in said
    assert committed(root) == []
