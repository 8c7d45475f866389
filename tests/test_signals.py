"""Signals beside a program's own ideas of them: children, handlers put over ours, a signal while it all ends."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from easyckpt import catalog
from easyckpt.format import layout
from easyckpt.storage.local import LocalStorage
from easyckpt.verification import verify
from tests.support.zygote import fork_program

PREAMBLE = """
import os, signal, sys, time
import torch
from torch import nn
import easyckpt

got = []
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def make():
    checkpointer = easyckpt.Checkpointer(sys.argv[1], {"model": model, "optimizer": optimizer})
    checkpointer.load()
    for step in range(1, 4):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        checkpointer.save_if_needed(step)
    return checkpointer

def settle(seconds=2.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
"""


def run(root: Path, body: str) -> tuple[int, str]:
    """(exit code, what was printed) of a program."""
    child = fork_program(PREAMBLE + body, root, directory=root.parent)
    printed, _ = child.communicate(100)
    return int(child.returncode or 0), printed


IGNORED = """
import threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
checkpointer = make()
timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
timer.start()
wide = torch.ones(1200, 1200)
with checkpointer:
    torch.linalg.multi_dot([wide] * 60)  # one long call of C, within which the signal comes and is answered
    timer.join()
    while not checkpointer.stats().counts.get("FlushCommitted"):
        time.sleep(0.01)
    print("came through", flush=True)
    1 / 0
"""


def test_a_signal_that_is_ignored_ends_nothing_and_holds_up_no_end(root):
    code, printed = run(root, IGNORED)
    assert code == 1
    assert "came through" in printed


@pytest.mark.parametrize("how", ["fork", "multiprocessing", "thread"])
def test_a_signal_to_a_forked_child_is_the_childs_alone(root, how):
    """A child shares the wakeup descriptor: `Pool.terminate()` would end the training."""
    begin = {
        "fork": "child = os.fork()\nif child == 0:\n    time.sleep(60)\n    os._exit(0)\n",
        "multiprocessing": (
            "import multiprocessing\n"
            "process = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
            "process.start()\nchild = process.pid\n"
        ),
        "thread": (
            "import threading\n"
            "def fork():\n    global child\n    child = os.fork()\n"
            "    if child == 0:\n        time.sleep(60)\n        os._exit(0)\n"
            "thread = threading.Thread(target=fork)\nthread.start()\nthread.join()\n"
        ),
    }[how]
    body = f"""
checkpointer = make()
{begin}
time.sleep(0.3)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
settle(1.0)
print(os.waitstatus_to_exitcode(status), checkpointer.preempted)
checkpointer.close()
"""
    assert run(root, body) == (0, f"{-signal.SIGTERM} False\n")
    assert (root / "step-00000003").is_dir()


def test_a_handler_that_the_program_puts_over_ours_decides_what_becomes_of_it(root):
    body = """
checkpointer = make()
signal.signal(signal.SIGTERM, lambda *_: got.append("program"))
os.kill(os.getpid(), signal.SIGTERM)
settle()
checkpointer.save(4, wait=True)
checkpointer.close()
print(got)
"""
    assert run(root, body) == (0, "['program']\n")
    assert len({path.name for path in root.glob("step-*")} & {"step-00000002", "step-00000003"}) == 1  # at the signal
    assert (root / "step-00000004").is_dir()


@pytest.mark.parametrize("before", ["default", "handler"])
def test_what_a_handler_over_ours_passes_on_comes_to_the_one_before(root, before):
    first = "signal.signal(signal.SIGTERM, lambda *_: got.append('before'))" if before == "handler" else ""
    body = f"""
{first}
checkpointer = make()
ours = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *args: ours(*args))
os.kill(os.getpid(), signal.SIGTERM)
settle()
checkpointer.close()
print(got)
"""
    expected = (0, "['before']\n") if before == "handler" else (-signal.SIGTERM, "")
    assert run(root, body) == expected
    assert (root / "step-00000003").is_dir() or (root / "step-00000002").is_dir()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("watches", [False, True])
def test_a_signal_while_the_job_closes_is_neither_waited_for_nor_lost(root, when, watches):
    body = f"""
checkpointer = make()
coordinator = checkpointer._parts.coordinator
close = coordinator.close
if {watches}:
    checkpointer.preempted

def closing(timeout):
    if {when == "before"}:
        os.kill(os.getpid(), signal.SIGTERM)
    close(timeout)
    if {when == "after"}:
        os.kill(os.getpid(), signal.SIGTERM)

