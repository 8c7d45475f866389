"""Everybody in one run: what does a save cost, and what is a checkpoint worth after a fault?

Each library trains the same model in a fresh process, in the configuration that its own documents give for this machine
(`benchmarks/peers/`, one file each). The libraries take turns, in another order each round; training time is compared
within a round, then the median is taken. One that does not run here is listed with its error.

    python -m benchmarks.compare [--only "NAME;NAME"] [--rounds 5] [--tries 3] [--quick]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import common, compare_plots, peers
from benchmarks.compare_faults import Child, ChildFailed, Size, all_faults, load, place, results
from benchmarks.compare_job import BLOCK, WARM_UP
from benchmarks.peers.base import EVERY, Job, Nothing

FULL = Size(width=1024, layers=28, batch=64)
QUICK = Size(width=256, layers=4, batch=64)
STEP = 0.4  # seconds, roughly
SEED = 7
FAULTS = ("bit flip", "missing file", "killed", "killed, memory kept")


class Result(dict[str, Any]):
    """Of one library: ``rounds``, ``faults``, ``peak_bytes``, or ``error``."""


def not_installed(name: str) -> str | None:
    """What to install, if that is missing."""
    package = peers.peer(name).package
    if package:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"not installed: pip install --no-deps {package}; benchmarks/README.md says what else"
    return None


def calibrated(size: Size, target: float) -> Size:
    """The same model with the batch at which a step takes about `target` seconds."""
    batch = size.batch
    for _ in range(3):
        job = Job(size.width, size.layers, batch)
        nothing = Nothing(common.HERE, job)
        seconds = common.median(
            [common.timed(lambda job=job, nothing=nothing: job.train(nothing)) for _ in range(5)][1:]
        )
        batch = max(1, round(batch * target / seconds))
    return Size(size.width, size.layers, batch)


def one_round(name: str, size: Size) -> dict[str, Any]:
    """One process that trains, and one that loads what it saved."""
    with place() as where:
        figures = results(Child("train", name, where, size))[0]
        if name != Nothing.name:
            where.lose_memory()
            loaded = load(name, where, size)
            if loaded.get("digest") != figures["digest"]:
                raise ChildFailed(f"what it loads is not what was saved last: {loaded}")
            figures["load"] = loaded["seconds"]
    return figures


def measure(names: list[str], size: Size, rounds: int, tries: int) -> dict[str, Result]:
    """Faults first, which warm everything up, then the rounds."""
    found = {name: Result(rounds=[], faults={}) for name in names}
    chance = random.Random(SEED)
    small = Size(size.width, size.layers, 8)  # the same state, faster steps
    for name in names:
        missing = not_installed(name)
        if missing is not None:
            found[name]["error"] = missing
            continue
        done = attempted(f"faults: {name}", found[name], lambda name=name: all_faults(name, small, tries, chance))
        if done is not None:
            found[name] |= {"faults": done[1], "peak_bytes": done[0].peak_bytes}
    for number in range(rounds):
        turn = names[number % len(names) :] + names[: number % len(names)]
        for name in turn if number % 2 else reversed(turn):
            if "error" not in found[name]:
                what = f"round {number + 1}: {name}"
                done = attempted(what, found[name], lambda name=name: one_round(name, size))
                found[name]["rounds"] += [done] if done is not None else []
    return found


def attempted(what: str, result: Result, action: Callable[[], Any]) -> Any:
    """What `action` returns. A failure is tried once more, and counted; a second one is the library's error."""
    begun = time.perf_counter()
    done, said = None, ""
    for last in (False, True):
        try:
            done = action()
            break
        except ChildFailed as failure:
            said = str(failure)
            result["error" if last else "failed once"] = said
    print(f"{what}, {time.perf_counter() - begun:.1f} s {said}", flush=True)
    return done


def summarised(result: Result, none: Result) -> dict[str, Any]:
    """Medians over the rounds; training time within a round."""
    rounds = result["rounds"]
    held = [seconds for one in rounds for seconds in one["held"]]
    pairs = zip(rounds, none["rounds"], strict=False)
    summary = {
        "first": common.median(one["first"] for one in rounds),
        "blocked": common.median(held) if held else 0.0,
        "blocked_p99": common.percentile(held, 0.99) if held else 0.0,
        "saves": len(held),
        "against_none": common.median([one["seconds"] / base["seconds"] for one, base in pairs] or [0.0]),
        "durable": common.median(one["durable"] for one in rounds),
        "peak_bytes": result["peak_bytes"],
    }
    if all("load" in one for one in rounds):
        summary["load"] = common.median(one["load"] for one in rounds)
    return summary


