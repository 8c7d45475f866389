"""torch optimizers, taken apart tensor by tensor: load_state_dict() would cast fp32 state to a bf16 parameter's dtype.

The static tree says whose state each tensor is; parameters are numbered as in state_dict(). What no tensor holds
(values of the param groups, Python numbers and nested containers in the state) is encoded anew at each step.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer
from typing_extensions import override

from easyckpt.errors import UnsupportedValue
from easyckpt.state.components import Component, Encoded, Fetch, Part, Saved, encode
from easyckpt.state.modules import picker
from easyckpt.state.optimizer_load import apply_optimizer, check_optimizer
from easyckpt.state.tensors import TieKey, require_supported, tie_key

if TYPE_CHECKING:
    from easyckpt.format.codec import Json, Path

_VALUES = methodcaller("values")
_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class _Whole:
    """The key under which an entry that is no plain dict is looked at as one value."""


def is_native(optimizer: object) -> bool:
    """Whether `optimizer` keeps its state as torch's own do, with no say in state_dict() of its own."""
    if not isinstance(optimizer, Optimizer):
        return False
    kind = type(optimizer)
    if kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict:
        return False
    own = vars(optimizer)
    return not any(own.get(name) for name in _HOOKS) and own.keys().isdisjoint(("state_dict", "load_state_dict"))


class _Look(NamedTuple):
    owners: list[Any]
    entries: list[dict[Any, Any]]
    values: list[Any]
    token: Any


def look(optimizer: Optimizer) -> _Look:
    """Everything in the optimizer's state, and what must be equal for a plan to be right. No Python loop inside."""
    groups = optimizer.param_groups
    parameters = [group["params"] for group in groups]
    raw = list(optimizer.state.values())
    kinds = list(map(type, raw))
    entries: list[dict[Any, Any]] = raw
    if kinds.count(dict) != len(kinds):
        entries = [entry if type(entry) is dict else {_Whole: entry} for entry in raw]
    values = list(chain.from_iterable(map(_VALUES, entries)))
    owners = list(optimizer.state)
    token = (
        list(map(len, parameters)),
        list(map(id, chain.from_iterable(parameters))),
        list(map(id, owners)),
        list(map(len, entries)),
        list(chain.from_iterable(entries)),
        list(map(type, values)),
        [_static_names(group) for group in groups],
    )
    return _Look(owners, entries, values, token)


def _static_names(group: dict[str, Any]) -> list[str] | None:
    names = group.get("param_names")
    return list(names) if type(names) is list and set(map(type, names)) <= {str} else None


def numbered(optimizer: Optimizer) -> dict[int, int]:
    """Number of each parameter, by id."""
    numbers: dict[int, int] = {}
    for number, parameter in enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        numbers.setdefault(id(parameter), number)
    return numbers


