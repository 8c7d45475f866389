"""Telling a step that a GradScaler skipped from an optimizer whose steps cannot be seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ScalerWatch:
    """A scaler that skips a step for infinite gradients lowers its scale."""

    def __init__(self, scalers: Sequence[torch.amp.GradScaler]) -> None:
        self._scalers = [scaler for scaler in scalers if scaler.is_enabled()]
        self._before: list[torch.Tensor] = []

    def begin(self) -> None:
        """Remember the scales. In stream order on a GPU, whose host does not wait."""
        if not self._before:
            pinned = any(scaler._device == "cuda" for scaler in self._scalers)
            self._before = [torch.empty((), pin_memory=pinned, device="cpu") for _ in self._scalers]
        for scaler, before in zip(self._scalers, self._before, strict=True):
            scale = scaler._scale
            if scale is None:  # it is made at the first use
                before.fill_(scaler._init_scale)
            else:
                before.copy_(scale, non_blocking=True)

    def skipped_a_step(self) -> bool:
        """Whether a scale is lower than at `begin`.

        Waits for a GPU, so it is asked only where no optimizer step was seen: a skip has waited for it just before.
        An increase and a decrease in one window may hide each other; then its snapshot is discarded for nothing.
        """
        now = [scaler.get_scale() for scaler in self._scalers]
        return any(scale < float(before) for scale, before in zip(now, self._before, strict=bool(self._before)))
