"""Generators of random numbers and LR schedulers that live in an audited process, and that nobody has handed over."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FrameType, GeneratorType, ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from easyckpt.state.content import digest_of
from easyckpt.state.generators import global_generators, own_kinds, own_state

#: Modules of Python's own whose objects keep a generator for themselves, seeded by the operating system.
_ASIDE = frozenset({"tempfile"})
_SMALL = 64
_UNTRACKED = frozenset({dict, tuple})
#: What decides a scheduler's next rates. How often it was stepped does not: it may be made to begin anywhere.
_PROGRESS = frozenset({"last_epoch", "_last_lr", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"})


def state_digest(target: Any) -> str:
    """Of a generator, all that decides what it draws next; of a scheduler, how far it is."""
    try:
        if isinstance(target, torch.Generator):
            state: Any = target.get_state()
        elif isinstance(target, LRScheduler):
            state = {name: value for name, value in vars(target).items() if name in _PROGRESS}
        else:
            state = own_state(target)
    except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
        return f"not readable: {type(error).__name__}"
    return digest_of(state)


class Strangers:
    """The live generators and schedulers that are not part of the state, with the place where each was found."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Callable[[], Any], str]] = {}
        """By id: what gives it, None once it is gone; and kind and place, in words."""

    def search(self, known: Iterable[Any]) -> None:
        """Look through the whole process, at what still lives."""
        gc.collect()
        ids = {id(target) for target in (torch.default_generator, *global_generators(), *known, *_inside(known))}
        found = self._found.items()
        self._found = {number: each for number, each in found if number not in ids and each[0]() is not None}
        for generator, place in _generators(ids | self._found.keys()):
            self._found[id(generator)] = _reference(generator), f"{_kind(generator)}, {place}"

    def generators(self) -> list[Any]:
        """Those that still live."""
        return [generator for reference, _ in self._found.values() if (generator := reference()) is not None]

    def digests(self) -> dict[str, str]:
        """Kind and place -> digest of the state now; generators that are gone are left out."""
        states: dict[str, str] = {}
        for number, (reference, place) in list(self._found.items()):
            generator = reference()
            if generator is None:
                del self._found[number]
                continue
            name, count = place, 2
            while name in states:
                name, count = f"{place} ({count})", count + 1
            states[name] = state_digest(generator)
        return states


def _schedulers(base: type[LRScheduler] = LRScheduler) -> Iterator[type[LRScheduler]]:
    yield base
    for kind in base.__subclasses__():
        yield from _schedulers(kind)


def _inside(known: Iterable[Any]) -> Iterator[Any]:
    """The schedulers that others of the state consist of."""
    for target in known:
        parts = vars(target).get("_schedulers") if isinstance(target, LRScheduler) else None
        yield from parts if isinstance(parts, list) else ()


def _reference(generator: Any) -> Callable[[], Any]:
    """What gives it and does not keep it alive. NumPy's cannot be held so: these few are kept."""
    try:
        return weakref.ref(generator)
    except TypeError:
        return lambda: generator


def _kind(generator: Any) -> str:
    kind = type(generator)
    return f"{kind.__module__.partition('.')[0].lstrip('_')}.{kind.__qualname__}"


def _generators(without: Collection[int]) -> Iterator[tuple[Any, str]]:
    """Those that the garbage collector's objects or the running functions refer to, but for the ids in `without`."""
    seen, kinds = set(without), frozenset((torch.Generator, *own_kinds(), *_schedulers()))
    for frame in _frames():
        variables = frame.f_locals
        for name, held in list(variables.items()):
            for value in _in_variable(held, kinds):
                if id(value) not in seen:
                    seen.add(id(value))
                    yield value, _variable(name, frame)
        # A copy (before Python 3.13), which the frame keeps, and the step's tensors with it, unless it is emptied. The
        # program has the same one where it has called locals(): then somebody else refers to it.
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(variables) is dict and sys.getrefcount(variables) <= 3:
            variables.clear()
    for value, container in _reachable(kinds):
        if id(value) not in seen:
            seen.add(id(value))
            place = _holder(value, container)
            if place is not None:
                yield value, place


def _reachable(kinds: Collection[type]) -> list[tuple[Any, Any]]:
    """All of these kinds that the garbage collector's objects refer to, and what each is in where that is none of them.

    Torch's generators are no objects of the garbage collector's themselves, nor are dicts and tuples that hold nothing
    but such. There are a million references: they are sifted in few calls.
    """
    level = gc.get_referents(*gc.get_objects())
    found = [(value, None) for value in level if type(value) in kinds]
    while containers := [value for value in level if type(value) in _UNTRACKED and not gc.is_tracked(value)]:
        level = gc.get_referents(*containers)
        inner = {id(value) for value in level if type(value) in kinds}
        if inner:
            found += [(v, c) for c in containers for v in gc.get_referents(c) if id(v) in inner]
    return found


def _in_variable(value: Any, kinds: Collection[type], depth: int = 3) -> Iterator[Any]:
    """`value`, or what is in small containers there, if it is of these kinds."""
    if type(value) in kinds:
        yield value
    elif depth and type(value) in (dict, tuple, list) and len(value) <= _SMALL:
        for inner in gc.get_referents(value):
            yield from _in_variable(inner, kinds, depth - 1)


def _variable(name: str, frame: FrameType) -> str:
    if frame.f_code.co_name == "<module>":
        return _global(name, frame.f_globals.get("__name__"))
    return f"the variable {name} in {frame.f_code.co_name}() of {frame.f_code.co_filename.rpartition('/')[2]}"


def _global(name: str, module: Any) -> str:
    return f"the global {name} of {module}"


def _frames() -> Iterator[FrameType]:
    for frame in sys._current_frames().values():
        current: FrameType | None = frame
        while current is not None:
            yield current
            current = current.f_back


def _holder(generator: Any, container: Any) -> str | None:
    """In words, what refers to it, as far as that has a name. None: a module's that trains nothing."""
    for referrer in gc.get_referrers(generator) if container is None else [container]:
        if isinstance(referrer, dict):
            names = [name for name, value in referrer.items() if value is generator]
            owner = next((o for o in gc.get_referrers(referrer) if _attributes(o) is referrer), None)
            if type(owner).__module__ in _ASIDE:
                return None
            if isinstance(owner, ModuleType):
                return _global(names[0], owner.__name__)
            if names:
                return f"{names[0]!r} of a dict" if owner is None else _attribute(names[0], owner)
        elif isinstance(referrer, GeneratorType):
            if referrer.gi_code.co_filename != __file__:
                return f"a variable of the iterator {referrer.__qualname__}()"
        elif not isinstance(referrer, (FrameType, type)):
            names = [name for name, value in _attributes(referrer).items() if value is generator]
            if names:
                return None if type(referrer).__module__ in _ASIDE else _attribute(names[0], referrer)
    return "held by what has no name"


def _attributes(owner: object) -> dict[str, Any]:
    """Its own ones, without running any code of its class."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return attributes if isinstance(attributes, dict) else {}


def _attribute(name: str, owner: object) -> str:
    return f"the attribute {name} of a {type(owner).__name__}"