coordinator.close = closing
begun = time.monotonic()
import atexit
atexit.register(lambda: print("clean", time.monotonic() - begun < 10))
checkpointer.close()
print("closed", time.monotonic() - begun < 10)
settle(1.0)
"""
    code, output = run(root, body)
    assert (root / "step-00000003").is_dir()
    if watches:  # a program that watches was told, and has ended its loop
        assert (code, output) == (0, "closed True\nclean True\n")
    else:
        assert code == -signal.SIGTERM


def test_a_signal_is_seen_where_another_has_taken_the_wakeup_descriptor(root):
    """asyncio takes it for the handlers of a loop, and a signal would be neither acted upon nor passed on."""
    body = """
import asyncio
checkpointer = make()
loop = asyncio.new_event_loop()
loop.add_signal_handler(signal.SIGUSR1, lambda: None)
os.kill(os.getpid(), signal.SIGTERM)
settle(20)
"""
    code, output = run(root, body)
    assert (code, output) == (-signal.SIGTERM, "")
    assert list(root.glob("step-*"))


def test_what_had_the_wakeup_descriptor_before_may_be_gone_at_the_end(root):
    body = """
import asyncio
loop = asyncio.new_event_loop()
loop.add_signal_handler(signal.SIGUSR1, lambda: None)
checkpointer = make()
loop.close()
pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(3)]  # under the numbers that it had
checkpointer.close()
print(signal.set_wakeup_fd(-1))
"""
    assert run(root, body) == (0, "-1\n")
    assert (root / "step-00000003").is_dir()


@pytest.mark.parametrize("order", ["(first, second)", "(second, first)"])
@pytest.mark.parametrize("kind", ["closed", "signalled"])
def test_two_checkpointers_share_a_signal_and_end_in_any_order(root, order, kind):
    body = f"""
before = signal.getsignal(signal.SIGTERM)
first = make()
sys.argv[1] += "-2"
second = make()
if {kind == "signalled"}:
    os.kill(os.getpid(), signal.SIGTERM)
    settle(20)
for checkpointer in {order}:
    checkpointer.close()
print(signal.getsignal(signal.SIGTERM) is before, signal.set_wakeup_fd(-1))
"""
    expected = (0, "True -1\n") if kind == "closed" else (-signal.SIGTERM, "")
    assert run(root, body) == expected
    for path in (root, root.with_name("run-2")):
        assert list(path.glob("step-*"))


def test_one_of_two_checkpointers_that_ended_leaves_the_other_its_signals(root):
    body = """
first = make()
sys.argv[1] += "-2"
second = make()
first.close()
read, write = os.pipe(), os.pipe()  # under the numbers that the first one had
os.kill(os.getpid(), signal.SIGTERM)
settle(20)
"""
    assert run(root, body) == (-signal.SIGTERM, "")
    assert list(root.with_name("run-2").glob("step-*"))


def test_every_signal_saves_what_is_newest_when_it_comes(root):
    """A program that takes one signal as a wish to save, and goes on; at last the signal that ends it."""
    body = """
signal.signal(signal.SIGUSR1, lambda *_: got.append("asked"))
settings = {"signals": ("SIGUSR1", "SIGTERM"), "save_storage_interval": 1000, "overlap": False}
checkpointer = easyckpt.Checkpointer(sys.argv[1], {"model": model, "optimizer": optimizer}, **settings)
checkpointer.load()
for step in range(1, 31):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    checkpointer.save_if_needed(step)
    while checkpointer.stats().counts["SnapshotSealed"] < step:  # without overlap the call has sealed it
        time.sleep(0.001)
    if step % 10 == 0:
        os.kill(os.getpid(), signal.SIGTERM if step == 30 else signal.SIGUSR1)
        while len(got) < step // 10:
            time.sleep(0.01)
        print(*got, flush=True)
"""
    assert run(root, body) == (-signal.SIGTERM, "asked\nasked asked\n")
    assert sorted(int(path.name[5:]) for path in root.glob("step-*")) == [10, 20, 30]


def test_a_loop_that_goes_on_without_looking_ends_as_soon_as_its_newest_snapshot_is_durable(root):
    body = """
