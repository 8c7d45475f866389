"""``make demo``: train, be killed twice in the worst moments, go on, and end equal to the bit.

Two torchrun processes train ``examples/train_lm.py``:

1. once without interruption: this is how it should end;
2. again, until all of them are killed with SIGKILL while a flush to storage is half-way (a failpoint holds it there);
3. they go on from shared memory, until they are killed again, and this run's shared memory is wiped;
4. they go on from storage to the end.

Then every tensor of the final checkpoint and every line of the loss log must equal those of the first run.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
PROCESSES = 2
STEPS = 60
FLUSH_EVERY = 20
PATIENCE = 600.0  # seconds that any one phase may take, on a busy machine, before the demo gives up


class DemoFailed(Exception):
    """Something did not go as promised; the message says what."""


def say(text: str) -> None:
    """One line of the story, at once."""
    print(text, flush=True)


class Job:
    """One launch of the training under torchrun, with its files below `directory`."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.root = directory / "checkpoints"
        self.losses = directory / "loss.csv"
        self.log = directory / "log.txt"
        directory.mkdir(exist_ok=True)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"),
            *(str(HERE / "train_lm.py"), "--root", str(self.root), "--loss-csv", str(self.losses)),
            *("--steps", str(STEPS), "--save-storage-interval", str(FLUSH_EVERY)),
        ]
        with self.log.open("ab") as log:
            self.process = psutil.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True
            )

    def finished_steps(self) -> int:
        """Steps in the loss log."""
        lines = self.losses.read_text().splitlines() if self.losses.exists() else []
        return int(lines[-1].split(",")[0]) if len(lines) > 1 and lines[-1].split(",")[0].isdigit() else 0

    def wait_until(self, what: str, reached: Callable[[], bool]) -> None:
        """Wait for `reached`; a job that ends before it, or takes too long, ends the demo."""
        deadline = time.monotonic() + PATIENCE
        while not reached():
            if self.process.poll() is not None:
                raise DemoFailed(f"the training ended before {what}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise DemoFailed(f"no {what} after {PATIENCE:.0f} s:\n{self.log_tail()}")
            time.sleep(0.01)

    def wait_for_the_end(self) -> None:
        """Wait until the training is through; it must say that all went well."""
        try:
            code = self.process.wait(PATIENCE)
        except psutil.TimeoutExpired:
            raise DemoFailed(f"the training did not end:\n{self.log_tail()}") from None
        if code != 0:
            raise DemoFailed(f"the training ended with exit code {code}:\n{self.log_tail()}")

    def kill(self) -> None:
        """SIGKILL for all processes of the job, the launcher first, so that none can react to another's death."""
        if not self.process.is_running():
            return
        self.process.suspend()
        family = [self.process, *self.process.children(recursive=True)]
        for process in family:
            process.kill()
        psutil.wait_procs(family, timeout=PATIENCE)
        self.process.wait()

    def log_tail(self) -> str:
        """The last lines that the training printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


@contextmanager
def launched(directory: Path, memory: Path, **failpoints: str) -> Iterator[Job]:
    """A job that does not outlive the demo, whatever happens."""
    job = Job(directory, {"EASYCKPT_MEMORY_DIR": str(memory), **failpoints})
    try:
        yield job
    finally:
        job.kill()


def cli(*arguments: str) -> Any:
    """What ``easyckpt ... --json`` prints."""
    command = [sys.executable, "-m", "easyckpt", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoFailed(f"{' '.join(command)} ended with code {done.returncode}: {done.stderr or done.stdout}")
    return json.loads(done.stdout)


def committed(root: Path) -> list[int]:
    """Steps that are committed in `root`; none where it does not exist yet."""
    if not root.exists():
        return []
    return [row["step"] for row in cli("ls", str(root))["checkpoints"] if row["valid"]]


def restored(root: Path) -> list[tuple[str, int]]:
    """(tier, step) of each restore of rank 0 so far, from the event log."""
    log = root / "events" / "rank-00000.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [(event["tier"], event["step"]) for event in events if event["event"] == "Restored" and event["step"]]


def expect(holds: bool, what: str) -> None:
    """End the demo unless `holds`."""
    if not holds:
        raise DemoFailed(f"not as promised: {what}")


def uninterrupted(work: Path, memory: Path) -> Job:
    """Phase 1."""
    say(f"1. {STEPS} steps on {PROCESSES} processes, without interruption")
    started = time.monotonic()
    with launched(work / "straight", memory) as job:
        job.wait_for_the_end()
    say(f"   done in {time.monotonic() - started:.0f} s; committed steps {committed(job.root)}")
    return job


def killed_in_a_flush(work: Path, memory: Path) -> int:
    """Phase 2; returns how many steps were finished."""
    say(f"2. the same again; the flush of step {FLUSH_EVERY} is held half-way, and training goes on")
    hold = work / "held"
    with launched(work / "killed", memory, EASYCKPT_FAILPOINTS=f"writer.shard.chunk=hold:{hold}") as job:
        job.wait_until("flush to hold", hold.exists)
        job.wait_until("steps during the flush", lambda: job.finished_steps() >= FLUSH_EVERY + 5)
        job.kill()
    finished = job.finished_steps()
    left = [path.name for path in job.root.iterdir() if path.name.startswith(".step-")]
    say(f"   SIGKILL for all after step {finished}: committed {committed(job.root)}, left half-written {left}")
    expect(not committed(job.root), "a half-written checkpoint is not taken for a good one")
    expect(bool(left), "the kill hit a flush")
    say(f"   in shared memory: {sum(path.stat().st_size for path in memory.iterdir()) >> 20} MiB of snapshots")
    return finished


def resumed_from_memory(work: Path, memory: Path, finished: int) -> None:
    """Phase 3."""
    say("3. started again: there is nothing in storage, so it must go on from shared memory")
    with launched(work / "killed", memory) as job:
        due = 2 * FLUSH_EVERY
        committed_name = job.root / f"step-{due:08d}"  # a directory has this name from the commit on
        job.wait_until(f"commit of step {due}", lambda: job.finished_steps() > due + 2 and committed_name.is_dir())
        job.kill()
    tier, step = restored(job.root)[-1]
    say(f"   went on from {tier} at step {step}; killed again after step {job.finished_steps()}")
    expect(job.finished_steps() < STEPS, "killed before the end")
    expect(tier == "memory", "restored from memory")
    expect(finished - 2 <= step <= finished, f"at most two of {finished} finished steps are lost")
    for path in memory.iterdir():
        path.unlink()
    say(f"   this run's shared memory is wiped; committed steps {committed(job.root)}")


def resumed_from_storage(work: Path, memory: Path) -> Job:
    """Phase 4."""
    newest = committed(work / "killed" / "checkpoints")[-1]
    say(f"4. started again: it must go on from storage at step {newest}")
    with launched(work / "killed", memory) as job:
        job.wait_for_the_end()
    tier, step = restored(job.root)[-1]
    say(f"   went on from {tier} at step {step} and trained to the end; committed steps {committed(job.root)}")
    expect((tier, step) == ("storage", newest), f"restored from storage at step {newest}")
    return job


def final_state(root: Path) -> dict[str, str]:
    """Digest of the newest checkpoint's parts: all tensors of all ranks, and their state that is not tensors."""
    shown = cli("show", str(root))
    expect(shown["step"] == STEPS, f"the newest checkpoint in {root} is of the last step")
    directory = root / shown["name"]
    state = {}
    for name in shown["files"]:
        if name.endswith(".safetensors"):
            state[name] = digest_of_tensors(directory / name)
        else:  # an index also names the run and the time; its objects are the state
            objects = json.dumps(json.loads((directory / name).read_bytes())["objects"])
            state[name] = hashlib.sha256(objects.encode()).hexdigest()[:20]
    return state


def digest_of_tensors(shard: Path) -> str:
    """One digest of all tensors of a rank: weights, optimizer state, torch's generators, position in the data.

    The generators of Python and NumPy are saved too, but this training never seeds them, so they begin at another
    place in each fresh run; they are left out.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(shard).items()):
        if not {"python", "numpy"} & set(name.split(".")):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:20]


def compare(straight: Job, killed: Job) -> None:
    """Every byte of the final state, and of the loss log."""
    expected, found = final_state(straight.root), final_state(killed.root)
    say(f"   {'part of the final state':<24}  {'uninterrupted':<20}  killed twice")
    for name in sorted({*expected, *found}):
        say(f"   {name:<24}  {expected.get(name, '-'):<20}  {found.get(name, '-')}")
    expect(expected == found, "the final states are equal to the bit")
    expect(filecmp.cmp(straight.losses, killed.losses, shallow=False), "the loss logs are equal to the last digit")
    say(f"   loss logs: {len(straight.losses.read_text().splitlines()) - 1} lines, equal")
    verified = cli("verify", str(killed.root))
    say(f"   easyckpt verify: {len(verified['checkpoints'])} checkpoints, every byte as committed")


def demo(work: Path, memory: Path) -> None:
    """The whole story; raises DemoFailed where it goes wrong."""
    straight = uninterrupted(work, memory)
    finished = killed_in_a_flush(work, memory)
    resumed_from_memory(work, memory, finished)
    killed = resumed_from_storage(work, memory)
    say("5. compared")
    compare(straight, killed)


def main() -> int:
    """Run the demo in fresh directories; 0 if all was as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the files of the runs for a look")
    keep = parser.parse_args().keep
    work = Path(tempfile.mkdtemp(prefix="easyckpt-demo-"))
    shared = Path("/dev/shm")
    memory = Path(tempfile.mkdtemp(prefix="easyckpt-demo-", dir=shared if os.access(shared, os.W_OK) else work))
    started = time.monotonic()
    try:
        demo(work, memory)
    except DemoFailed as failure:
        say(f"\nFAILED: {failure}\nThe files are in {work}.")
        keep = True
        return 1
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
    say(f"\nKilled twice, equal to the bit. ({time.monotonic() - started:.0f} s)")
    if keep:
        say(f"The files are in {work}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
