"""The global generators of this process (Python, NumPy, torch) as plain values and tensors: read, put back, seeded."""

from __future__ import annotations

import array
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def host_generators() -> dict[str, Any]:
    """The states of those on the host, in tensors and plain values; NumPy's only where NumPy is in use."""
    states: dict[str, Any] = {"python": _python_state(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        states["numpy"] = _numpy_state(numpy)
    return states


def set_host_generators(states: Mapping[str, Any]) -> None:
    """Put back what `host_generators` returned."""
    python = states["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        _set_numpy_state(states["numpy"])


def seed_host_generators(seed: int) -> None:
    """Seed all of them from one number of 63 bits."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach for the accelerators too
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])


def cuda_generators() -> tuple[torch.Generator, ...]:
    """The default generator of every device, once this process uses CUDA. Reading their states wakes no device."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators
    return ()


def _python_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    # By way of an array: torch would look at each of the words.
    return {"version": version, "words": torch.frombuffer(array.array("q", words), dtype=torch.int64), "gauss": gauss}


def _numpy_state(numpy: Any) -> dict[str, Any]:
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":  # its words as a tensor: that costs less at each save
        words = torch.from_numpy(state["state"]["key"].astype(numpy.int64))
        state = {**state, "state": {**state["state"], "key": words}}
    return state


def _set_numpy_state(state: dict[str, Any]) -> None:
    import numpy as np  # noqa: PLC0415  (only where the saved job had it in use)

    key = state["state"].get("key")
    if isinstance(key, torch.Tensor):
        words = np.array(key.tolist(), dtype=np.uint32)
        state = {**state, "state": {**state["state"], "key": words}}
    np.random.set_state(state)