import threading
checkpointer = easyckpt.Checkpointer(sys.argv[1], {"model": model, "optimizer": optimizer}, signal_deadline=60)
checkpointer.load()
step = 0
while True:
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    step += 1
    checkpointer.save_if_needed(step)
    if step == 20:
        os.kill(os.getpid(), signal.SIGTERM)
        print(time.time(), flush=True)
"""
    code, output = run(root, body)
    assert code == -signal.SIGTERM
    assert time.time() - float(output) < 30
    assert list(root.glob("step-*"))


def test_what_the_signal_has_saved_stands_in_the_logs_when_the_process_is_gone(root):
    """The default effect of the signal ends the process at once: what is not written by then never is."""
    body = """
checkpointer = make()
os.kill(os.getpid(), signal.SIGTERM)
settle(60)
"""
    assert run(root, body) == (-signal.SIGTERM, "")
    (committed,) = root.glob("step-*")
    events = [json.loads(line) for line in (root / "events/rank-00000.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "FlushCommitted"] == [int(committed.name[5:])]


@pytest.mark.parametrize("before", ["nothing", "asyncio"])
def test_what_has_the_number_of_a_descriptor_next_is_written_to_by_no_signal(root, before):
    """Only the main thread can tell Python where to write signals to; what closes elsewhere must leave it open."""
    body = f"""
import asyncio, tempfile, threading
asked = []
loop = asyncio.new_event_loop()
if {before == "asyncio"}:
    loop.add_signal_handler(signal.SIGUSR1, lambda: (asked.append("asked"), loop.stop()))
    loop.call_later(100, loop.stop)
else:
    signal.signal(signal.SIGUSR1, lambda *_: asked.append("asked"))
checkpointer = make()
signals = checkpointer._farewell.signals
numbers = (signals._read_fd, signals._write_fd)
thread = threading.Thread(target=checkpointer.close)
thread.start()
thread.join()
files = [tempfile.TemporaryFile(buffering=0) for _ in range(50)]
for file in files:
    file.write(b"precious")
os.kill(os.getpid(), signal.SIGUSR1)
if {before == "asyncio"}:
    loop.run_forever()
print(asked, {{os.pread(file.fileno(), 100, 0) for file in files}})
for file in files:
    file.close()
open_before = len(os.listdir("/proc/self/fd"))
for _ in range(3):
    sys.argv[1] += "-again"
    again = make()
    thread = threading.Thread(target=again.close)
    thread.start()
    thread.join()
print(len(os.listdir("/proc/self/fd")) - open_before)
sys.argv[1] += "-again"
make().close()
print(len(os.listdir("/proc/self/fd")) - open_before)
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""
    assert run(root, body) == (0, "['asked'] {b'precious'}\n0\n-2\nTrue\n")


@pytest.mark.parametrize("first", ["upper", "lower"])
@pytest.mark.parametrize("then", ["thread", "main"])
def test_checkpointers_that_end_on_other_threads_leave_what_they_found(root, first, then):
    body = f"""
import threading
before = signal.getsignal(signal.SIGTERM)
lower = make()
sys.argv[1] += "-2"
upper = make()
one, other = (upper, lower) if {first == "upper"} else (lower, upper)
thread = threading.Thread(target=one.close)
thread.start()
thread.join()
if {then == "thread"}:
    thread = threading.Thread(target=other.close)
    thread.start()
    thread.join()
    sys.argv[1] += "-3"
    other = make()
other.close()
print(signal.getsignal(signal.SIGTERM) is before, signal.set_wakeup_fd(-1))
"""
    assert run(root, body) == (0, "True -1\n")


INTERRUPTED = {
    "the hook waits for a copy": "hold()\nstep()",
    "a save waits for a copy": "hold()\ncheckpointer.save_if_needed(5)",
    "a lock of the coordinator's is held": (
        "interrupt(checkpointer._parts.coordinator.ledger._leader, 'add_due')\ncheckpointer.save(4)"
    ),
    "the lock of the counters is held": "interrupt(checkpointer._events, '_count_reason')\ncheckpointer.save(5)",
    "a load applies": "interrupt(checkpointer._loader, 'load')\ncheckpointer.load()",
    "the job closes": "interrupt(checkpointer._saver, 'close')\ncheckpointer.close()",
}


