"""The global generators: Python, NumPy (where it is in use), torch's on the CPU and on every CUDA device."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from easyckpt.format.codec import Json
from easyckpt.state.components import Fetch, Ref, Saved, owned
from easyckpt.state.generators import (
    check_numpy_state,
    cuda_generators,
    host_generators,
    live_numpy_state,
    set_host_generators,
)
from easyckpt.state.objects import EncodedComponent

#: The component that every state has without being asked.
RNG = "easyckpt.rng"

_log = logging.getLogger("easyckpt")


class RngComponent(EncodedComponent):
    """All global generators of this process; always this rank's own."""

    kind = "rng"
    apply_order = 9  # restoring other components may draw

    def __init__(self, name: str = RNG) -> None:
        super().__init__(name, None)

    @override
    def value(self) -> Any:
        value = host_generators()
        if cuda := cuda_generators():
            # Seed and offset lie on the host: reading them waits for nothing and wakes no device.
            value["cuda"] = [generator.get_state() for generator in cuda]
        return value

    @override
    def check(self, saved: Saved, *, strict: bool) -> list[str]:
        fields = saved.fields(saved.dynamic)
        python = saved.fields(fields.raw("python"))
        python.number("version")
        gauss = saved.decode(python.raw("gauss"))
        if not _is_state(saved, python.raw("words"), "int64", len(random.getstate()[1])) or not (
            gauss is None or isinstance(gauss, float)
        ):
            raise saved.damaged("the state of Python's generator is malformed")
        if not _is_state(saved, fields.raw("torch"), "uint8", torch.get_rng_state().numel()):
            raise saved.damaged("the state of torch's generator is malformed")
        others = saved.decode(saved.dynamic)
        if "numpy" in others:
            _check_numpy(saved, fields.raw("numpy"))
        cuda = others.get("cuda", [])
        if not isinstance(cuda, list) or not all(isinstance(ref, Ref) and ref.leaf.dtype == "uint8" for ref in cuda):
            raise saved.damaged("the states of the CUDA generators are malformed")
        return []

    @override
    def apply(self, saved: Saved, fetch: Fetch, *, strict: bool) -> None:
        put_back(saved.decode(saved.dynamic, owned(saved, fetch, "cpu")))


def _check_numpy(saved: Saved, tree: Json) -> None:
    try:
        check_numpy_state(saved.decode(tree, saved.stand_in), live_numpy_state())
    except ValueError as error:
        raise saved.damaged(f"the state of NumPy's generator is malformed: {error}") from error


def _is_state(saved: Saved, tree: Json, dtype: str, length: int) -> bool:
    ref = saved.decode(tree)
    return isinstance(ref, Ref) and ref.leaf.dtype == dtype and ref.leaf.shape == (length,)


def put_back(value: Mapping[str, Any]) -> None:
    """Set all global generators to what `RngComponent.value` has returned."""
    set_host_generators(value)
    if "cuda" in value:
        _set_cuda_states(value["cuda"])


def _set_cuda_states(states: list[torch.Tensor]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(states) > count:
        _log.warning(
            "the checkpoint holds generators of %d CUDA devices and %d are here: the others' are not restored",
            len(states),
            count,
        )
    if count:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    for generator, state in zip(torch.cuda.default_generators, states, strict=False):
        generator.set_state(state)
