"""Putting back what the Trainer itself has saved, without running anything that is in its pickles: see `stock`."""

from __future__ import annotations

import logging
import os
import random
from typing import Any

import numpy as np
import torch

from easyckpt.integrations.transformers import stock
from easyckpt.integrations.transformers.names import OPTIMIZER_FILE, SCALER_FILE, SCHEDULER_FILE, rng_file

_log = logging.getLogger("easyckpt")


def load_optimizer_and_scheduler(trainer: Any, directory: str) -> None:
    """As the Trainer's ``_load_optimizer_and_scheduler``; both files are there, or it would not be resumed from."""
    trainer.optimizer.load_state_dict(stock.load_pickle(os.path.join(directory, OPTIMIZER_FILE)))
    trainer.lr_scheduler.load_state_dict(stock.load_pickle(os.path.join(directory, SCHEDULER_FILE)))


def load_scaler(trainer: Any, directory: str) -> None:
    """As the Trainer's ``_load_scaler``."""
    path, scaler = os.path.join(directory, SCALER_FILE), getattr(trainer.accelerator, "scaler", None)
    if scaler is None:
        return
    if os.path.isfile(path):
        scaler.load_state_dict(stock.load_pickle(path))
    else:  # older Trainers wrote none, so it is no damage
        _log.warning("%s is not there: the scale of the gradients begins anew, so the next steps are not exact", path)


def load_generators(trainer: Any, directory: str) -> None:
    """As the Trainer's ``_load_rng_state``."""
    args = trainer.args
    states = stock.load_pickle(os.path.join(directory, rng_file(args.process_index, args.world_size)))
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        if isinstance(states["cuda"], torch.Tensor):
            torch.cuda.random.set_rng_state(states["cuda"])
        else:
            torch.cuda.random.set_rng_state_all(states["cuda"])