@pytest.mark.parametrize("place", INTERRUPTED)
def test_a_handler_that_calls_in_while_its_thread_is_inside_is_told_so_and_does_not_hang(root, place):
    """Taking SIGUSR1 for a wish to save is usual, and the handler runs wherever the main thread is."""
    body = f"""
import faulthandler, threading
from easyckpt import failpoints
faulthandler.dump_traceback_later(60, exit=True)
model = nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = easyckpt.Checkpointer(sys.argv[1], {{"model": model, "optimizer": optimizer}})
checkpointer.load()
refused, held = [], sys.argv[1] + ".held"
main = threading.main_thread().ident

def step():
    model(torch.randn(2, 256)).sum().backward()
    optimizer.step()

def handler(*_):
    calls = {{
        "save_if_needed": lambda: checkpointer.save_if_needed(9),
        "save": lambda: checkpointer.save(9),
        "load": checkpointer.load,
        "wait": checkpointer.wait,
        "close": checkpointer.close,
        "abandon": checkpointer.abandon,
    }}
    if {"hold" in INTERRUPTED[place]}:
        calls["step"] = optimizer.step
    for name, call in calls.items():
        try:
            call()
        except easyckpt.UsageError as error:
            assert "Set a flag in the handler" in str(error)
            refused.append(name)
    got.append((checkpointer.preempted, checkpointer.stats().counts["SnapshotBegun"] > 0))
    open(held + ".go", "w")

def interrupt(owner, name):
    original = getattr(owner, name)
    def interrupted(*arguments, **named):
        setattr(owner, name, original)
        os.kill(os.getpid(), signal.SIGUSR1)
        return original(*arguments, **named)
    setattr(owner, name, interrupted)

def waits():
    frame, names = sys._current_frames()[main], set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return {{"wait", "wait_before_step"}} <= names and os.path.exists(held)

def send():
    while not waits():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGUSR1)

def hold():
    threading.Thread(target=send).start()

signal.signal(signal.SIGUSR1, handler)
for number in range(1, 5):
    step()
    if number == 4 and {"hold" in INTERRUPTED[place]}:
        failpoints.arm(f"staging.copy=hold:{{held}}")
    checkpointer.save_if_needed(number)
exec({INTERRUPTED[place]!r})
print(*refused, *got)
if {place != "the job closes"}:
    step()
    checkpointer.save(6)
    checkpointer.close()
"""
    refused = "save_if_needed save load wait close abandon" + " step" * ("hold" in INTERRUPTED[place])
    assert run(root, body) == (0, f"{refused} (False, True)\n")
    assert (root / ("step-00000004" if place == "the job closes" else "step-00000006")).is_dir()


@pytest.mark.parametrize(
    "point", ["writer.shard.begin", "writer.index.synced", "commit.manifest.written", "commit.rename.before"]
)
def test_what_a_signal_flushes_before_the_first_save_is_no_leftover(root, tmp_path, point):
    """Restarted from memory, signalled at once: the first save finds the directory of an attempt that is running."""
    assert run(root, "make().wait()\nos._exit(9)\n") == (9, "")
    body = f"""
import threading
from easyckpt import failpoints
signal.signal(signal.SIGUSR1, lambda *_: None)
settings = {{"signals": ("SIGUSR1",), "save_storage_interval": 1000}}
checkpointer = easyckpt.Checkpointer(sys.argv[1], {{"model": model, "optimizer": optimizer}}, **settings)
first = checkpointer.load().step
hold, saved = {str(tmp_path / "hold")!r}, threading.Event()
failpoints.arm("{point}=hold:" + hold)
os.kill(os.getpid(), signal.SIGUSR1)
while not os.path.exists(hold):
    time.sleep(0.001)

def waits():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code.co_name != "_opened_line":
        frame = frame.f_back
    return frame is not None

def let_go():
    while not saved.is_set() and not waits():
        time.sleep(0.001)
    open(hold + ".go", "w").close()

threading.Thread(target=let_go).start()
for step in range(first + 1, first + 4):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    checkpointer.save_if_needed(step)
    saved.set()
while not checkpointer.stats().counts.get("FlushCommitted"):
    time.sleep(0.001)
    checkpointer.wait()
checkpointer.close()
"""
    assert run(root, body) == (0, "")
    storage = LocalStorage(root)
    entries = catalog.scan(storage, layout.NativeNaming()).entries
    # Where the line of training is open before the flush of step 3 comes to its commit, a later step takes its place.
    assert {entry.name for entry in entries} <= {layout.step_dir(step) for step in (3, 4, 5, 6)}
    assert entries[-1].name == layout.step_dir(6)
    assert not any(verify(storage, entry) for entry in entries)