def told(found: list[dict[str, Any]]) -> str:
    """Outcomes of one fault, counted where they differ or are several."""
    outcomes = [one["outcome"] for one in found]
    return "; ".join(
        f"{outcome} {outcomes.count(outcome)}/{len(outcomes)}" if len(outcomes) > 1 else outcome
        for outcome in dict.fromkeys(outcomes)
    )


def row(name: str, result: Result, summary: dict[str, Any] | None) -> list[str]:
    """Of the table."""
    if summary is None:
        return [name, "does not run here", *["-"] * (len(HEADER) - 2)]
    if name == Nothing.name:
        return [name, *["-"] * 3, "1.00", "-", "-", f"{summary['peak_bytes'] / 1e9:.2f} GB", *["-"] * 4]
    times = [common.milliseconds(summary[key]) for key in ("first", "blocked", "blocked_p99")]
    faults = [told(result["faults"][fault]) if fault in result["faults"] else "-" for fault in FAULTS]
    return [
        name,
        *times,
        f"{summary['against_none']:.2f}",
        common.milliseconds(summary["durable"]),
        common.milliseconds(summary["load"]),
        f"{summary['peak_bytes'] / 1e9:.2f} GB",
        *faults,
    ]


HEADER = [
    "",
    "blocked, first",
    "median",
    "p99",
    "training against none",
    "until durable",
    "load",
    "peak memory",
    "bit flip",
    "missing file",
    "killed while writing",
    "the same, memory kept",
]


def configuration(name: str, result: Result) -> str:
    """A line on how it was used."""
    peer = peers.peer(name)
    version = ""
    if peer.package and not_installed(name) is None:
        version = f" {importlib.metadata.version(peer.package)}"
    memory = "memory every step, " if peer.every_step else ""
    error = f" **Does not run here: {result['error']}**" if "error" in result else ""
    if "failed once" in result and not error:
        error = f" One process failed, and went well when tried again: {result['failed once']}"
    saves = "" if name == Nothing.name else f"; {memory}storage every {EVERY}; fsync of its own: {peer.syncs}"
    return f"- **{name}**{version}: {peer.about}{saves}.{error}"


def report(found: dict[str, Result], size: Size, tries: int) -> None:
    """The table and plots in the README, and everything as JSON."""
    good = {name: result for name, result in found.items() if "error" not in result}
    summaries = {name: summarised(result, good["none"]) for name, result in good.items()}
    first = next(iter(good.values()))["rounds"][0]
    rounds = len(next(iter(good.values()))["rounds"])
    step = common.median(one["seconds"] for one in good["none"]["rounds"]) / BLOCK
    question = (
        f"{first['state_bytes'] / 1e6:.0f} MB of state, steps of {step:.2f} s; {rounds} rounds, in each a process a "
        f"library: {WARM_UP} steps to warm up, {BLOCK} measured; {tries} flipped bits and {tries} kills, one missing "
        f"file. p99 of "
        f"{', '.join(sorted({str(s['saves']) for n, s in summaries.items() if n != 'none'}, key=int))} saves is nearly "
        f"the longest.\n\n" + "\n".join(configuration(name, result) for name, result in found.items())
    )
    rows = [row(name, result, summaries.get(name)) for name, result in found.items()]
    document = {"size": size.arguments(), "summary": summaries, "libraries": found}
    common.write("compare", question, document, HEADER, rows)
    compare_plots.draw(summaries, common.RESULTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names, separated by semicolons: " + "; ".join(peers.WHERE))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tries", type=int, default=3, help="flipped bits and kills of each library")
    parser.add_argument("--quick", action="store_true", help="a small state and one round; writes no results")
    arguments, _ = parser.parse_known_args()
    wanted = arguments.only.split(";") if arguments.only else list(peers.WHERE)
    names = ["none", *(name.strip() for name in wanted if name.strip() != "none")]
    unknown = [name for name in names if name not in peers.WHERE]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are: {'; '.join(peers.WHERE)}")
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    size = QUICK if arguments.quick else calibrated(FULL, STEP)
    rounds, tries = (1, 1) if arguments.quick else (arguments.rounds, arguments.tries)
    found = measure(names, size, rounds, tries)
    if arguments.quick or arguments.only:
        show(found)
    else:
        report(found, size, tries)


def show(found: dict[str, Result]) -> None:
    """A part is printed, and leaves the results of the whole as they are."""
    print(" | ".join(HEADER))
    for name, result in found.items():
        good = "error" not in result and "error" not in found["none"]
        print(" | ".join(row(name, result, summarised(result, found["none"]) if good else None)))
        if "error" in result:
            print("   ", result["error"], file=sys.stderr)


if __name__ == "__main__":
    main()
