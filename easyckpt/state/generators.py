"""The host's global generators (Python, NumPy, torch CPU) as plain values, for code that draws and must undo it."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

_Words = dict[str, Any]


def host_generators() -> dict[str, Any]:
    """The states of the global generators, in tensors and plain values; NumPy's only where NumPy is in use."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": _python_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random") and (words := _numpy_state(numpy)) is not None:
        states["numpy"] = words
    return states


def set_host_generators(states: Mapping[str, Any]) -> None:
    """Put back what `host_generators` returned."""
    torch.set_rng_state(states["torch"])
    python = states["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy, words = sys.modules.get("numpy"), states.get("numpy")
    if numpy is not None and words is not None:
        key = numpy.array(words["words"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", key, words["place"], words["has_gauss"], words["gauss"]))


def seed_host_generators(seed: int) -> None:
    """Seed all of them from one number of 63 bits."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach for the accelerators too
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])


def _python_state() -> _Words:
    version, words, gauss = random.getstate()
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}


def _numpy_state(numpy: Any) -> _Words | None:
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":  # the user put another one behind numpy.random: not ours to understand
        return None
    words = torch.tensor(state["state"]["key"].tolist(), dtype=torch.int64)
    place, has_gauss, gauss = int(state["state"]["pos"]), int(state["has_gauss"]), float(state["gauss"])
    return {"words": words, "place": place, "has_gauss": has_gauss, "gauss": gauss}
