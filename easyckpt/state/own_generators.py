"""The component of a ``random.Random``, ``numpy.random.Generator`` or ``numpy.random.RandomState`` of the user's."""

from __future__ import annotations

import copy
import numbers
import random
from typing import Any

from typing_extensions import override

from easyckpt.state.components import Fetch, Saved, owned
from easyckpt.state.generators import own_state, set_own_state
from easyckpt.state.objects import EncodedComponent

#: Children of one generator that are counted up to.
_MOST_CHILDREN = 1_000_000
_AT_ONCE = 1000


class OwnGeneratorComponent(EncodedComponent):
    """By its state: the object that the program draws from stays the same."""

    kind = "own generator"

    @override
    def value(self) -> Any:
        state = own_state(self.target)
        return {"class": _spelled(self.target, state), "state": state, "seed": _seed(self.target)}

    @override
    def check(self, saved: Saved, *, strict: bool) -> list[str]:
        live = own_state(self.target)
        fields = saved.fields(saved.dynamic)
        there, here = fields.text("class"), _spelled(self.target, live)
        if there != here:
            return [f"{self.name} is a {there} in the checkpoint and a {here} here"]
        try:
            another = copy.deepcopy(self.target)
        except Exception as error:  # noqa: BLE001 - code of whoever has written NumPy's bit generator
            return [
                f"{self.name} is a {here} that cannot be copied, so that a saved state cannot be tried before it is "
                f"applied ({type(error).__name__}: {error}): use one of NumPy's own bit generators"
            ]
        try:  # on the copy: nothing of the user's is touched yet
            set_own_state(another, saved.decode(fields.raw("state")))
        except ValueError as error:
            raise saved.damaged(f"it is no state of a {here} ({error})") from error
        return self._unlike_seeds(saved, saved.decode(fields.raw("seed")))

    def _unlike_seeds(self, saved: Saved, there: Any) -> list[str]:
        """What keeps the next child that is spawned from being the same."""
        here = _seed(self.target)
        if there is None or (there == here):
            return []
        if not isinstance(there, dict) or type(children := there.get("children")) is not int or children < 0:
            raise saved.damaged("its seed is malformed")
        if children > _MOST_CHILDREN:
            return [f"{self.name} has spawned {children} generators; more than {_MOST_CHILDREN} are not kept"]
        if here is None or here["children"] > children:
            return [f"{self.name} has spawned more generators here than in the checkpoint: restore it in a new process"]
        if children and {**there, "children": 0} != {**here, "children": 0}:
            return [f"{self.name} has spawned generators in the checkpoint and is made of another seed here"]
        return []

    @override
    def apply(self, saved: Saved, fetch: Fetch, *, strict: bool) -> None:
        value = saved.decode(saved.dynamic, owned(saved, fetch))
        set_own_state(self.target, value["state"])
        if value["seed"] is not None:
            left = value["seed"]["children"] - _seed(self.target)["children"]
            while left > 0:  # a seed counts its children and cannot be told to: they are made, and let go
                self.target.bit_generator.seed_seq.spawn(min(left, _AT_ONCE))
                left -= _AT_ONCE


def _seed(generator: Any) -> Any:
    """What decides the generators that are spawned from it; None where none can be."""
    sequence: Any = getattr(getattr(generator, "bit_generator", None), "seed_seq", None)
    if not hasattr(sequence, "n_children_spawned"):
        return None
    return {
        "entropy": _whole(sequence.entropy),
        "spawn_key": list(map(int, sequence.spawn_key)),
        "pool_size": int(sequence.pool_size),
        "children": int(sequence.n_children_spawned),
    }


def _whole(entropy: Any) -> Any:
    return int(entropy) if isinstance(entropy, numbers.Integral) else [int(word) for word in entropy]


def _spelled(generator: Any, state: dict[str, Any]) -> str:
    """Its class, and the algorithm of one of NumPy's, whose states differ."""
    name = f"{type(generator).__module__.partition('.')[0]}.{type(generator).__qualname__}"
    return name if isinstance(generator, random.Random) else f"{name} of {state['bit_generator']}"
