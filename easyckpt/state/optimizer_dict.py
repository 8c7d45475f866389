"""A saved optimizer as its ``state_dict()`` would be, for files that other programs read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from easyckpt.state.components import Saved
from easyckpt.state.optimizer_load import read_optimizer


def optimizer_state_dict(saved: Saved, tensor: Callable[[int], Any]) -> dict[str, Any]:
    """What torch's ``Optimizer.state_dict()`` returned at that step; `tensor` gives tensors by reference number."""
    stored = read_optimizer(saved)
    values = iter(saved.decode(stored.values, tensor))
    state: dict[Any, Any] = {}
    for entry in stored.entries:
        items = {key: next(values) if ref is None else tensor(ref) for key, ref in entry.items}
        state[entry.owner] = next(iter(items.values())) if entry.whole else items
    groups, first = [], 0
    for size, tree, names in zip(stored.groups, stored.group_values, stored.names, strict=True):
        group = dict(saved.decode(tree, tensor))
        if names is not None:
            group["param_names"] = names
        groups.append({**group, "params": list(range(first, first + size))})
        first += size
    return {"state": state, "param_groups": groups}
