"""Telling a step that a GradScaler skipped from an optimizer whose steps cannot be seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ScalerWatch:
    """A scaler that skips a step for infinite gradients lowers its scale."""

    def __init__(self, scalers: Sequence[torch.amp.GradScaler]) -> None:
        self._scalers = [scaler for scaler in scalers if scaler.is_enabled()]
        self._seen = [scaler.get_scale() for scaler in self._scalers]

    def skipped_a_step(self) -> bool:
        """Whether a scale is lower than when this was last asked.

        Waits for a GPU, so it is asked only where no optimizer step was seen: a skip has waited for it just before.
        An increase and a decrease since then may hide each other; then the snapshot is discarded for nothing.
        """
        before, self._seen = self._seen, [scaler.get_scale() for scaler in self._scalers]
        return any(new < old for old, new in zip(before, self._seen, strict=True))
