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
from easyckpt.integrations.transformers.unsaved import stamp
from easyckpt.state.generators import own_kinds, own_state, set_own_state

_log = logging.getLogger("easyckpt")

_ATOMS = (bool, int, float, str, type(None))
_ATOM_SET = frozenset(_ATOMS)
_CONTAINERS = (list, tuple, set, dict, collections.OrderedDict, collections.defaultdict, collections.deque)
#: For all attributes together, since every step pays for them: values that are looked at, bytes of arrays (only their
#: content tells that they were written), and bytes of tensors that are kept.
MOST_VALUES, MOST_ARRAY_BYTES, MOST_TENSOR_BYTES = 10_000, 1 << 20, 64 << 20


class Own:
    """The attributes of `trainer` that its class has added and that training changes, from this moment on."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._first: dict[str, list[Any]] = {}
        """Those that have not changed, as they were."""
        self._left: set[str] = set()
        """Not to be looked at: of these nothing is kept."""
        room, large = _Room(), list[str]()
        for name, value in _added(trainer):
            if _is_generator(value):
                continue
            try:
                look = _look(value, room)
            except _TooLarge:
                look = None
                large.append(name)
            if look is None:
                self._left.add(name)
            else:
                self._first[name] = look
        if large:  # of what merely is not plain nothing need be said: it is how the class is set up
            self._warn(large)

    def state(self) -> dict[str, Any]:
        """Those that have changed."""
        changed, generators, room = {}, {}, _Room()
        for name, value in _added(self._trainer):
            if name in self._left:
                continue
            if _is_generator(value):
                generators[name] = _generator_state(value)
            elif self._has_changed(name, value, room):
                changed[name] = _detached(value)
        return {"values": changed, "generators": generators}

    def _has_changed(self, name: str, value: Any, room: _Room) -> bool:
        try:
            look = _look(value, room)
            if look is not None and name in self._first and _is_same(look, self._first[name]):
                return False
            self._first.pop(name, None)
            if look is not None:
                room.take("tensor_bytes", sum(each.tensor.nbytes for each in look if type(each) is _Written))
                return True
        except _TooLarge:
            pass
        self._left.add(name)
        if isinstance(value, (*_CONTAINERS, torch.Tensor, np.ndarray)):
            self._warn([name])
        return False

    def _warn(self, names: list[str]) -> None:
        _log.warning(
            "of %s, %s will not be kept where training changes it: the attributes of the class are too large to be "
            "looked at at every step, or it holds what is no number, text, tensor or container. A resumed run begins "
            "with what it makes itself",
            type(self._trainer).__name__,
            ", ".join(names),
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


class _TooLarge(Exception):
    pass


@dataclass(slots=True)
class _Room:
    """What is left of the bounds."""

    values: int = MOST_VALUES
    array_bytes: int = MOST_ARRAY_BYTES
    tensor_bytes: int = MOST_TENSOR_BYTES

    def take(self, what: str, amount: int) -> None:
        left = getattr(self, what) - amount
        if left < 0:
            raise _TooLarge
        setattr(self, what, left)


def _look(value: Any, room: _Room) -> list[Any] | None:
    """All that a plain value consists of, in one list that stays as it is; None of one that is not plain.

    Of a tensor it has which one it is and how often it was written: nothing of it is read.
    """
    before = room.values, room.array_bytes
    try:
        found = _pieces(value, room)
    except _TooLarge:
        room.values, room.array_bytes = before
        raise
    if found is None:
        room.values, room.array_bytes = before
    return found


def _pieces(value: Any, room: _Room) -> list[Any] | None:
    found: list[Any] = []
    waiting = [value]
    room.take("values", 1)
    while waiting:
        each = waiting.pop()
        if isinstance(each, (*_ATOMS, np.generic)):
            found.append(each)
        elif isinstance(each, torch.Tensor) and _is_plain(each):
            found.append(_Written(each, stamp(each)))
        elif isinstance(each, np.ndarray) and _is_plain(each):
            room.take("array_bytes", each.nbytes)
            found.append((each.dtype.str, each.shape, each.tobytes()))
        elif type(each) in _CONTAINERS and _is_known(each):
            items = [*each.keys(), *each.values()] if isinstance(each, dict) else each
            only_atoms = set(map(type, items)) <= _ATOM_SET
            room.take("values", len(items))
            found.append((type(each), len(each)))
            (found if only_atoms else waiting).extend(items)
        else:
            return None
    return found


def _is_same(look: list[Any], first: list[Any]) -> bool:
    """Mostly the very objects are there still."""
    return len(look) == len(first) and all(map(_equal, look, first))


def _equal(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    # (0.0 and -0.0 are equal)
    return repr(one) == repr(other) if isinstance(one, (float, np.generic)) else bool(one == other)


def _is_plain(array: Any) -> bool:
    """A parameter, or a leaf that is trained, belongs to a model."""
    if isinstance(array, np.ndarray):
        return bool(array.dtype.kind in "biuf")
    return type(array) is torch.Tensor and array.layout == torch.strided and not (array.is_leaf and array.requires_grad)


def _is_known(container: Any) -> bool:
    return not isinstance(container, collections.defaultdict) or container.default_factory in FACTORIES.values()


@dataclass(frozen=True, slots=True)
class _Written:
    """A tensor, which lives on here, so that no other is in its place; and whether it was written since."""

    tensor: torch.Tensor
    stamp: tuple[int, int]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Written) and self.tensor is other.tensor and self.stamp == other.stamp

    __hash__ = None  # type: ignore[assignment]


def _detached(value: Any) -> Any:
    """As it is, without the graphs of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.is_inference() else value.detach()
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
