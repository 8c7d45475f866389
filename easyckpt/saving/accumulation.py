"""Noticing a save between two backward passes of one optimizer step: gradients are not part of the state."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class AccumulationWatch:
    """Remembers one small gradient as the last optimizer step left it; a different one means a backward since then."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = {id(optimizer) for optimizer in optimizers}
        self._parameter: weakref.ref[torch.Tensor] | None = None
        self._gradient: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._pid = os.getpid()
        self._handle = register_optimizer_step_post_hook(
            torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
        )

    def in_the_middle(self) -> bool:
        """Whether gradients were accumulated since the last optimizer step. Never waits for a GPU."""
        parameter = None if self._parameter is None else self._parameter()
        gradient = None if parameter is None else parameter.grad
        if gradient is None or self._gradient is None:
            return False
        if gradient is not self._gradient():
            return True
        # The same tensor with another content: zeroed in place, or accumulated into.
        changed = gradient._version != self._version
        return changed and gradient.device.type == "cpu" and bool(gradient.any())

    def close(self) -> None:
        """Take the hook away."""
        self._handle.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._optimizers or os.getpid() != self._pid:
            return
        parameter = None if self._parameter is None else self._parameter()
        if parameter is None or parameter.grad is None:
            parameter = _smallest_with_gradient(optimizer)
            self._parameter = None if parameter is None else weakref.ref(parameter)
        gradient = None if parameter is None else parameter.grad
        self._gradient = None if gradient is None else weakref.ref(gradient)
        self._version = 0 if gradient is None else gradient._version


def _smallest_with_gradient(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    parameters = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    smallest: torch.Tensor | None = min(parameters, key=torch.Tensor.numel, default=None)
    return smallest
