"""One training run of the resume lab.

    python examples/resume_lab/train.py                        # all steps: straight.pth
    python examples/resume_lab/train.py --stop-at 30           # the first 30: resume.pth
    python examples/resume_lab/train.py --resume               # the rest: resumed.pth, equal to straight.pth to the bit
    python examples/resume_lab/train.py --resume --no-optim    # without the optimizer's state: noopt.pth
    python examples/resume_lab/train.py --resume --no-skip     # the data begin anew: noskip.pth

All of them in one command, with a report: ``make lab``.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import files
import torch
from data import draw_batch, load_text
from model import GPT, VOCABULARY
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its usual name)

SEED = 7
STEPS = 60


@dataclass(frozen=True)
class Run:
    """Which steps to train, and what to leave out of the resume."""

    stop_at: int = STEPS
    resume: bool = False
    no_optim: bool = False
    no_skip: bool = False

    @property
    def name(self) -> str:
        """What its files are called."""
        if not self.resume:
            return files.STRAIGHT
        return files.NO_OPTIM if self.no_optim else files.NO_SKIP if self.no_skip else files.RESUMED


def learning_rate(t: int) -> float:
    """Cosine from 3e-3 to a tenth of it, for the 0-based step `t` of all STEPS: also in a run that stops earlier."""
    return 3e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * t / STEPS)))


class Training:
    """Everything that changes from step to step. This is what has to be saved."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)  # for the first weights; nothing draws from this generator afterwards
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters())  # its learning rate is set before each step
        self.generator = torch.Generator().manual_seed(SEED)  # for the batches
        self.step = 0  # finished steps

    def one_step(self, text: Tensor) -> float:
        """Train one step; returns its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step)
        inputs, targets = draw_batch(text, self.generator)
        loss = F.cross_entropy(self.model(inputs).reshape(-1, VOCABULARY), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def save(self, out: Path) -> None:
        """Write all four parts."""
        whole_state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "gen_state": self.generator.get_state(),
        }
        files.write_tensors(out, files.RESUME, whole_state)

    def load(self, out: Path, run: Run) -> None:
        """Take over what was saved, but for what `run` leaves out."""
        saved = files.read_tensors(out, files.RESUME)
        self.model.load_state_dict(saved["model"])
        if not run.no_optim:
            self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        if not run.no_skip:
            self.generator.set_state(saved["gen_state"])


def train(out: Path, run: Run) -> list[float]:
    """Train `run`, leave its files in `out`, and return the loss of each of its steps."""
    torch.set_num_threads(1)  # sums over another number of threads are rounded otherwise
    text, training = load_text(), Training()
    if run.resume:
        training.load(out, run)
    first_step, losses = training.step + 1, []
    while training.step < run.stop_at:
        losses.append(training.one_step(text))
        if training.step % 10 == 0:
            print(f"   step {training.step}  loss {losses[-1]:.6f}", flush=True)

    if run.stop_at < STEPS:
        training.save(out)
        print(f"   {out / files.RESUME}")
        return losses
    files.write_tensors(out, f"{run.name}.pth", training.model.state_dict())
    print(f"   {out / run.name}.pth")
    if run.name in files.LOGGED:
        files.write_losses(out, run.name, first_step, losses)
    return losses


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of a run."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("runs/resume_lab"), help="folder of all files")
    part = options.add_mutually_exclusive_group()
    part.add_argument("--stop-at", type=int, metavar="STEP", help=f"end after this step and leave {files.RESUME}")
    part.add_argument("--resume", action="store_true", help=f"go on from {files.RESUME} to the end")
    left_out = options.add_mutually_exclusive_group()
    left_out.add_argument("--no-optim", action="store_true", help="resume without the optimizer's state")
    left_out.add_argument("--no-skip", action="store_true", help="resume without the batch generator's state")
    return options


def asked_for(options: argparse.ArgumentParser, args: argparse.Namespace) -> Run:
    """The run that the command line means; ends the program, before anything is written, where it means none."""
    if args.stop_at is not None and not 1 <= args.stop_at < STEPS:
        options.error(f"--stop-at is a step from 1 to {STEPS - 1}: the run has {STEPS}")
    if (args.no_optim or args.no_skip) and not args.resume:
        options.error("--no-optim and --no-skip say what a resume leaves out: give --resume as well")
    if args.out.exists() and not args.out.is_dir():
        options.error(f"--out {args.out} is not a folder")
    if args.resume and not (args.out / files.RESUME).is_file():
        options.error(f"{args.out} has no {files.RESUME}: make it with --stop-at 30 first")
    return Run(args.stop_at or STEPS, args.resume, args.no_optim, args.no_skip)


def main() -> None:
    """One run from the command line."""
    options = parser(__doc__)
    args = options.parse_args()
    run = asked_for(options, args)
    files.prepare(args.out)
    train(args.out, run)


if __name__ == "__main__":
    main()
