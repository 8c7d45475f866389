"""What EASYCKPT_AUDIT asks of a run: what its randomness was at each step, parts that a load leaves out, a stop.

Nothing of it runs in a job that is not audited. It may cost time there, but never changes what is trained: generators
are looked at and never drawn from.
"""

from __future__ import annotations

import gc
import inspect
import json
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from types import FrameType, GeneratorType, ModuleType
from typing import Any

import torch

from easyckpt.config import Audit
from easyckpt.format import layout
from easyckpt.state.components import Component
from easyckpt.state.content import content_digest
from easyckpt.state.data_position import DataPosition
from easyckpt.state.generators import cuda_generators, host_generators
from easyckpt.storage.base import Storage

#: How many steps after `search_from` the process is searched for generators: rarely, since that takes a while.
_SEARCHED = frozenset({1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000})


class Auditor:
    """Of one rank. Its notes are lines in the root, in the order of the program."""

    def __init__(
        self, audit: Audit, storage: Storage, rank: int, components: Mapping[str, Component], position: DataPosition
    ) -> None:
        self._audit, self._storage, self._file = audit, storage, layout.audit_file(rank)
        self._components, self._position = components, position
        self._batches: dict[str, list[Any]] = {}
        self._strangers = Strangers()
        self.stopping = False
        """The run has come to the step at which it is to stop."""
        position.on_batch = self._saw_batch
        storage.makedirs(layout.AUDIT)

    def wanted(self, asked: Collection[str] | None) -> Collection[str] | None:
        """The components that a load restores where `asked` are asked for (None: all)."""
        if not self._audit.left_out:
            return asked
        return set(self._components if asked is None else asked).difference(self._audit.left_out)

    def loaded(self, step: int, tier: str | None) -> None:
        """A load has ended."""
        self._note({"loaded": step, "tier": tier})

    def after(self, step: int) -> bool:
        """Note what the step has left; returns whether the run is to stop here."""
        known = list(self._known())
        if step - self._audit.search_from in _SEARCHED:
            self._strangers.search([generator for _, generator in known])
        generators = {name: _digest(state) for name, state in host_generators().items()}
        generators |= {name: _digest(generator.get_state()) for name, generator in known}
        note = {
            "step": step,
            "generators": generators,
            "strangers": self._strangers.digests(),
            "rates": {name: rates for name, component in self._components.items() if (rates := _rates(component))},
            "batches": {name: list(seen) for name, seen in sorted(self._batches.items())},
        }
        self._batches = {}
        self._note(note)
        stop = self._audit.stop_step
        self.stopping = stop is not None and step >= stop
        return self.stopping

    def _known(self) -> Iterator[tuple[str, torch.Generator]]:
        """The generators that are part of the state, beside the global ones of the host."""
        for number, generator in enumerate(cuda_generators()):
            yield f"cuda:{number}", generator
        for name, component in self._components.items():
            if isinstance(component.target, torch.Generator):
                yield name, component.target
        for name, generator in self._position.generators():
            yield name, generator

    def _saw_batch(self, name: str, batch: Any) -> None:
        before = self._batches.setdefault(name, [0, ""])
        before[:] = [before[0] + 1, _digest([before[1], batch])]

    def _note(self, note: dict[str, Any]) -> None:
        self._storage.append(self._file, json.dumps(note).encode() + b"\n")


