"""What the runs of the lab have come to, in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import files
import torch
from data import draw_batch, load_text
from model import GPT, TIED
from torch import Tensor
from train import SEED

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """How far a run that was stopped is from the straight one."""

    equal: bool
    """All weights and all losses, to the bit."""
    weights: float
    """Largest absolute difference of any weight at the end."""
    losses: float
    """Largest absolute difference of the loss of any step."""
    first_step: int | None
    """The first step whose loss differs."""


def difference(
    straight: Weights, other: Weights, straight_losses: Sequence[float], other_losses: Sequence[float]
) -> Difference:
    """Compare final weights, and the losses of the steps that both runs have (the last ones)."""
    first = len(straight_losses) - len(other_losses)
    gaps = [abs(mine - its) for mine, its in zip(straight_losses[first:], other_losses, strict=True)]
    same_bits = straight.keys() == other.keys() and all(
        torch.equal(straight[name].view(torch.int32), other[name].view(torch.int32)) for name in straight
    )
    return Difference(
        equal=same_bits and not any(gaps),
        weights=max(float((straight[name] - other[name]).abs().max()) for name in straight),
        losses=max(gaps),
        first_step=next((first + place for place, gap in enumerate(gaps, 1) if gap), None),
    )


def optimizer_numbers(out: Path) -> dict[str, float]:
    """How many numbers the optimizer keeps, beside the weights: ``optim.json``."""
    saved = files.read_tensors(out, files.RESUME)
    model = sum(value.numel() for name, value in saved["model"].items() if name != TIED)
    kept = [value for state in saved["optimizer"]["state"].values() for value in state.values()]
    # a tensor without dimensions is AdamW's count of steps
    optimizer = sum(value.numel() for value in kept if value.dim() >= 1)
    return {"model_numel": model, "optimizer_numel": optimizer, "ratio": optimizer / model}


def half_precision(out: Path) -> dict[str, float]:
    """Write the straight run's weights in half precision and say what that does: ``fp16.json``."""
    full, halved = GPT(), GPT()
    full.load_state_dict(files.read_tensors(out, f"{files.STRAIGHT}.pth"))
    halved.load_state_dict(full.state_dict())
    files.write_tensors(out, files.HALF, halved.half().state_dict())

    rounded = GPT()  # computes in single precision: only the weights were rounded
    rounded.load_state_dict(files.read_tensors(out, files.HALF))
    inputs, _ = draw_batch(load_text(), torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        gap = float((full(inputs) - rounded(inputs)).abs().max())
    return {
        "fp32_bytes": (out / f"{files.STRAIGHT}.pth").stat().st_size,
        "fp16_bytes": (out / files.HALF).stat().st_size,
        "max_logit_diff": gap,
    }
