"""The loss since the last log before a stop: the first log after it is a mean over those steps too."""

from __future__ import annotations

from typing import Any

import torch

from easyckpt.integrations.transformers import versions
from easyckpt.integrations.transformers.progress import Progress


class CarriedLoss:
    """Where the Trainer keeps that loss, it is put there; else it waits for the loss of the first micro-step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._waiting: torch.Tensor | None = None

    def put_back(self, progress: Progress) -> None:
        """Have the training go on with the loss that was restored."""
        assert progress.restored is not None
        loss, running = progress.restored["loss"], versions.running_loss(self._trainer)
        if running is not None:
            running.copy_(loss)
            # The Trainer's `train_loss` is the mean over the steps of this call: those before the stop are not of it.
            self._trainer._total_loss_scalar -= loss.item()
        else:
            self._waiting = loss

    def added_to(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` of a micro-step, and to the first one what waits for it."""
        if self._waiting is None:
            return loss
        before, self._waiting = self._waiting.to(loss.device, loss.dtype), None
        trainer = self._trainer
        if trainer.args.logging_nan_inf_filter and not torch.isfinite(loss):
            return torch.as_tensor(before + before / (1 + trainer.state.global_step - trainer._globalstep_last_logged))
        return before + loss
