"""Hugging Face's Trainer: what does a save cost when it is stock, wrapped by easyckpt, or DLRover's?

A GPT-2 with 124 million parameters (1.5 GB of state) on the CPU, random tokens, twelve steps with a save every three.
Each training is a process of its own; the variants take turns, in another order each round, and ratios are formed
within a round. What is measured is chosen so that it does not favour easyckpt:

- **blocked**: of stock and DLRover the duration of ``_save_checkpoint`` alone; of easyckpt all from the end of the step
  to the begin of the next (snapshot, save, logging, the next batch too), and all time in hooks around the next
  optimizer step, where a snapshot that is not copied yet is waited for;
- **until the last step ends**: from calling ``train()``, so what is made at the begin counts, but not the save of the
  last step, which holds up stock alone. **Drained**: until ``train()`` has returned and all is on storage (for stock:
  in the page cache; easyckpt alone syncs);
- **the memory tier**: a snapshot of every step and no other save, against the same training beside a thread that
  copies as many bytes by memmove each step and does nothing else. 32 steps, of which the first twelve do not count:
  memory that is touched for the first time is slow on virtual machines, for whoever touches more of it (what that
  costs easyckpt is in the figures above). Means, so that a slow step counts as it does for users. Trainings of the
  same code differ by a few per cent from process to process, so there is a second one "in turns": snapshot and
  memmove after every other step of one training, their mean steps compared.

    python -m benchmarks.hf_trainer [--rounds 3] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from benchmarks.hf_trainer_job import EVERY, FIGURES, ONLY_MEMORY, STEADY, STEPS, WARM, WRAPPED
from benchmarks.peers import dlrover

SAVING = ("stock", "DLRover", "easyckpt")
SECONDS = 600
HEADER = [
    "",
    "blocked a save, median",
    "longest",
    "against stock",
    "until the last step ends",
    "against stock",
    "drained",
    "blocked at other steps",
    f"mean of steps {WARM + 2} to {STEADY}, against memmove",
    "median of them",
]
NAMES = {
    "memory": "easyckpt, memory alone",
    "memmove": "stock without saves, memmove",
    "turns": "easyckpt and memmove in turns",
}
GOALS = {
    "blocked": ("blocked a save, against stock", 1 / 20),
    "until_last": ("until the last step ends, against stock", 1.0),
    "steady": ("memory tier at every step, against memmove", 1.01),
}


class Failed(Exception):
    """A training that did not go well; says how."""


def one_training(variant: str, size: str) -> dict[str, Any]:
    """In a new process, and a directory that is gone afterwards, with all that was not yet written of it."""
    directory = tempfile.mkdtemp(prefix="easyckpt-bench-", dir=os.environ.get("EASYCKPT_BENCH_DIR"))
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"HF_HUB_OFFLINE": "1", "RES_OPTIONS": "timeout:1 attempts:1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "benchmarks.hf_trainer_job", variant, size, directory]
    with tempfile.TemporaryFile("w+") as said:  # no pipe: a saver that outlives its job would hold it open
        process = subprocess.Popen(
            command, cwd=common.HERE.parent, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code: int | None = process.wait(SECONDS)
            if code == 0:
                figures: dict[str, Any] = json.loads(Path(directory, FIGURES).read_text())
                return figures
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
            shutil.rmtree(directory, ignore_errors=True)
            os.sync()
        said.seek(0)
        lines = [line.strip() for line in said if line.strip()]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    raise Failed(f"not ended after {SECONDS} s" if code is None else (errors or lines or ["no output"])[-1][:300])


def end(process: subprocess.Popen[str]) -> None:
    """Of all that the training has started, and of what its memory has left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    dlrover.clean(process.pid)


