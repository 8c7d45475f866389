"""Is a resumed training the straight one, to the bit? One scenario of the table at a time, or the whole as a table.

    python -m tests.trainers.matrix [--mode stock] [--versions 4 5] [--fresh] [SCENARIO…]

A training is killed and resumed twice from what it left: with its memory, and without. The stock Trainer has none.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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
    """A job has ended otherwise than it should have."""


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

    def killed(self) -> Path:
        """Kill a training; returns its output directory, as the kill has left it."""
        scenario, out = self.scenario, self.directory / "run"
        committed = [] if scenario.saved is None else ["--committed", scenario.saved]
        ended = self.run(out, "killed", "--mode", self.mode, "--until", scenario.until, *committed)
        if any(code == 0 for code in ended.codes) or self.records("killed"):
            raise Failed(f"was not killed at step {scenario.until}: {ended.codes} {ended.complaint}")
        return out

    def stopped(self) -> Path:
        """Stop a training in order, and return its output directory."""
        self.finished(
            out := self.directory / "run",
            "stopped",
            "--mode",
            self.mode,
            "--until",
            self.scenario.until,
            "--how",
            "stop",
        )
        return out

    def resumed(self, out: Path, name: str) -> list[Record]:
        return self.finished(out, name, "--mode", self.mode, "--resume")

    def finished(self, out: Path, name: str, *words: object) -> list[Record]:
        ended = self.run(out, name, *words)
        records = self.records(name)
        if any(ended.codes) or len(records) != self.scenario.ranks:
            raise Failed(ended.complaint)
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
    """Kill it once; resume what is left with memory, and once more with storage alone, if anything is there by then."""
    out = trial.killed()
    kept = out.with_name("kept")
    shutil.copytree(out, kept, symlinks=True)
    if "memory" in tiers:
        yield outcome("memory", trial.resumed(out, "memory"))
    if "storage" in tiers and trial.scenario.saved is not None:
        empty_memory()
        shutil.rmtree(out)
        kept.rename(out)  # the same path: what a checkpoint says of its place is still so
        yield outcome("storage", trial.resumed(out, "storage"))


def outcome(tier: str, records: list[Record]) -> Resumed:
    return Resumed(tier, [record["began"] for record in records], records)


def empty_memory() -> None:
    """What the memory tier has is lost, as with the machine."""
    for path in Path(os.environ["EASYCKPT_MEMORY_DIR"]).iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


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
                columns["straight"] = f"stock fails: {failure}"
        for resumed in kill_and_resume(trial, TIERS if mode == "wrapped" else ("storage",)):
            verdict = said(differences(straight, resumed.records), "exact")
            columns[resumed.tier] = f"{verdict} @{','.join(map(str, sorted(set(resumed.began))))}"
    except Failed as failure:
        columns["straight"] += f" FAILED: {failure}"
    return [f"{scenario.name}@{scenario.until}", version, *columns.values()]


def said(found: list[str], none: str) -> str:
    return f"DIFFERENT: {', '.join(found)}" if found else none


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", default=list(TABLE), help="all, by default")
    parser.add_argument("--mode", choices=["stock", "wrapped"], default="wrapped")
    parser.add_argument("--versions", nargs="+", choices=launch.VERSIONS, default=list(launch.VERSIONS))
    parser.add_argument("--fresh", action="store_true", help="new interpreters; torchrun where there are ranks")
    given = parser.parse_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    print("| scenario | transformers | straight | from memory | from storage |\n|---|---|---|---|---|")
    for name in given.scenarios:
        for version in given.versions:
            with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir=memory) as shared:
                os.environ["EASYCKPT_MEMORY_DIR"] = shared
                cells = row(TABLE[name], version, given.mode, Path(directory), given.fresh)
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
