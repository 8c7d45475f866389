"""The whole state at one moment: a layout that stays the same object as long as the state keeps its form."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from easyckpt.format import codec
from easyckpt.format.image import Layout, plan_layout
from easyckpt.state.build import make_components
from easyckpt.state.components import Component, Part
from easyckpt.state.planning import Facts, describe
from easyckpt.state.rng import RNG, RngComponent
from easyckpt.state.tensors import require_memory

#: A component that costs more than this at every step is named to the caller.
SLOW_MS = 2.0
LARGE_BYTES = 1 << 20
#: So many captures in a row must have been slow: one alone may be another program's fault.
SLOW_IN_A_ROW = 3


@dataclass(slots=True)
class Capture:
    """The state at one moment, by reference: copy `early` before anything else runs, then let go of it.

    `sources[i]` belongs to `layout.leaves[i]` and has its shape and dtype; in the image it lies with its dimensions
    in the leaf's `order`, which makes it one block of memory, except for the leaves in `strided`.
    """

    layout: Layout
    sources: list[torch.Tensor]
    #: Their data pointers.
    pointers: list[int]
    #: ``{"trees": {component: what changes at each step}}`` as JSON text.
    objects: bytes
    #: Leaves that at most an optimizer's step writes: they may be copied during the next forward and backward.
    late: list[int]
    #: Of each of them: the optimizers (by id) whose steps write it; none where nobody does.
    steppers: dict[int, frozenset[int]]
    #: All others.
    early: list[int]
    #: Early leaves that are no dense block: they are stored in their logical order and need an element-wise copy.
    strided: frozenset[int]
    #: (component, milliseconds, bytes of its objects) of those that cost too much at each step.
    slow: list[tuple[str, float, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Plan:
    """What was true when the layout was made. Holds no tensor."""

    #: Which components are firm, their tokens, what all tensors look like, data pointers of the firm ones.
    seen: tuple[list[bool], list[Any], tuple[list[Any], ...], list[int]]
    loose_pointers: list[int]
    facts: Facts
    layout: Layout


class StateCapture:
    """Captures the user's named components, easyckpt's own in `extra`, and the global generators.

    Raises ConfigError for names and objects that cannot be components.
    """

    def __init__(
        self,
        components: Mapping[str, Any],
        *,
        rank: int = 0,
        world_size: int = 1,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._components = make_components(components, extra or {})
        self._components.setdefault(RNG, RngComponent())
        self._rank, self._world_size = rank, world_size
        self._plans: dict[bool, _Plan] = {}
        self._slow: dict[str, int] = {}

    @property
    def components(self) -> Mapping[str, Component]:
        """The adapters by name: what `check_all` and `apply_all` take as the live side."""
        return self._components

    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """The torch optimizers that are part of the state, those inside foreign ones too."""
        return chain.from_iterable(component.optimizers() for component in self._components.values())

    def capture(self, replicated_allowed: bool = True) -> Capture:
        """The state now. `replicated_allowed` False: everything is laid out as this rank's own.

        Nothing is copied and the GPU is not waited for. Raises UnsupportedValue with the path of what cannot be kept,
        and StateError with the component's name when the user's code fails.
        """
        parts, slow, objects = [], [], []
        old = self._plans.get(replicated_allowed)
        for number, (name, component) in enumerate(self._components.items()):
            begin = time.perf_counter()
            part = component.collect()
            parts.append(part)
            text = codec.dumps(part.dynamic) if part.dynamic is not None else b""
            if text:
                objects.append(b"%b:%b" % (codec.dumps(name), text))
            steady = old is not None and old.seen[1][number] == part.token
            spent = (time.perf_counter() - begin) * 1e3
            if self._is_slow(name, spent if steady else 0.0, len(text)):
                slow.append((name, spent, len(text)))
        firms = [part.firm for part in parts]
        tensors = _in_order(parts)
        looks, pointers = _look(tensors)
        plan = self._current(replicated_allowed, parts, firms, looks, pointers)
        facts = plan.facts
        sources, chosen = list(facts.pick(tensors)), list(facts.pick(pointers))
        if 0 in chosen:  # storage that was freed since the plan was made, or an empty tensor
            for leaf, source, pointer in zip(plan.layout.leaves, sources, chosen, strict=True):
                if not pointer:
                    require_memory(source, leaf.path)
        return Capture(
            layout=plan.layout,
            sources=sources,
            pointers=chosen,
            objects=b'{"trees":{%b}}' % b",".join(objects),
            late=facts.late,
            steppers=facts.steppers,
            early=facts.early,
            strided=facts.strided,
            slow=slow,
        )

    def _is_slow(self, name: str, spent: float, size: int) -> bool:
        self._slow[name] = self._slow.get(name, 0) + 1 if spent > SLOW_MS else 0
        return self._slow[name] >= SLOW_IN_A_ROW or size > LARGE_BYTES

    def _current(
        self,
        replicated_allowed: bool,
        parts: list[Part],
        firms: list[bool],
        looks: tuple[list[Any], ...],
        pointers: list[int],
    ) -> _Plan:
        plan = self._plans.get(replicated_allowed)
        tokens = [part.token for part in parts]
        count = sum(len(part.tensors) for part in parts if part.firm)
        firm, loose = pointers[:count], pointers[count:]
        now = (firms, tokens, looks, firm)
        if plan is not None and plan.seen == now and plan.facts.hold(plan.loose_pointers, loose):
            return plan
        facts = describe(list(self._components.values()), parts, self._world_size if replicated_allowed else 1)
        if plan is not None and plan.facts.specs == facts.specs and plan.facts.trees == facts.trees:
            layout = plan.layout
        else:
            layout = plan_layout(facts.specs, facts.trees, self._rank, self._world_size)
        plan = self._plans[replicated_allowed] = _Plan(now, loose, facts, layout)
        return plan


def _in_order(parts: Sequence[Part]) -> list[torch.Tensor]:
    """All tensors, those of firm components first."""
    firm = chain.from_iterable(part.tensors for part in parts if part.firm)
    return list(chain(firm, chain.from_iterable(part.tensors for part in parts if not part.firm)))


# The getters themselves: an attrgetter looks the name up at every tensor, which takes twice as long.
_SHAPE, _DTYPE = torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


def _look(tensors: list[torch.Tensor]) -> tuple[tuple[list[Any], ...], list[int]]:
    """(shape, dtype and strides of all, data pointer of all), each in one call of C.

    Shapes and strides as hashes: tens of thousands of tuples held at once make the garbage collector walk the heap.
    Of contiguous tensors the shape tells the strides.
    """
    with torch._C.DisableTorchFunctionSubclass():
        shapes = list(map(hash, map(_SHAPE, tensors)))
        dense = list(map(torch.Tensor.is_contiguous, tensors))
        strides = []
        if not all(dense):
            strides = [hash(tensor.stride()) for tensor, is_dense in zip(tensors, dense, strict=True) if not is_dense]
        return (shapes, list(map(_DTYPE, tensors)), dense, strides), list(map(torch.Tensor.data_ptr, tensors))
