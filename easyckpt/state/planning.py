"""From the collected references to leaves: which are one leaf, where each may lie, and when each may be copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from easyckpt.errors import UnsupportedValue
from easyckpt.format.codec import path_text
from easyckpt.format.dtypes import dtype_name
from easyckpt.format.image import LeafSpec
from easyckpt.state.components import Component, Part
from easyckpt.state.modules import Pick, picker
from easyckpt.state.optimizers import stepped
from easyckpt.state.tensors import TieKey, dense_order, require_memory, storage_key, tie_key

if TYPE_CHECKING:
    from easyckpt.format.codec import Json, Path


@dataclass(frozen=True, slots=True)
class Facts:
    """What a plan knows about the leaves. Holds no tensor."""

    specs: list[LeafSpec]
    trees: Json
    #: From all tensors in order to one per leaf.
    pick: Pick
    late: list[int]
    #: Of each late leaf: the optimizers (by id) whose steps write it; none where nobody does.
    steppers: dict[int, frozenset[int]]
    early: list[int]
    strided: frozenset[int]
    #: Of the references of components that are not firm, counted from the first: those whose pointer must stay.
    pinned: list[int]
    #: Memory of the firm components, and how many of the other references look at it.
    firm_memory: frozenset[int]
    firm_hits: int

    def hold(self, planned: list[int], pointers: list[int]) -> bool:
        """Whether the references that are not firm, at `pointers` now, are still tied, and late, as planned.

        Fresh tensors move at every capture; what counts is which of them are the same memory, and that those which
        are tied to a firm tensor or late have not moved.
        """
        if planned == pointers:
            return True
        if any(planned[number] != pointers[number] for number in self.pinned):
            return False
        if sum(map(self.firm_memory.__contains__, pointers)) != self.firm_hits:
            return False
        return _pattern(planned) == _pattern(pointers)


def _pattern(pointers: list[int]) -> list[int]:
    first: dict[int, int] = {}
    return [first.setdefault(pointer, number) for number, pointer in enumerate(pointers)]


@dataclass(slots=True)
class _Reference:
    path: Path
    tensor: torch.Tensor
    key: TieKey
    replicated: bool
    state_of: frozenset[int]
    """The optimizers (by id) whose state it is."""
    pointer: int


def describe(components: Sequence[Component], parts: Sequence[Part], world_size: int) -> Facts:
    """Make the plan for `parts`, collected just now. `world_size` 1: nothing is replicated."""
    replicated = _replicated(components) if world_size > 1 else set()
    described = [_references(c, part, replicated) for c, part in zip(components, parts, strict=True)]
    order = [number for number, part in enumerate(parts) if part.firm]
    firm_count = sum(len(parts[number].tensors) for number in order)
    order += [number for number, part in enumerate(parts) if not part.firm]
    references = [reference for number in order for reference in described[number][0]]
    leaf_of: dict[TieKey, int] = {}
    numbers = [leaf_of.setdefault(reference.key, len(leaf_of)) for reference in references]
    picks, orders, flags = _leaves(references, numbers)
    late = _late(components, references, numbers, picks, orders)
    specs = [_spec(references[position], orders[leaf], flags[leaf]) for leaf, position in enumerate(picks)]
    pointers = [reference.pointer for reference in references]
    memory = frozenset(pointers[:firm_count]) - {0}
    trees: dict[str, Json] = {}
    begin = 0
    for number in order:
        count = len(parts[number].tensors)
        leaves: list[Json] = list(numbers[begin : begin + count])
        trees[components[number].name] = {
            "kind": components[number].kind,
            "leaves": leaves,
            "tree": described[number][1],
        }
        begin += count
    return Facts(
        specs=specs,
        trees={component.name: trees[component.name] for component in components},
        pick=picker(picks),
        late=sorted(late),
        steppers=late,
        early=[leaf for leaf in range(len(picks)) if leaf not in late],
        strided=frozenset(leaf for leaf, found in enumerate(orders) if found is None),
        pinned=_pinned(numbers, firm_count, late),
        firm_memory=memory,
        firm_hits=sum(map(memory.__contains__, pointers[firm_count:])),
    )


def _replicated(components: Sequence[Component]) -> set[TieKey]:
    return {tie_key(tensor) for component in components for tensor in component.replicated()}


def _constant(components: Sequence[Component]) -> set[TieKey]:
    """On the host alone: on a GPU no probe would see it, were one written after all."""
    found = (tie_key(tensor) for component in components for tensor in component.constant() if tensor.is_cpu)
    return set(found)


def _references(component: Component, part: Part, replicated: set[TieKey]) -> tuple[list[_Reference], Json]:
    paths, static = component.describe(part)
    everywhere = component.replicated_refs(part, replicated) if replicated else set()
    optimizers = frozenset(map(id, component.optimizers())) if part.optimizer_state else frozenset()
    return [
        _Reference(
            path,
            tensor,
            tie_key(tensor),
            number in everywhere,
            optimizers if number < part.optimizer_state else frozenset(),
            require_memory(tensor, path),
        )
        for number, (path, tensor) in enumerate(zip(paths, part.tensors, strict=True))
    ], static


def _leaves(
    references: list[_Reference], numbers: list[int]
) -> tuple[list[int], list[tuple[int, ...] | None], list[bool]]:
    """By leaf: the reference that stands for it, its order (None: strided), whether it is replicated."""
    picks: list[int] = []
    orders: list[tuple[int, ...] | None] = []
    flags: list[bool] = []
    for position, (reference, leaf) in enumerate(zip(references, numbers, strict=True)):
        if leaf == len(picks):
            picks.append(position)
            orders.append(dense_order(reference.tensor))
            flags.append(False)
        flags[leaf] |= reference.replicated
    return picks, orders, flags


def _late(
    components: Sequence[Component],
    references: list[_Reference],
    numbers: list[int],
    picks: list[int],
    orders: list[tuple[int, ...] | None],
) -> dict[int, frozenset[int]]:
    """Leaves that only optimizers' steps write, or nobody, as far as can be told, and those optimizers (by id).

    None of their memory is another leaf's.
    """
    known = {id(reference.tensor): reference.key for reference in references}
    steppers: defaultdict[TieKey, set[int]] = defaultdict(set)
    for component in components:
        for optimizer in component.optimizers():
            for tensor in stepped(optimizer):
                steppers[known.get(id(tensor)) or tie_key(tensor)].add(id(optimizer))
    for reference, leaf in zip(references, numbers, strict=True):
        if reference.state_of:
            steppers[references[picks[leaf]].key] |= reference.state_of
    constant = _constant(components)
    late, shared = {}, set()
    for leaf, position in enumerate(picks):
        reference = references[position]
        told = reference.key in steppers or reference.key in constant
        if told and orders[leaf] is not None and not reference.tensor.is_inference():
            late[leaf] = frozenset(steppers.get(reference.key, ()))
        else:
            shared.add(storage_key(reference.tensor))
    return {leaf: ids for leaf, ids in late.items() if storage_key(references[picks[leaf]].tensor) not in shared}


def _pinned(numbers: list[int], firm_count: int, late: Container[int]) -> list[int]:
    firm = set(numbers[:firm_count])
    return [number for number, leaf in enumerate(numbers[firm_count:]) if leaf in firm or leaf in late]


def _spec(reference: _Reference, order: tuple[int, ...] | None, replicated: bool) -> LeafSpec:
    tensor = reference.tensor
    try:
        dtype = dtype_name(tensor.dtype)
    except UnsupportedValue as error:
        raise UnsupportedValue(f"{path_text(reference.path)}: {error}") from None
    identity: Any = tuple(range(tensor.dim()))
    return LeafSpec(
        path=reference.path,
        dtype=dtype,
        shape=tuple(tensor.shape),
        order=identity if order is None else order,
        device=tensor.device.type,
        replicated=replicated,
    )
