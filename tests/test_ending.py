"""Exit code 0 means that the newest step is durable, whatever a program does at its end. Real programs throughout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import REPOSITORY, committed
from tests.support.zygote import fork_program

PREAMBLE = """
import os, signal, sys, threading, time
import torch
from torch import nn
import easyckpt
from easyckpt import failpoints
from tests.support.pacing import wait_for_a_slot

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
        wait_for_a_slot(checkpointer, step)
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


LOSES = {
    "no thread can be started any more": """
        class NoWorker(last_look.Worker):
            def __init__(self, name):
                raise RuntimeError("can't start new thread at interpreter shutdown")
        last_look.Worker = NoWorker
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
from easyckpt.saving import last_look
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
until(lambda: thread.join(0))
print(coordinator.emergency(60))
failpoints.arm("writer.shard.synced=error:EIO")
open(held + ".go", "w")
"""
    code, printed, said = run(root, body)
    assert (code, printed) == (1, "True\n"), said
    assert "NOT durable" in said
    assert committed(root) == []


def run_interpreter(root: Path, body: str, *arguments: str, stdin: str = "") -> tuple[int, str]:
    """(exit code, standard error) of a program in an interpreter of its own."""
    program = root.with_name("program.py")
    program.write_text(PREAMBLE + body)
    command = [sys.executable, *arguments, str(program), str(root)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    options = {"input": stdin, "capture_output": True, "text": True, "env": environment, "timeout": 100}
    ended = subprocess.run(command, check=False, **options)
    return ended.returncode, ended.stderr


SHOWS = {
    "hook": "sys.excepthook(*sys.exc_info())",
    "interactive": "import code; code.InteractiveInterpreter().showtraceback()",
    "last": "sys.last_value = sys.exc_info()[1]; sys.excepthook(*sys.exc_info())",
}


@pytest.mark.parametrize("how", SHOWS)
def test_an_exception_that_is_only_shown_does_not_end_the_job(root, how):
    body = f"""
checkpointer = make(2)
try:
    1 / 0
except ZeroDivisionError:
    {SHOWS[how]}
checkpointer.save_if_needed(3)
"""
    code, _, said = run(root, body)
    assert (code, committed(root)) == (0, [3])
    assert "ZeroDivisionError" in said


def test_an_exception_that_ends_the_interpreter_starts_nothing_new(root):
    code, said = run_interpreter(root, "checkpointer = make()\n1 / 0\n")
    assert (code, committed(root)) == (1, [])
    assert "ZeroDivisionError" in said
    assert "NOT durable" not in said


def test_a_mistake_in_an_interactive_session_does_not_end_the_job(root):
    code, said = run_interpreter(root, "", "-i", stdin="checkpointer = make()\nprint(checkpoint)\n")
    assert (code, committed(root)) == (0, [3]), said
    assert "NameError" in said


FORKS = """
import multiprocessing
context = multiprocessing.get_context("fork")
queue = context.Queue()

def train():
    queue.put("x" * 1_000_000)  # more than a pipe holds: multiprocessing sees to it at the end as well
    global checkpointer
    checkpointer = make()
    {then}

process = context.Process(target=train)
process.start()
print(len(queue.get()))
process.join()
print(process.exitcode)
"""


@pytest.mark.parametrize("then", ["pass", "sys.exit(0)", "checkpointer.close()"])
def test_a_process_that_multiprocessing_forks_ends_as_any_other(root, then):
    code, printed, said = run(root, FORKS.format(then=then))
    assert (code, printed) == (0, "1000000\n0\n"), said
    assert committed(root) == [3]


def test_a_forked_process_whose_last_save_fails_has_an_exit_code(root):
    code, printed, said = run(root, FORKS.format(then="pass"), EASYCKPT_FAILPOINTS="writer.shard.chunk@*=error:ENOSPC")
    assert (code, printed) == (0, "1000000\n1\n"), said
    assert said.count("NOT durable") == 1
    assert committed(root) == []


def test_a_forked_process_that_ends_by_an_exception_starts_nothing_new(root):
    code, printed, said = run(root, FORKS.format(then="1 / 0"))
    assert (code, printed) == (0, "1000000\n1\n"), said
    assert said.count("ZeroDivisionError: division by zero") == 1
    assert "NOT durable" not in said
    assert committed(root) == []


def test_a_process_that_multiprocessing_spawns_is_ended_once(root):
    """It runs what a forked one runs, and then its exit handlers."""
    body = """
import multiprocessing

def train():
    failpoints.arm("writer.shard.chunk@*=error:ENOSPC")
    make()

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=train)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
    code, said = run_interpreter(root, body)
    assert (code, said.count("NOT durable")) == (1, 1), said
    assert committed(root) == []


INTERRUPTED_CLOSE = """
held = sys.argv[1] + ".held"
checkpointer = make(exception_drain_timeout={drain})

def ours():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("easyckpt")]

def release(failing):
    failpoints.arm("writer.shard.synced=error:EIO" if failing else "")
    open(held + ".go", "w")

def interrupt():
    until(lambda: os.path.exists(held))
    os.kill(os.getpid(), signal.SIGINT)

def interrupt_and_release():
    interrupt()
    until(lambda: checkpointer._farewell.undurable is not None)
    release(failing=True)

failpoints.arm(f"writer.shard.written=hold:{{held}}")
threading.Thread(target={helper}).start()
try:
    checkpointer.close()
except KeyboardInterrupt:
    print("interrupted")
until(lambda: not ours())
"""


@pytest.mark.parametrize(
    ("then", "code", "said"),
    [
        ("", 1, "NOT durable"),
        ("checkpointer.close()", 1, "SaveFailed: step 3"),
        ("sys.exit(0)", 1, "NOT durable"),
        ("try:\n    checkpointer.close()\nexcept easyckpt.SaveFailed:\n    checkpointer.close()", 0, ""),
    ],
)
def test_a_close_that_was_interrupted_lets_go_and_passes_for_no_success(root, then, code, said):
    body = INTERRUPTED_CLOSE.format(drain=0.1, helper="interrupt_and_release")
    ended = run(root, f"{body}\n{then}")
    assert ended[:2] == (code, "interrupted\n")
    assert said in ended[2]
    assert committed(root) == []


def test_after_a_close_that_was_interrupted_the_process_can_go_on_from_memory(root):
    body = INTERRUPTED_CLOSE.format(drain=0.1, helper="interrupt_and_release")
    then = """
checkpointer = make(1)
checkpointer.close()
print(checkpointer.stats().last_committed_step)
"""
    _, printed, said = run(root, f"{body}\n{then}")
    assert printed == "interrupted\n4\n", said
    assert committed(root) == [4]


def test_what_becomes_durable_after_the_interrupt_is_success(root):
    helper = "lambda: (interrupt(), until(lambda: coordinator_leaves()), release(failing=False))"
    leaves = "\ncoordinator_leaves = lambda: checkpointer._parts.coordinator.ledger.post.aborted\n"
    body = INTERRUPTED_CLOSE.format(drain=60, helper=helper)
    code, printed, said = run(root, body.replace("failpoints.arm(f", leaves + "failpoints.arm(f", 1))
    assert (code, printed) == (0, "interrupted\n"), said
    assert committed(root) == [3]


@pytest.mark.parametrize("where", ["_parts.stager.close", "_parts.flusher.stop", "_channel.close"])
def test_an_interrupt_while_a_closed_job_lets_go_leaves_nothing_behind(root, where):
    *owner, name = where.split(".")
    body = f"""
checkpointer = make()
owner = checkpointer
for part in {owner!r}:
    owner = getattr(owner, part)
original = getattr(owner, {name!r})

def interrupted(*arguments):
    object.__setattr__(owner, {name!r}, original)
    os.kill(os.getpid(), signal.SIGINT)
    original(*arguments)

object.__setattr__(owner, {name!r}, interrupted)
try:
    checkpointer.close()
except KeyboardInterrupt:
    print("interrupted")
make(1).close()
"""
    code, printed, said = run(root, body)
    assert code == 0, said
    assert printed == "interrupted\n"
    assert committed(root) == [3, 4]


IN_EMERGENCY = """
held = sys.argv[1] + ".held"
checkpointer = make(signal_deadline=600)
checkpointer.preempted
signals = checkpointer._farewell.signals
flush = signals._flush

def main_is_in(name):
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None

def flush_late(seconds):
    until(lambda: main_is_in("see_emergency_through") or checkpointer._parts.coordinator.ledger.post.aborted)
    return flush(seconds)

def interrupt_and_release():
    until(lambda: os.path.exists(held) and main_is_in("see_emergency_through"))
    os.kill(os.getpid(), signal.SIGINT)
    until(lambda: main_is_in("_end_flusher"))
    open(held + ".go", "w")

def signalled():
    os.kill(os.getpid(), signal.SIGTERM)
    raise RuntimeError("the training has failed")
"""


def test_a_signal_that_came_before_the_exception_is_answered_though_its_watcher_hears_of_it_later(root):
    body = """
signals._flush = flush_late
with checkpointer:
    signalled()
"""
    code, _, said = run(root, IN_EMERGENCY + body)
    assert code == 1
    assert said.count("Traceback") == 1, said
    assert said.endswith("RuntimeError: the training has failed\n")
    assert committed(root) == [3]


def test_an_interrupt_while_a_signals_flush_is_waited_for_abandons_it(root):
    body = """
failpoints.arm(f"writer.shard.written=hold:{held}")
threading.Thread(target=interrupt_and_release).start()
with checkpointer:
    signalled()
"""
    code, _, said = run(root, IN_EMERGENCY + body)
    assert code == 1
    assert "interrupted again: what was being flushed is abandoned" in said
    assert said.endswith("RuntimeError: the training has failed\n")


def test_what_torch_raises_for_another_loaders_workers_meanwhile_changes_nothing(root):
    """Once for each loader: the first one has ended the training."""
    body = """
come = threading.Event()

def as_torch_does(*_):
    come.set()
    raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")

def raise_and_release():
    until(lambda: os.path.exists(held) and main_is_in("see_emergency_through"))
    os.kill(os.getpid(), signal.SIGCHLD)
    come.wait()
    open(held + ".go", "w")

signal.signal(signal.SIGCHLD, as_torch_does)
signals._flush = flush_late  # else it may be decided before the last window is sealed
failpoints.arm(f"writer.shard.written=hold:{held}")
threading.Thread(target=raise_and_release).start()
with checkpointer:
    signalled()
"""
    code, _, said = run(root, IN_EMERGENCY + body)
    assert code == 1
    assert said.endswith("RuntimeError: the training has failed\n")
    assert committed(root) == [3]
