"""Is a resumed training the straight one, to the bit? One scenario of the table at a time, or the whole as a table.

    python -m tests.trainers.matrix [--mode stock] [--version 5] [--fresh] [SCENARIO…]

A training is killed, and resumed from what it has left in memory, or in storage alone (the stock Trainer always).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.trainers import launch
from tests.trainers.scenarios import TABLE, Scenario

Record = dict[str, Any]

#: Of a record: what a resumed training has only from the step on at which it began.
FROM_ITS_BEGINNING = "batches"
#: Of a record: says something of the process, not of the training.
ABOUT_THE_PROCESS = ("began", "transformers", "train_loss")


class Failed(Exception):
    """A job has ended otherwise than it should have; `message` is the short of it."""

    def __init__(self, message: str, ended: launch.Ended) -> None:
        super().__init__(f"{message}\n{ended.said[-4000:]}")
        self.message = message


# -- one scenario ------------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """One scenario with one version, in a directory of its own."""

    scenario: Scenario
    version: str
    directory: Path
    mode: str = "wrapped"
    fresh: bool = False

    def straight(self, mode: str | None = None) -> list[Record]:
        """Of each rank, from a training that nobody stops."""
        mode = mode or self.mode
        return self.finished(self.directory / f"straight-{mode}", f"straight-{mode}", "--mode", mode)

    def killed(self, name: str) -> Path:
        """Kill a training at the scenario's step; returns its output directory, as the kill has left it."""
        out, saved = self.directory / f"run-{name}", self.scenario.saved
        self.kill(out, self.scenario.until, *([] if saved is None else ["--committed", saved]))
        return out

    def kill(self, out: Path, until: int, *words: object) -> None:
        name = f"{out.name}-killed-{until}"
        ended = self.run(out, name, "--mode", self.mode, "--until", until, *words)
        if any(code == 0 for code in ended.codes) or self.records(name):
            raise Failed(f"not killed at step {until}: {ended.complaint}", ended)

    def stopped(self) -> Path:
        """Stop a training in order, and return its output directory."""
        out = self.directory / "run"
        self.finished(out, "stopped", "--mode", self.mode, "--until", self.scenario.until, "--how", "stop")
        return out

    def signalled(self, moment: str, options: dict[str, Any]) -> Path:
        """Send a training SIGTERM, upon which it saves and ends in order, and return its output directory."""
        out, words = self.directory / "run", ["--moment", moment, "--options", json.dumps(options)]
        words += ["--until", str(self.scenario.until), "--how", "signal"]
        self.finished(out, "signalled", "--mode", self.mode, *words)
        return out

    def resumed(self, out: Path, name: str) -> list[Record]:
        return self.finished(out, name, "--mode", self.mode, "--resume")

    def finished(self, out: Path, name: str, *words: object) -> list[Record]:
        ended = self.run(out, name, *words)
        records = self.records(name)
        if any(ended.codes) or len(records) != self.scenario.ranks:
            raise Failed(ended.complaint, ended)
        return records

    def run(self, out: Path, name: str, *words: object) -> launch.Ended:
        record = self.directory / name
        arguments = [self.scenario.name, "--out", out, "--record", record, *words]
        return launch.run(self.version, arguments, ranks=self.scenario.ranks, beside=record, fresh=self.fresh)

    def records(self, name: str) -> list[Record]:
        paths = (self.directory / f"{name}.{rank}" for rank in range(self.scenario.ranks))
        return [json.loads(path.read_text()) for path in paths if path.exists()]


@dataclass(frozen=True)
class Resumed:
    """A training that was killed and has gone on to its end."""

    tier: str
    began: list[int]
    """The step from which each rank went on."""
    records: list[Record]


TIERS = ("memory", "storage")


def kill_and_resume(trial: Trial, tiers: tuple[str, ...] = TIERS) -> Iterator[Resumed]:
    """Once with the memory that the kill leaves, and, if anything is in storage by then, once without."""
    for tier in tiers:
        if tier == "memory" or trial.scenario.saved is not None:
            out = trial.killed(tier)
            if tier == "storage":
                lose_snapshots()
            yield outcome(tier, trial.resumed(out, tier))