class Strangers:
    """The live torch generators that are not part of the state, with the place where each was found."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.Generator], str]] = {}

    def search(self, known: Collection[torch.Generator]) -> None:
        """Look through the whole process."""
        ids = {id(generator) for generator in (torch.default_generator, *known)}
        found = self._found.items()
        self._found = {number: each for number, each in found if number not in ids and each[0]() is not None}
        for generator, place in _generators(ids | self._found.keys()):
            self._found[id(generator)] = weakref.ref(generator), place

    def generators(self) -> list[torch.Generator]:
        """Those that still live."""
        return [generator for reference, _ in self._found.values() if (generator := reference()) is not None]

    def digests(self) -> dict[str, str]:
        """Place -> digest of the state now; generators that are gone are left out."""
        states: dict[str, str] = {}
        for number, (reference, place) in list(self._found.items()):
            generator = reference()
            if generator is None:
                del self._found[number]
                continue
            name, count = place, 2
            while name in states:
                name, count = f"{place} ({count})", count + 1
            states[name] = _digest(generator.get_state())
        return states


def _generators(without: Collection[int]) -> Iterator[tuple[torch.Generator, str]]:
    """Those that the garbage collector's objects or the running functions refer to, but for the ids in `without`."""
    seen = set(without)
    for frame in _frames():
        variables = frame.f_locals
        for name, value in list(variables.items()):
            if type(value) is torch.Generator and id(value) not in seen:
                seen.add(id(value))
                yield value, f"the variable {name} in {frame.f_code.co_name}() of {_file(frame)}"
        # A copy (before Python 3.13), which the frame keeps, and the step's tensors with it, unless it is emptied. The
        # program has the same one where it has called locals(): then somebody else refers to it.
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(variables) is dict and sys.getrefcount(variables) <= 3:
            variables.clear()
    for value, container in _reachable():
        if type(value) is torch.Generator and id(value) not in seen:
            seen.add(id(value))
            yield value, _holder(value, container)


def _reachable() -> Iterator[tuple[Any, Any]]:
    """All that the garbage collector's objects refer to (a generator is none of these itself), with what it is in."""
    for value in gc.get_referents(*gc.get_objects()):
        # A dict or tuple that holds nothing but such as generators is none of these objects either.
        if type(value) in (dict, tuple) and not gc.is_tracked(value):
            yield from ((inner, value) for inner in gc.get_referents(value))
        else:
            yield value, None


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.rpartition("/")[2]


def _frames() -> Iterator[FrameType]:
    for frame in sys._current_frames().values():
        current: FrameType | None = frame
        while current is not None:
            yield current
            current = current.f_back


def _holder(generator: torch.Generator, container: Any) -> str:
    """In words, what refers to it, as far as that has a name."""
    for referrer in gc.get_referrers(generator) if container is None else [container]:
        if isinstance(referrer, dict):
            names = [name for name, value in referrer.items() if value is generator]
            owner = next((o for o in gc.get_referrers(referrer) if _attributes(o) is referrer), None)
            if isinstance(owner, ModuleType):
                return f"the global {names[0]} of {owner.__name__}"
            if names:
                return f"{names[0]!r} of a dict" if owner is None else _attribute(names[0], owner)
        elif isinstance(referrer, GeneratorType):
            if referrer.gi_code.co_filename != __file__:
                return f"a variable of the iterator {referrer.__qualname__}()"
        elif not isinstance(referrer, (FrameType, type)):
            names = [name for name, value in _attributes(referrer).items() if value is generator]
            if names:
                return _attribute(names[0], referrer)
    return "a torch.Generator"


def _attributes(owner: object) -> dict[str, Any]:
    """Its own ones, without running any code of its class."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return attributes if isinstance(attributes, dict) else {}


def _attribute(name: str, owner: object) -> str:
    return f"the attribute {name} of a {type(owner).__name__}"


def _rates(component: Component) -> list[Any]:
    """The learning rates of an optimizer, by group."""
    try:
        groups = getattr(component.target, "param_groups", None) or ()
        return [float(group["lr"]) for group in groups if isinstance(group, Mapping) and "lr" in group]
    except Exception:  # noqa: BLE001 - whatever the program's objects do, training goes on
        return []


def _digest(value: Any) -> str:
    try:
        return content_digest(value)
    except Exception as error:  # noqa: BLE001 - whatever is in a batch, training goes on
        return f"not digestible: {type(error).__name__}"
