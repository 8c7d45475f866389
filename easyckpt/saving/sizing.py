"""How large a snapshot will be, before training has begun."""

from __future__ import annotations

from collections.abc import Iterable

import torch

#: Optimizers whose state has another size than two tensors for each parameter.
STATES_PER_PARAMETER = {"SGD": 1, "Adagrad": 1, "RMSprop": 1, "Adafactor": 1, "Lion": 1, "ASGD": 2}


def expected_bytes(capture_bytes: int, optimizers: Iterable[torch.optim.Optimizer], factor: float | None) -> int:
    """How large the image will be once every optimizer has its state; `capture_bytes` is its size now."""
    parameters = grown = 0
    for optimizer in optimizers:
        states = STATES_PER_PARAMETER.get(type(optimizer).__name__, 2)
        for group in optimizer.param_groups:
            sizes = [p.numel() * p.element_size() + 8 for p in group["params"] if p not in optimizer.state]
            if states == 1 and type(optimizer).__name__ == "SGD" and not group.get("momentum"):
                continue
            parameters += sum(sizes)
            grown += states * sum(sizes)
    if factor is not None:
        return max(capture_bytes, int(capture_bytes + (factor - 1) * parameters))
    return capture_bytes + grown
