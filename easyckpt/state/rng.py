"""The global generators: Python, NumPy (where it is in use), torch's on the CPU and on every CUDA device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from easyckpt.state.components import Fetch, Saved, owned
from easyckpt.state.generators import check_host_states, cuda_generators, host_generators, set_host_generators
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
        states = saved.decode(saved.dynamic, saved.stand_in)
        try:
            check_host_states(states)
        except ValueError as error:
            raise saved.damaged(str(error)) from error
        cuda = states.get("cuda", [])
        if not isinstance(cuda, list) or not all(isinstance(t, torch.Tensor) and t.dtype == torch.uint8 for t in cuda):
            raise saved.damaged("the states of the CUDA generators are malformed")
        return []

    @override
    def apply(self, saved: Saved, fetch: Fetch, *, strict: bool) -> None:
        put_back(saved.decode(saved.dynamic, owned(saved, fetch, "cpu")))


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