def measure(size: str, rounds: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(the figures of each round by variant, errors of those that do not run)."""
    found: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    for number in range(rounds):
        found.append({})
        for group in (SAVING, ONLY_MEMORY):
            turn = group[number % len(group) :] + group[: number % len(group)]
            for variant in turn:
                if variant in errors:
                    continue
                begun = time.perf_counter()
                try:
                    found[-1][variant] = one_training(variant, size)
                except Failed as error:
                    errors[variant] = str(error)
                seconds = time.perf_counter() - begun
                print(f"round {number + 1}: {variant}, {seconds:.0f} s {errors.get(variant, '')}", flush=True)
    return found, errors


def _mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)


def against_memmove(rounds: list[dict[str, Any]], variant: str, middle: Callable[[list[float]], float]) -> float | None:
    """Steps beside a snapshot against those beside a memmove: of another process, or of the same "in turns"."""
    if variant not in ONLY_MEMORY:
        return None
    base = (variant, "beside") if variant == "turns" else ("memmove", "steady")
    pairs = [(one[variant]["steady"], one[base[0]][base[1]]) for one in rounds if {variant, base[0]} <= one.keys()]
    return common.median(middle(mine) / middle(theirs) for mine, theirs in pairs)


def summarised(rounds: list[dict[str, Any]], variant: str) -> dict[str, Any]:
    """Medians over the rounds, ratios within a round."""

    def ratio(key: str, base: str) -> float | None:
        pairs = [(one[variant], one[base]) for one in rounds if variant in one and base in one]
        values = [_one(mine[key]) / _one(theirs[key]) for mine, theirs in pairs if mine[key] and theirs[key]]
        return common.median(values) if values else None

    mine = [one[variant] for one in rounds if variant in one]
    held = [seconds for one in mine for seconds in one["blocked"]]
    return {
        "blocked": common.median(held) if held else None,
        "blocked_longest": max(held, default=None),
        "blocked_against_stock": ratio("blocked", "stock"),
        "between": common.median(seconds for one in mine for seconds in one["between"]),
        "first": common.median(one["first"] for one in mine),
        "until_last": common.median(one["until_last"] for one in mine),
        "until_last_against_stock": ratio("until_last", "stock") if held else None,
        "whole": common.median(one["whole"] for one in mine),
        "drain": common.median(one["whole"] - one["until_last"] for one in mine),
        "step": common.median(seconds for one in mine for seconds in one["steps"][4:]),
        "steady_against_memmove": against_memmove(rounds, variant, _mean),
        "steady_median_against_memmove": against_memmove(rounds, variant, common.median),
    }


def _one(value: Any) -> float:
    return common.median(value) if isinstance(value, list) else float(value)


def row(variant: str, summary: dict[str, Any]) -> list[str]:
    """Of the table."""

    def shown(value: float | None, kind: Any) -> str:
        return "-" if value is None else kind(value)

    saves, times = summary["blocked"] is not None, common.milliseconds
    return [
        NAMES.get(variant, variant),
        shown(summary["blocked"], times),
        shown(summary["blocked_longest"], times),
        shown(summary["blocked_against_stock"], "{:.4f}".format),
        times(summary["until_last"]) if saves else "-",
        shown(summary["until_last_against_stock"], "{:.2f}".format),
        f"{times(summary['drain'])} later" if saves else "-",
        times(summary["between"]) if variant in WRAPPED else "-",
        shown(summary["steady_against_memmove"], "{:.3f}".format),
        shown(summary["steady_median_against_memmove"], "{:.3f}".format),
    ]


def goals(summaries: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was to be reached, and what was."""
    reached = {
        "blocked": summaries["easyckpt"]["blocked_against_stock"],
        "until_last": summaries["easyckpt"]["until_last_against_stock"],
        "steady": summaries["memory"]["steady_against_memmove"],
    }
    return {
        key: {"what": what, "at_most": bar, "measured": reached[key], "met": reached[key] <= bar}
        for key, (what, bar) in GOALS.items()
    }


def versions() -> dict[str, str]:
    """Of what takes part."""
    found = {}
    for package in ("transformers", "accelerate", "dlrover", "deepspeed"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def question(rounds: list[dict[str, Any]], errors: dict[str, str], reached: dict[str, dict[str, Any]]) -> str:
    """The text above the table."""
    stock = rounds[0]["stock"]
    job = (
        f"GPT-2 with {stock['parameters'] / 1e6:.0f} million parameters, {stock['state_bytes'] / 1e6:.0f} MB of state, "
        f"on the CPU; {', '.join(f'{name} {version}' for name, version in versions().items())}; {len(rounds)} rounds "
        f"of {STEPS} steps with a save every {EVERY}, a process each; ratios within a round."
    )
    failed = [f"**{variant}** does not run here: `{error}`." for variant, error in errors.items()]
    told = [
        f"{goal['what']} at most {goal['at_most']:.3g}: {goal['measured']:.3g}, {'met' if goal['met'] else 'missed'}"
        for goal in reached.values()
    ]
    return "\n\n".join([job, *failed, f"Goals: {'; '.join(told)}."])


def draw(rounds: list[dict[str, Any]], summaries: dict[str, dict[str, Any]], path: Path) -> None:
    """How long a save blocks, and how long each step takes until the next one begins."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    colours = {"stock": "#5b7c99", "DLRover": "#7a9e7e", "easyckpt": "#d1495b"}
    shown = [variant for variant in SAVING if variant in summaries]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.2, 3.4), gridspec_kw={"width_ratios": [2, 3]})
    values = [summaries[variant]["blocked"] * 1e3 for variant in reversed(shown)]
    bars = left.barh(shown[::-1], values, color=[colours[variant] for variant in reversed(shown)])
    left.bar_label(bars, labels=[f"{value:.3g}" for value in values], padding=3, fontsize=8)
    left.set_title("blocked a save, median (ms, logarithmic)", fontsize=10)
    left.set_xscale("log")
    left.set_xlim(left=1)
    left.margins(x=0.2)
    for variant in shown:
        runs = [one[variant]["steps"] for one in rounds if variant in one]
        medians = [common.median(values) for values in zip(*runs, strict=True)]
        right.plot(range(1, STEPS), medians, "o-", color=colours[variant], label=variant, markersize=3)
    right.set_title(f"from step to step (s), saves after every {EVERY}th", fontsize=10)
    right.set_ylim(bottom=0)
    right.set_xlabel("step", fontsize=8)
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model and one round; writes no results")
    arguments, _ = parser.parse_known_args()
    if "transformers" not in versions():
        raise SystemExit("this benchmark needs transformers and accelerate: benchmarks/README.md says how")
    rounds, errors = measure("small" if arguments.quick else "full", 1 if arguments.quick else arguments.rounds)
    if needed := {"stock", "easyckpt", *ONLY_MEMORY} & set(errors):
        raise SystemExit(f"without {', '.join(sorted(needed))} there is nothing to compare")
    summaries = {name: summarised(rounds, name) for name in (*SAVING, *ONLY_MEMORY) if name not in errors}
    reached = goals(summaries)
    rows = [row(variant, summary) for variant, summary in summaries.items()]
    text = question(rounds, errors, reached)
    if arguments.quick:
        print(text, *(" | ".join(cells) for cells in (HEADER, *rows)), sep="\n")
        return
    document = {"versions": versions(), "goals": reached, "summary": summaries, "errors": errors, "rounds": rounds}
    common.write("hf_trainer", text, document, HEADER, rows)
    draw(rounds, summaries, common.RESULTS / "hf_trainer.png")


if __name__ == "__main__":
    main()
