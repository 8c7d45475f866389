"""What a Trainer's class keeps by itself: counters, means, buffers, generators in attributes that transformers has not.

trl's trainers count tokens and gather metrics between two logs; a class of the user's may weigh its loss by what it has
seen. Nobody says which attributes those are. But an attribute that has another value than when training began, and is
plain, is one: what was set up stays the program's.
"""

from __future__ import annotations

import collections
import dis
import functools
import logging
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Trainer

from easyckpt.format.codec_decode import FACTORIES
from easyckpt.state.generators import own_kinds, own_state, set_own_state

_log = logging.getLogger("easyckpt")

_ATOMS = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, set, dict, collections.OrderedDict, collections.defaultdict, collections.deque)
#: An attribute with more values, or more bytes in tensors, is not kept: every step would pay for it.
MOST_VALUES, MOST_BYTES = 10_000, 64 << 20


class Own:
    """The attributes of `trainer` that its class has added and that training changes, from this moment on."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._first = {name: _frozen(value) for name, value in _added(trainer) if _size(value) is not None}
        self._left: set[str] = {name for name, value in _added(trainer) if _size(value) is None}
        """Not to be looked at: of these nothing is kept."""

    def state(self) -> dict[str, Any]:
        """Those that have changed."""
        changed, generators = {}, {}
        for name, value in _added(self._trainer):
            if name in self._left:
                continue
            if _is_generator(value):
                generators[name] = _generator_state(value)
            elif _size(value) is None:
                self._leave(name, value)
            elif name not in self._first or _frozen(value) != self._first[name]:
                changed[name] = _detached(value)
        return {"values": changed, "generators": generators}

    def _leave(self, name: str, value: Any) -> None:
        self._left.add(name)
        if isinstance(value, (*_CONTAINERS, torch.Tensor, np.ndarray)):
            _log.warning(
                "%s.%s changes while it trains and is not kept: it is too large, or holds what is no number, text, "
                "tensor or container. A resumed run begins with the one that it makes",
                type(self._trainer).__name__,
                name,
            )

    def put_back(self, kept: Mapping[str, Any]) -> None:
        """Have the trainer go on with what :meth:`state` has given. Containers stay the objects that they are."""
        for name, value in kept["values"].items():
            setattr(self._trainer, name, _filled(vars(self._trainer).get(name), value))
        for name, state in kept["generators"].items():
            live = vars(self._trainer).get(name)
            if isinstance(live, torch.Generator):
                live.set_state(state)
            elif live is not None:
                set_own_state(live, state)


@functools.cache
def _of_transformers() -> frozenset[str]:
    """The attributes that the Trainer's own code sets."""
    functions = [value for value in vars(Trainer).values() if isinstance(value, types.FunctionType)]
    return frozenset(
        step.argval for each in functions for step in dis.get_instructions(each) if step.opname == "STORE_ATTR"
    )


def _added(trainer: Any) -> Iterator[tuple[str, Any]]:
    names = _of_transformers()
    return ((name, value) for name, value in list(vars(trainer).items()) if name not in names and name != "_easyckpt")


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator) or type(value) in own_kinds()


def _generator_state(generator: Any) -> Any:
    return generator.get_state() if isinstance(generator, torch.Generator) else own_state(generator)


def _size(value: Any) -> int | None:
    """Of a value that can be kept, how many it has in it; None of what is not plain, or too large."""
    if _is_generator(value):
        return 1
    count, size, waiting = 0, 0, [value]
    while waiting:
        each = waiting.pop()
        count += 1
        if isinstance(each, (torch.Tensor, np.ndarray)):
            size += each.nbytes
            if not _is_plain(each):
                return None
        elif type(each) in _CONTAINERS:
            if count + len(waiting) + len(each) > MOST_VALUES or not _is_known(each):
                return None
            waiting += [*each.keys(), *each.values()] if isinstance(each, dict) else each
        elif not isinstance(each, (*_ATOMS, np.generic)):
            return None
        if count > MOST_VALUES or size > MOST_BYTES:
            return None
    return count


def _is_plain(array: Any) -> bool:
    """A parameter, or a leaf that is trained, belongs to a model."""
    if isinstance(array, np.ndarray):
        return bool(array.dtype.kind in "biuf")
    return type(array) is torch.Tensor and array.layout == torch.strided and not (array.is_leaf and array.requires_grad)


def _is_known(container: Any) -> bool:
    return not isinstance(container, collections.defaultdict) or container.default_factory in FACTORIES.values()


@dataclass(frozen=True, slots=True)
class _Written:
    """A tensor, which lives on here, so that no other is in its place; and how often it was written."""

    tensor: torch.Tensor
    times: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Written) and self.tensor is other.tensor and self.times == other.times

    __hash__ = None  # type: ignore[assignment]


def _frozen(value: Any) -> Any:
    """Equal to that of the same value, and to no other's: of a tensor, which one it is and how often it was written."""
    if isinstance(value, torch.Tensor):
        return _Written(value, value._version)
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return (type(value), tuple((key, _frozen(item)) for key, item in value.items()))
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, _CONTAINERS):
        return (type(value), tuple(map(_frozen, value)))
    return (type(value), repr(value))


def _detached(value: Any) -> Any:
    """As it is, without the graphs of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        made = value.copy()
        made.update((key, _detached(item)) for key, item in value.items())
        return made
    if isinstance(value, collections.deque):
        return collections.deque(map(_detached, value), value.maxlen)
    return type(value)(map(_detached, value)) if isinstance(value, (list, tuple)) else value


def _filled(live: Any, value: Any) -> Any:
    """`value`, as `live` where that is a container: others may hold it."""
    if type(live) is not type(value):
        return value
    if isinstance(value, dict):
        before = dict(live)
        live.clear()
        live.update((key, _filled(before.get(key), item)) for key, item in value.items())
        return live
    if isinstance(value, (list, set, collections.deque)):
        live.clear()
        (live.update if isinstance(live, set) else live.extend)(value)
        return live
    return value
