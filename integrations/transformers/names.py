"""Names of the Trainer's files in a checkpoint, and of the components of the state that they are made of."""

from __future__ import annotations

from easyckpt.format.layout import SAFETENSORS, TORCH_FILES
from easyckpt.format.trainer_names import STATE_FILE

__all__ = [
    "ARGUMENTS_FILE", "DATA", "FILES", "MODEL", "OPTIMIZER", "OPTIMIZER_FILE", "PROGRESS", "SCALER", "SCALER_FILE",
    "SCHEDULER", "SCHEDULER_FILE", "STATE_FILE", "WEIGHTS", "rng_file",
]  # fmt: skip

OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"
SCALER_FILE = "scaler.pt"
ARGUMENTS_FILE = "training_args.bin"

#: How files end that may hold weights.
WEIGHTS = (SAFETENSORS, ".bin", *TORCH_FILES)

MODEL, OPTIMIZER, SCHEDULER, SCALER = "model", "optimizer", "scheduler", "scaler"
PROGRESS, DATA, FILES, BESIDE = "trainer", "data", "files", "beside"


def rng_file(rank: int, world_size: int) -> str:
    """The file with the generators of one rank."""
    return "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"
