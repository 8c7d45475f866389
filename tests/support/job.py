"""A small training job for tests that kill it: one process, or gloo ranks under torchrun.

Everything that makes training random is in it: dropout, batch norm, a generator of its own, Python's and NumPy's.
It notes in ``--notes`` (JSON lines, one file a rank) what it has restored, each finished step before that is saved,
what it fails with, and at the end a digest of all state. Nothing is printed, so that a test can hold notes and logs
apart. With ``--serve-store`` it is what torchrun's agent is to its workers: a process that serves their c10d store.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import easyckpt
from easyckpt import failpoints
from easyckpt.events import Event
from easyckpt.storage.localfile import LocalFileReader
from tests.support.pacing import wait_for_a_slot


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--notes", required=True, help="path; the rank is appended")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON of Checkpointer settings")
    parser.add_argument("--load-step", type=int)
    parser.add_argument("--no-load", action="store_true")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="a step takes at least this long")
    parser.add_argument("--hurried", action="store_true", help="steps may be too short for their snapshots")
    parser.add_argument("--save-at", type=int, default=-1, help="save(step, wait=True) after this step")
    parser.add_argument("--other-disk", help="this directory is an empty one of this rank's own")
    parser.add_argument("--ask-at", type=int, default=-1, help="save(step) after this step, without waiting")
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--interrupt-seal-of", type=int, default=-1, help="Ctrl-C while this step's snapshot is sealed")
    parser.add_argument("--exit-at", type=int, default=-1, help="sys.exit(0) inside the loop")
    parser.add_argument("--without-with", action="store_true", help="neither with nor close()")
    parser.add_argument("--watch-preempted", action="store_true")
    parser.add_argument("--destroy-group", action="store_true", help="destroy the process group before close()")
    parser.add_argument("--workers", type=int, default=0, help="take a batch from a loader with so many before a step")
    parser.add_argument("--apart", action="store_true", help="ranks without collectives: only easyckpt joins them")
    parser.add_argument("--layers", type=int, default=0, help="linear layers, used in another order than registered")
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    parser.add_argument("--no-settle", action="store_true")
    parser.add_argument("--mischief-rank", type=int, help="what follows happens on this rank only")
    parser.add_argument("--tear-at", type=int, default=-1, help="write to a parameter while its snapshot is taken")
    parser.add_argument("--drift-at", type=int, default=-1, help="change a parameter before this step is saved")
    parser.add_argument("--skip-at", type=int, default=-1, help="there is no free slot for this step")
    parser.add_argument("--grow-at", type=int, default=-1, help="the state grows in this step, and memory cannot")
    parser.add_argument("--grows", choices=sorted(GROWTH), help="what grows, on all ranks")
    parser.add_argument("--no-memory-rank", type=int, help="this rank has no memory for even one snapshot")
    parser.add_argument("--pause-at", type=int, default=-1, help="after saving this step do something else ...")
    parser.add_argument("--pause-seconds", type=float, default=0.0, help="... for so long, as a validation would")
    parser.add_argument("--then", choices=sorted(CHANGES), default="nothing", help="after the last step")
    parser.add_argument("--hears-late", type=float, default=0.0, help="seconds by which rank 0's board is read late")
    parser.add_argument("--leads-late", type=float, default=0.0, help="the same for rank 0, from --pause-at on")
    parser.add_argument("--lag", type=float, default=0.0, help="seconds by which each step is longer")
    parser.add_argument("--slow-reads", type=float, default=0.0, help="seconds that storage takes for one read more")
    parser.add_argument("--wait-at-end", type=float, default=0.0, help="wait(this many seconds) after the last step")
    parser.add_argument("--die-at", type=int, default=-1, help="SIGKILL after this step, but not after a restart")
    parser.add_argument("--hold-at", type=int, default=-1, help="after saving this step wait for ever (to be killed)")
    return parser.parse_args()


def mount_over(path: str) -> None:
    """As on another host: for this process alone, an empty file system lies over `path`. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, recursive_private = 0x20000, 0x4000 | 0x40000
    os.makedirs(path, exist_ok=True)
    for failed in (
        libc.unshare(new_namespace),
        libc.mount(b"none", b"/", None, recursive_private, None),
        libc.mount(b"tmpfs", path.encode(), b"tmpfs", 0, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "mount namespace")


def written_to(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(1.0)  # the same values, but nobody could know


#: What a program may do between its last step and its end, given (net, optimizer, progress).
CHANGES = {
    "nothing": lambda net, optimizer, progress: None,
    "buffer": lambda net, optimizer, progress: net[1].running_mean.add_(1),
    "generator": lambda net, optimizer, progress: torch.rand(1),
    "number": lambda net, optimizer, progress: progress.update(seen=-1),
    "parameter": lambda net, optimizer, progress: written_to(next(net.parameters())),
    "element": lambda net, optimizer, progress: net[0].weight.data[1].sub_(0.1),
    "average": lambda net, optimizer, progress: [p.data.copy_(0.9 * p.data) for p in net.parameters()],
    "step": lambda net, optimizer, progress: optimizer.step(),
    "evaluation": lambda net, optimizer, progress: None,
}


#: Neither can a slot grow, nor can a larger one be made.
NO_ROOM = "slot.seal.grow@*=error:ENOSPC;supply.prepared@*=error:ENOSPC"
GROWTH = {
    "text": lambda progress: progress.update(text="x" * 400_000),
    "tensor": lambda progress: progress.update(tensor=torch.zeros(1 << 20)),
}


class Notes:
    def __init__(self, path: str, rank: int) -> None:
        self._fd = os.open(f"{path}.{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, **note) -> None:
        os.write(self._fd, (json.dumps(note) + "\n").encode())


def digest_of(*objects) -> str:
    """Over every tensor, number and generator state, in a fixed order."""
    digest = hashlib.sha256()

    def feed(value) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray):
            digest.update(value.tobytes())
        elif isinstance(value, dict):
            for key in value:
                digest.update(repr(key).encode())
                feed(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                feed(item)
        else:
            digest.update(repr(value).encode())

    for item in objects:
        feed(item)
    return digest.hexdigest()


class Net(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm, self.drop, self.out = nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers[1::2], *self.layers[::2]]:
            x = torch.tanh(layer(x))
        return self.out(self.drop(torch.relu(self.norm(x))))


def batches_of_workers(checkpointer: easyckpt.Checkpointer, workers: int) -> Iterator[torch.Tensor]:
    loader = DataLoader(torch.zeros(100_000, 1), batch_size=2, num_workers=workers)
    return checkpointer.batches(loader, 0)


def serve_store() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent too outlives the ranks that it ends
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _store = dist.TCPStore(*place, None, True, wait_for_workers=False)
    while True:
        signal.pause()


def after_a_restart() -> bool:
    """By torchrun: what a test has armed was meant for the first start."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def leave_no_slot(checkpointer: easyckpt.Checkpointer, step: int) -> None:
    arena = checkpointer._parts.arena
    acquire = arena.acquire
    arena.acquire = lambda number, *rest: None if number == step else acquire(number, *rest)


def interrupt_seal(checkpointer: easyckpt.Checkpointer, step: int) -> None:
    stager = checkpointer._parts.stager
    emit = stager._emit

    def interrupted(event: Event) -> None:
        if type(event).__name__ == "SnapshotSealed" and event.step == step:
            raise KeyboardInterrupt
        emit(event)

    stager._emit = interrupted


def leave_no_memory(checkpointer: easyckpt.Checkpointer) -> None:
    type(checkpointer._parts.arena).count = property(lambda self: 0)


def read_late(checkpointer: easyckpt.Checkpointer, seconds: float) -> None:
    mailbox = checkpointer._parts.mailbox
    board = mailbox.board

    def late() -> object:
        value = board()
        time.sleep(seconds)
        return value

    mailbox.board = late


def read_slowly(seconds: float) -> None:
    read_into = LocalFileReader.read_into

    def slowly(reader: LocalFileReader, buffer: bytearray, offset: int) -> int:
        time.sleep(seconds)
        return read_into(reader, buffer, offset)

    LocalFileReader.read_into = slowly


def main() -> None:
    if "--serve-store" in sys.argv:
        serve_store()
    args = arguments()
    if after_a_restart():
        failpoints.arm("")
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0
    notes = Notes(args.notes, rank)
    mischief = args.mischief_rank in (None, rank)

    torch.manual_seed(0)
    width = args.width
    net: nn.Module = nn.Sequential(
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1)
    )
    if args.layers:
        net = Net(width, args.layers)
    model = net
    if distributed and not args.apart:
        model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=args.bucket_cap_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    torch.manual_seed(100 + rank)
    random.seed(rank)
    np.random.seed(rank)
    data = torch.Generator().manual_seed(7 + rank)
    progress = {"seen": 0, "history": []}
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data, "progress": progress}

    def step(number: int) -> float:
        begun = time.monotonic()
        inputs = torch.randn(8, width, generator=data) + random.random() + float(np.random.rand())
        loss = model(inputs).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        progress["seen"] += 8
        progress["history"] = [*progress["history"][-3:], number]
        while time.monotonic() - begun < args.step_seconds:
            time.sleep(min(0.001, args.step_seconds))
        return loss.item()

    if distributed and not args.no_settle:
        easyckpt.settle_ddp(model, lambda: model(torch.zeros(8, width)).sum().backward())
    number, asked, paced = 0, None, not args.hurried
    try:
        with contextlib.ExitStack() as stack:
            if mischief and args.other_disk:
                mount_over(args.other_disk)
            checkpointer = easyckpt.Checkpointer(args.root, state, **args.settings)
            if not args.without_with:
                stack.enter_context(checkpointer)
            if mischief and args.slow_reads:
                read_slowly(args.slow_reads)
            if mischief and args.hears_late:
                read_late(checkpointer, args.hears_late)
            if mischief and args.skip_at >= 0:
                leave_no_slot(checkpointer, args.skip_at)
            if args.interrupt_seal_of >= 0:
                interrupt_seal(checkpointer, args.interrupt_seal_of)
            if rank == args.no_memory_rank:
                leave_no_memory(checkpointer)
            first = 0
            if not args.no_load:
                restored = checkpointer.load(step=args.load_step)
                first = restored.step
                notes.write(restored=restored.step, tier=restored.tier, time=time.time(), seen=progress["seen"])
            loss = 0.0
            batches = batches_of_workers(checkpointer, args.workers) if args.workers else itertools.repeat(None)
            for number in range(first + 1, args.steps + 1):
                next(batches)
                loss = step(number)
                if number == args.grow_at:
                    GROWTH[args.grows](progress)
                    failpoints.arm(NO_ROOM if mischief else "")
                if mischief and number == args.drift_at:
                    next(net.parameters()).data.mul_(1.5)
                time.sleep(args.lag if mischief else 0.0)
                notes.write(finished=number, loss=loss.hex(), time=time.time())
                checkpointer.log(loss=loss)
                paced = paced and wait_for_a_slot(checkpointer, number)
                checkpointer.save_if_needed(number)
                if mischief and number == args.tear_at:
                    written_to(next(net.parameters()))
                if rank == 0 and number == args.pause_at:
                    read_late(checkpointer, args.leads_late)
                if mischief and number == args.pause_at:
                    notes.write(pauses=number)
                    time.sleep(args.pause_seconds)
                if mischief and number == args.die_at and not after_a_restart():
                    os.kill(os.getpid(), signal.SIGKILL)
                if number == args.save_at:
                    notes.write(asked=number)
                    checkpointer.save(number, wait=True)
                    notes.write(saved=number)
                if mischief and number == args.ask_at:
                    asked = checkpointer.save(number)
                if mischief and number == args.raise_at:
                    raise RuntimeError("the training has failed")
                if number == args.exit_at:
                    sys.exit(0)
                while number == args.hold_at:
                    time.sleep(0.05)
                if args.watch_preempted and checkpointer.preempted:
                    notes.write(preempted=number)
                    break
            if mischief:
                CHANGES[args.then](net, optimizer, progress)
                if args.then == "evaluation":  # draws from the generators, and is a new loader in the state
                    loader = DataLoader(TensorDataset(torch.ones(8, args.width)), 4)
                    net.eval()
                    sum(float(net(x).sum()) for (x,) in checkpointer.batches(loader, 0, name="eval"))
                    net.train()
            if args.wait_at_end:
                checkpointer.wait(args.wait_at_end)
            counts = checkpointer.stats().counts
            random_states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1], data.get_state()]
            state_digest = digest_of(
                net.state_dict(), optimizer.state_dict(), scheduler.state_dict(), progress, random_states
            )
            notes.write(digest=state_digest, loss=loss.hex(), counts=counts)
            if args.destroy_group and distributed:
                dist.destroy_process_group()
    except BaseException as error:
        answer = "" if asked is None else type(asked.exception()).__name__ if asked.done() else "none"
        notes.write(error=type(error).__name__, text=str(error), at=number, time=time.time(), answer=answer)
        raise
    if distributed and not args.destroy_group and not args.without_with:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