class OptimizerComponent(Component):
    """A torch optimizer: its state bit by bit, its groups' values, and nothing converted on the way back."""

    kind = "optimizer"
    apply_order = 1

    def __init__(self, name: str, target: Optimizer) -> None:
        super().__init__(name, target)
        self._token: Any = None
        self._pick = self._rest = picker([])
        self._tensor_places: list[Path] = []
        self._value_places: list[Path] = []
        self._owners: list[int | None] = []  # number of the parameter whose state each tensor is
        self._static: dict[str, Json] = {}

    @override
    def optimizers(self) -> Iterator[Optimizer]:
        yield self.target

    @override
    def collect(self) -> Part:
        seen = look(self.target)
        if seen.token != self._token:
            self._plan(seen)
        tensors = list(self._pick(seen.values))
        values = self._encode_values(self._rest(seen.values), len(tensors))
        tensors += values.tensors
        paths, groups, state_tensors = values.paths, [], len(tensors)
        for number, group in enumerate(self.target.param_groups):
            # Tensors in a group, such as lr, may be written by a scheduler at any time: they are not state.
            encoded = encode(_group_values(group), (self.name, "param_groups", number), len(tensors))
            groups.append(encoded.tree)
            tensors += encoded.tensors
            paths += encoded.paths
        dynamic: Json = {"values": values.tree, "groups": groups}
        return Part((self._token, paths), tensors, dynamic, firm=True, optimizer_state=state_tensors)

    @override
    def describe(self, part: Part) -> tuple[list[Path], Json]:
        # Read here, not in the plan of the state: `p.data = q` may have changed a parameter's shape or device.
        shapes: list[Json] = [[p.device.type, list(p.shape)] for p in _parameters(self.target)]
        return self._tensor_places + part.token[1], {**self._static, "parameters": shapes}

    @override
    def replicated_refs(self, part: Part, replicated: Container[TieKey]) -> set[int]:
        everywhere = {number for number, p in enumerate(_parameters(self.target)) if tie_key(p) in replicated}
        return {ref for ref, owner in enumerate(self._owners) if owner in everywhere}

    def _encode_values(self, values: tuple[Any, ...], first: int) -> Encoded:
        if not values:
            return Encoded([], [], [])
        try:
            found = encode(list(values), (), first)
        except UnsupportedValue:
            for place, value in zip(self._value_places, values, strict=True):
                encode(value, place)  # raises again, with the right path
            raise
        paths = [self._value_places[path[0]] + path[1:] for path in found.paths]
        return Encoded(found.tree, paths, found.tensors)

    def _plan(self, seen: _Look) -> None:
        numbers = numbered(self.target)
        self._tensor_places, self._value_places, self._owners = [], [], []
        picks: list[int] = []
        rest: list[int] = []
        entries: list[Json] = []
        written: dict[Any, Json] = {}
        position = 0
        for owner, entry in zip(seen.owners, seen.entries, strict=True):
            which, where = self._owner(owner, numbers)
            items: list[Json] = []
            for key, value in entry.items():
                place = where if key is _Whole else (*where, key)
                is_leaf = isinstance(value, torch.Tensor) and require_supported(value, place) is value
                if key not in written:
                    written[key] = None if key is _Whole else encode(key, place).tree
                items.append([written[key], len(picks) if is_leaf else None])
                (self._tensor_places if is_leaf else self._value_places).append(place)
                (picks if is_leaf else rest).append(position)
                self._owners += [which if type(which) is int else None] if is_leaf else []
                position += 1
            entries.append({"of": which, "items": items, "whole": _Whole in entry})
        self._pick, self._rest, self._token = picker(picks), picker(rest), seen.token
        self._static = {
            "groups": list(seen.token[0]),
            "names": list(seen.token[-1]),
            "entries": entries,
        }

    def _owner(self, owner: Any, numbers: dict[int, int]) -> tuple[Json, Path]:
        """(how the file names it, path of its state)."""
        if not isinstance(owner, torch.Tensor):
            where: Path = (self.name, "state", owner)
            return {"key": encode(owner, where).tree}, where
        if id(owner) not in numbers:
            raise UnsupportedValue(
                f"component {self.name!r}: the optimizer holds state of a tensor of shape {tuple(owner.shape)} that is "
                "in none of its param groups; delete it from optimizer.state where the parameter is dropped"
            )
        return numbers[id(owner)], (self.name, "state", numbers[id(owner)])

    @override
    def check(self, saved: Saved, *, strict: bool) -> list[str]:
        return check_optimizer(self.target, saved)

    @override
    def apply(self, saved: Saved, fetch: Fetch, *, strict: bool) -> None:
        apply_optimizer(self.target, saved, fetch)


def stepped(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The tensors that only the optimizer's step writes: its parameters, and its state's tensors at the top level."""
    yield from _parameters(optimizer)
    for entry in optimizer.state.values():
        if isinstance(entry, dict):
            yield from (value for value in entry.values() if isinstance(value, torch.Tensor))


def inner_optimizers(owner: object, depth: int = 4) -> Iterator[Optimizer]:
    """The torch optimizers behind a foreign one (what wraps an optimizer has a step and param groups of its own)."""
    if isinstance(owner, Optimizer) and "_optimizer_step_pre_hooks" in vars(owner):
        yield owner
    if depth and hasattr(owner, "param_groups") and callable(getattr(owner, "step", None)):
        for name in ("optimizer", "optim", "_optimizer"):
            if (wrapped := getattr(owner, name, None)) is not None and wrapped is not owner:
                yield from inner_optimizers(wrapped, depth - 1)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _group_values(group: dict[str, Any]) -> dict[str, Any]:
    static = {"params"} if _static_names(group) is None else {"params", "param_names"}
    return {key: value for key, value in group.items() if key not in static}
