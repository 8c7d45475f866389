"""``make lab``: what has to be saved so that a stopped training goes on as if it had never stopped?

A small GPT is trained straight through 60 steps, then stopped after 30 and resumed in a new process: with all that
was saved, without the optimizer's state, and with the data begun anew. The folder then holds the files of all runs
and report.md, which says what the differences are. With --stop-at or --resume only that run is done, as by train.py.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import files
import report
from measure import Difference, difference, half_precision, optimizer_numbers
from train import STEPS, Run, asked_for, parser, train

STOP_AT = 30


def in_a_new_process(out: Path, run: Run) -> list[float]:
    """Train `run` where nothing is left of the run before: what it goes on from is in the file."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(train, out, run).result()
        except BrokenProcessPool:
            raise SystemExit(
                f"The process of this run was killed. The files in {out} are whole: run the lab again."
            ) from None


def all_runs(out: Path) -> dict[str, Difference]:
    """Every run of the exercise; how far each resumed one is from the straight one."""
    print("straight: all steps")
    straight_losses = in_a_new_process(out, Run())
    straight = files.read_tensors(out, f"{files.STRAIGHT}.pth")
    print(f"stopped after step {STOP_AT}")
    in_a_new_process(out, Run(stop_at=STOP_AT))
    found = {}
    for run in (Run(resume=True), Run(resume=True, no_optim=True), Run(resume=True, no_skip=True)):
        print(f"{run.name}: from {files.RESUME}")
        losses = in_a_new_process(out, run)
        weights = files.read_tensors(out, f"{run.name}.pth")
        found[run.name] = difference(straight, weights, straight_losses, losses)
    return found


def write_report(out: Path, language: str, found: dict[str, Difference]) -> None:
    """The JSON files, the weights in half precision and ``report.md``."""
    half, optim = half_precision(out), optimizer_numbers(out)
    files.write_json(out, files.HALF_JSON, half)
    files.write_json(out, files.OPTIM_JSON, optim)
    numbers = {f"{run}_{name}": value for run, d in found.items() for name, value in dataclasses.asdict(d).items()}
    numbers |= {"steps": STEPS, "stop_at": STOP_AT, "resume_bytes": (out / files.RESUME).stat().st_size}
    numbers |= {"fp16_share": half["fp16_bytes"] / half["fp32_bytes"]}
    files.write_text(out, files.REPORT, report.render(language, numbers | half | optim))


def main() -> int:
    """The whole exercise, or one run of it; 1 where the resumed run is not what it must be."""
    options = parser(__doc__)
    options.add_argument("--lang", choices=report.LANGUAGES, default="en", help=f"language of {files.REPORT}")
    args = options.parse_args()
    run = asked_for(options, args)
    files.prepare(args.out)
    if run != Run():
        train(args.out, run)
        return 0
    started = time.monotonic()
    found = all_runs(args.out)
    write_report(args.out, args.lang, found)
    for name, gap in found.items():
        how = "equal to the bit" if gap.equal else f"weights differ by up to {gap.weights:.3g}"
        print(f"{name:<8} against straight: {how}")
    print(f"{args.out / files.REPORT}  ({time.monotonic() - started:.0f} s)")
    if [name for name, gap in found.items() if gap.equal] != [files.RESUMED]:
        print("FAILED: the resumed run, and no other, must equal the straight one", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
