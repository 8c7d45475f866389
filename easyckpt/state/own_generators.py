"""The component of a ``random.Random``, ``numpy.random.Generator`` or ``numpy.random.RandomState`` of the user's."""

from __future__ import annotations

import copy
import random
from typing import Any

from typing_extensions import override

from easyckpt.state.components import Fetch, Saved, owned
from easyckpt.state.generators import own_state, set_own_state
from easyckpt.state.objects import EncodedComponent


class OwnGeneratorComponent(EncodedComponent):
    """By its state: the object that the program draws from stays the same."""

    kind = "own generator"

    @override
    def value(self) -> Any:
        state = own_state(self.target)
        return {"class": _spelled(self.target, state), "state": state}

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
        return []

    @override
    def apply(self, saved: Saved, fetch: Fetch, *, strict: bool) -> None:
        set_own_state(self.target, saved.decode(saved.dynamic, owned(saved, fetch))["state"])


def _spelled(generator: Any, state: dict[str, Any]) -> str:
    """Its class, and the algorithm of one of NumPy's, whose states differ."""
    name = f"{type(generator).__module__.partition('.')[0]}.{type(generator).__qualname__}"
    return name if isinstance(generator, random.Random) else f"{name} of {state['bit_generator']}"