def outcome(tier: str, records: list[Record]) -> Resumed:
    return Resumed(tier, [record["began"] for record in records], records)


def lose_snapshots() -> None:
    """In memory only what shows that their owner is dead is left: without it a restart waits for the owner's lease."""
    for path in Path(os.environ["EASYCKPT_MEMORY_DIR"]).iterdir():
        if path.suffix != ".owner":
            path.unlink()


# -- comparing ---------------------------------------------------------------------------------------------------------


def differences(straight: list[Record], other: list[Record]) -> list[str]:
    """What is not to the bit as in the straight training; of what is logged and read, where it begins."""
    found = []
    for rank, (expected, actual) in enumerate(zip(straight, other, strict=True)):
        of_rank = f" of rank {rank}" if len(straight) > 1 else ""
        found += [text + of_rank for text in differences_of_rank(expected, actual)]
    return found


def differences_of_rank(expected: Record, actual: Record) -> Iterator[str]:
    for key in sorted(expected):
        if key in ABOUT_THE_PROCESS:
            continue
        one, other = expected[key], actual[key]
        if key == FROM_ITS_BEGINNING:
            one = [entry for entry in one if entry[0] > actual["began"]]
        if one == other:
            continue
        if key == "logs":
            yield f"logs from step {first_difference(one, other, lambda entry: entry['step'])} on"
        elif key == FROM_ITS_BEGINNING:
            yield f"batches from step {first_difference(one, other, lambda entry: entry[0])} on"
        elif key == "generators":
            yield "generators " + " ".join(name for name in one if one[name] != other[name])
        elif isinstance(one, str):
            yield key
        else:
            yield f"{key} {other} instead of {one}"


def first_difference(one: list[Any], other: list[Any], step_of: Any) -> int:
    for left, right in zip(one, other, strict=False):
        if left != right:
            return int(step_of(left))
    shorter, longer = sorted((one, other), key=len)
    return int(step_of(longer[len(shorter)]))


# -- the table ---------------------------------------------------------------------------------------------------------


def row(scenario: Scenario, version: str, mode: str, directory: Path, fresh: bool) -> list[str]:
    """What is to be said about one scenario with one version: a text for each column."""
    trial = Trial(scenario, version, directory, mode, fresh)
    columns = {"straight": "", "memory": "-", "storage": "-"}
    try:
        straight = trial.straight()
        columns["straight"] = f"{straight[0]['steps']} steps"
        if mode == "wrapped":
            try:
                columns["straight"] = said(differences(trial.straight("stock"), straight), "as stock")
            except Failed as failure:
                columns["straight"] = f"stock fails: {failure.message}"
        for resumed in kill_and_resume(trial, TIERS if mode == "wrapped" else ("storage",)):
            verdict = said(differences(straight, resumed.records), "exact")
            columns[resumed.tier] = f"{verdict} @{','.join(map(str, sorted(set(resumed.began))))}"
    except Failed as failure:
        columns["straight"] += f" FAILED: {failure.message}"
    return [f"{scenario.name}@{scenario.until}", version, *columns.values()]


def said(found: list[str], none: str) -> str:
    return f"DIFFERENT: {', '.join(found)}" if found else none


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", default=list(TABLE), help="all, by default")
    parser.add_argument("--mode", choices=["stock", "wrapped"], default="wrapped")
    parser.add_argument("--version", action="append", choices=launch.VERSIONS, help="of transformers; all, by default")
    parser.add_argument("--fresh", action="store_true", help="new interpreters; torchrun where there are ranks")
    given = parser.parse_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    print("| scenario | transformers | straight | from memory | from storage |\n|---|---|---|---|---|")
    for name in given.scenarios:
        for version in given.version or launch.VERSIONS:
            with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir=memory) as shared:
                os.environ["EASYCKPT_MEMORY_DIR"] = shared
                cells = row(TABLE[name], version, given.mode, Path(directory), given.fresh)
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
