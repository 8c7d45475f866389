"""Putting a saved optimizer state into a live torch optimizer, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from easyckpt.errors import DamagedCheckpoint
from easyckpt.format.dtypes import DTYPES
from easyckpt.format.fields import Fields
from easyckpt.state.components import Fetch, Ref, Saved
from easyckpt.state.fill import Filler
from easyckpt.state.tensors import copy_exact, device_for, new_like, same_kind

if TYPE_CHECKING:
    from easyckpt.format.codec import Json


@dataclass(frozen=True, slots=True)
class _Entry:
    """The saved state of one parameter (`owner` is its number) or of one other key."""

    owner: Any
    is_parameter: bool
    whole: bool
    items: list[tuple[Any, int | None]]


@dataclass(frozen=True, slots=True)
class _Stored:
    """The saved optimizer, read and checked."""

    groups: tuple[int, ...]
    names: list[Any]
    devices: list[str]
    shapes: list[tuple[int, ...]]
    entries: list[_Entry]
    values: Json
    group_values: list[Json]


def read_optimizer(saved: Saved) -> _Stored:
    """What `OptimizerComponent` has written, checked. Raises DamagedCheckpoint."""
    static, dynamic = saved.fields(saved.static), saved.fields(saved.dynamic)
    groups = static.numbers("groups")
    parameters = [_parameter(saved, item) for item in static.items("parameters")]
    entries = [_entry(saved, item, len(parameters)) for item in static.items("entries")]
    names, values, group_values = static.items("names"), dynamic.items("values"), dynamic.items("groups")
    if not len(groups) == len(names) == len(group_values) or sum(groups) != len(parameters):
        raise saved.damaged("its param groups do not fit each other")
    devices, shapes = [device for device, _ in parameters], [shape for _, shape in parameters]
    return _Stored(groups, names, devices, shapes, entries, values, group_values)


def _parameter(saved: Saved, item: Json) -> tuple[str, tuple[int, ...]]:
    if not isinstance(item, list) or len(item) != 2:
        raise saved.damaged("a parameter is not described by its device and shape")
    fields = Fields({"device": item[0], "shape": item[1]}, f"component {saved.name!r}: a parameter")
    return fields.text("device"), fields.numbers("shape")


def _entry(saved: Saved, item: Json, parameters: int) -> _Entry:
    fields = saved.fields(item)
    owner = fields.raw("of")
    is_parameter = type(owner) is int
    name = fields.number("of", high=parameters - 1) if is_parameter else saved.decode(saved.fields(owner).raw("key"))
    items: list[tuple[Any, int | None]] = []
    for pair in fields.items("items"):
        if not isinstance(pair, list) or len(pair) != 2 or not (pair[1] is None or type(pair[1]) is int):
            raise saved.damaged("an item of its state is malformed")
        if pair[1] is not None:
            saved.ref(pair[1])
        items.append((saved.decode(pair[0]), pair[1]))
    whole = fields.flag("whole")
    if whole and len(items) != 1:
        raise saved.damaged("an item of its state is malformed")
    return _Entry(name, is_parameter, whole, items)


def check_optimizer(optimizer: Optimizer, saved: Saved) -> list[str]:
    """What keeps `saved` from fitting `optimizer`: number and sizes of groups, shapes of parameters."""
    stored = read_optimizer(saved)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != list(stored.groups):
        return [f"{saved.name}: param groups of {list(stored.groups)} parameters in the checkpoint, {sizes} here"]
    problems = []
    parameters = list(_parameters(optimizer))
    for number, (parameter, shape) in enumerate(zip(parameters, stored.shapes, strict=True)):
        if tuple(parameter.shape) != shape:
            here = tuple(parameter.shape)
            problems.append(f"{saved.name}: parameter {number} has shape {shape} in the checkpoint and {here} here")
    values = saved.decode(stored.values, saved.stand_in, _live_values(optimizer, stored))
    if len(values) != sum(ref is None for entry in stored.entries for _, ref in entry.items):
        raise saved.damaged("values of its state are missing")
    for group, tree in zip(optimizer.param_groups, stored.group_values, strict=True):
        if not isinstance(saved.decode(tree, saved.stand_in, group), dict):
            raise saved.damaged("the values of a param group are no dict")
    return problems


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _live_values(optimizer: Optimizer, stored: _Stored) -> list[Any]:
    """The live values at the places of those that are saved as values."""
    parameters = list(_parameters(optimizer))
    found = []
    for entry in stored.entries:
        owner = parameters[entry.owner] if entry.is_parameter else entry.owner
        live = optimizer.state.get(owner, {})
        for key, ref in entry.items:
            if ref is None:
                found.append(live if entry.whole else live.get(key) if isinstance(live, dict) else None)
    return found


def apply_optimizer(optimizer: Optimizer, saved: Saved, fetch: Fetch) -> None:
    """Rebuild the state and the values of the groups. Tensors that fit are filled in place, containers stay."""
    stored = read_optimizer(saved)
    parameters = list(_parameters(optimizer))
    filler = Filler(saved, fetch)
    values = iter(filler.decode_and_fill(stored.values, _live_values(optimizer, stored)))
    tensors = _Tensors(saved, fetch, stored, optimizer)
    state: list[tuple[Any, Any]] = []
    for entry in stored.entries:
        owner = parameters[entry.owner] if entry.is_parameter else entry.owner
        old = optimizer.state.get(owner, {})
        here = old if type(old) is dict else {}
        parameter = owner if entry.is_parameter else None
        new = {
            key: next(values) if ref is None else tensors.get(ref, key, here.get(key), parameter, entry.owner)
            for key, ref in entry.items
        }
        if entry.whole:
            state.append((owner, next(iter(new.values()))))
            continue
        here.clear()
        here.update(new)
        state.append((owner, here))
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, tree, names in zip(optimizer.param_groups, stored.group_values, stored.names, strict=True):
        kept = {key: value for key, value in group.items() if key != "params"}
        group.update(filler.decode_and_fill(tree, kept))
        if names is not None:
            group["param_names"] = names


class _Tensors:
    """The optimizer's state tensors, in place where they fit, tied where the saved ones are."""

    def __init__(self, saved: Saved, fetch: Fetch, stored: _Stored, optimizer: Optimizer) -> None:
        self._saved, self._fetch, self._stored = saved, fetch, stored
        self._made: dict[tuple[int, torch.device], torch.Tensor] = {}
        #: By parameter: whether its step count is kept on its own device.
        self._step_moves = [
            bool(group.get("capturable") or group.get("fused"))
            for group in optimizer.param_groups
            for _ in group["params"]
        ]

    def get(self, number: int, key: Any, live: Any, parameter: torch.Tensor | None, owner: Any) -> torch.Tensor:
        """The state tensor under `key` of the parameter numbered `owner` (of another key, without a parameter)."""
        ref: Ref = self._saved.ref(number)
        device = self._device(ref, key, parameter, owner)
        dtype = DTYPES.get(ref.leaf.dtype)
        if dtype is None:
            raise DamagedCheckpoint(f"component {self._saved.name!r}: unknown dtype {ref.leaf.dtype!r}")
        if same_kind(live, ref.leaf.shape, dtype) and live.device == device:
            copy_exact(live, self._fetch(number))
            return live  # type: ignore[no-any-return]
        made = (self._saved.numbers[number], device)
        if made not in self._made:
            self._made[made] = new_like(self._fetch(number), device, parameter)
        return self._made[made]

    def _device(self, ref: Ref, key: Any, parameter: torch.Tensor | None, owner: Any) -> torch.device:
        if parameter is None or ref.leaf.device != self._stored.devices[owner]:
            return device_for(ref.leaf.device, parameter)  # "cpu" beside a parameter elsewhere: it stays there
        if ref.leaf.device == "cpu" and key == "step" and not self._step_moves[owner]:
            return torch.device("cpu")  # trained on the CPU and going on elsewhere: torch's rule for step counts
        return parameter.device  # it lived with its parameter, wherever that was
