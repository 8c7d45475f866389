"""The process of `benchmarks/compare.py` that trains beside one library, writes what is to be damaged, or loads.

Prints JSON lines; what a library prints goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import common, peers
from benchmarks.peers.base import EVERY, Job, Peer, newest

WARM_UP = 7  # with one save to storage in it, the first
BLOCK = 10  # with two in it, the last of them two steps before the end
PREPARED = 2 * EVERY  # steps of the checkpoints that are damaged afterwards


def train(peer: Peer, job: Job) -> dict[str, Any]:
    """A block of steps after a warm-up, and then one save that is waited for."""

    def step() -> float:
        held = job.train(peer)
        number = job.progress["step"]
        return held + peer.save(number, number % EVERY == 0)

    warm_up = [step() for _ in range(WARM_UP)]
    peer.wait()
    begun = time.perf_counter()
    held = [step() for _ in range(BLOCK)]
    seconds = time.perf_counter() - begun
    peer.wait()
    job.train(peer)
    last = job.progress["step"]
    durable = common.timed(lambda: (peer.write_through(last), synced(peer.root)))
    return {
        # The first of those that write to storage, and of all where every step is one.
        "first": max(warm_up),
        "held": held if peer.every_step else [held[i] for i in range(BLOCK) if (WARM_UP + i + 1) % EVERY == 0],
        "seconds": seconds,
        "durable": durable,
        "digest": job.digest(),
        "state_bytes": job.state_bytes,
    }


def synced(root: Path) -> None:
    """Fsync of the newest checkpoint's files and of the directories up to the root, whoever has done it before."""
    path = newest(root)
    if path is None:
        return
    for place in [path, *(path.rglob("*") if path.is_dir() else ()), *path.parents]:
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if place == root:
            return


def write(peer: Peer, job: Job, steps: int | None, say: Any) -> None:
    """Save and wait until written, and tell the digest of every step; `steps` None: until killed."""
    while steps is None or job.progress["step"] < steps:
        job.train(peer)
        number = job.progress["step"]
        due = number % EVERY == 0
        say({"step": number, "digest": job.digest()})
        if due:
            say({"writing": number - peer.late})
        begun = time.perf_counter()
        peer.save(number, due)
        if due:
            peer.wait()
            say({"written": number - peer.late, "seconds": time.perf_counter() - begun})


def load(peer: Peer, job: Job) -> dict[str, Any]:
    """What a job that starts again finds."""
    begun = time.perf_counter()
    try:
        step = peer.load()
    except BaseException as error:  # noqa: BLE001 - whatever a library raises is the result
        return {"error": f"{type(error).__name__}: {error}".strip()[:400]}
    seconds = time.perf_counter() - begun
    return {"step": step, "digest": job.digest() if step is not None else None, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("train", "write", "load"))
    parser.add_argument("--peer", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    # Libraries print: our lines go where stdout was, and stdout goes to stderr, for their children too.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=out, flush=True)

    # A job that loads has begun otherwise, so that what it did not load shows.
    seed = 1 if arguments.mode == "load" else 0
    job = Job(arguments.width, arguments.layers, arguments.batch, seed)
    peer = peers.peer(arguments.peer)(arguments.root, job)
    if arguments.mode == "train":
        say(train(peer, job))
    elif arguments.mode == "write":
        write(peer, job, arguments.steps, say)
    else:
        say({"started": True})
        say(load(peer, job))
        with contextlib.suppress(BaseException):
            peer.close()
        return
    peer.close()
    say({"done": True})


if __name__ == "__main__":
    main()
    sys.stdout.flush()
