"""Components that are neither modules nor torch optimizers: containers, scalers, generators, foreign objects."""

from __future__ import annotations

import argparse
import collections
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from easyckpt.state.components import Component, Fetch, Part, Ref, Saved, call, encode, owned
from easyckpt.state.fill import Filler
from easyckpt.state.optimizers import inner_optimizers
from easyckpt.state.tensors import copy_exact

if TYPE_CHECKING:
    from easyckpt.format.codec import Json, Path


class EncodedComponent(Component):
    """Base of the kinds whose value is encoded as a whole at each step."""

    def value(self) -> Any:
        """The value to be kept."""
        raise NotImplementedError

    @override
    def collect(self) -> Part:
        encoded = encode(self.value(), (self.name,))
        return Part(encoded.paths, encoded.tensors, encoded.tree, firm=False)

    @override
    def describe(self, part: Part) -> tuple[list[Path], Json]:
        return list(part.token), None


class ForeignComponent(EncodedComponent):
    """Anything with state_dict and load_state_dict: schedulers, optimizers of other libraries, the user's own."""

    kind = "object"

    def __init__(self, name: str, target: Any) -> None:
        super().__init__(name, target)
        # A foreign optimizer's load may build what schedulers look at, as torch's does.
        self.apply_order = 1 if isinstance(target, Optimizer) else 2

    @override
    def value(self) -> Any:
        return call(self.name, "state_dict()", self.target.state_dict)

    @override
    def optimizers(self) -> Iterator[Optimizer]:
        return inner_optimizers(self.target)

    @override
    def check(self, saved: Saved, *, strict: bool) -> list[str]:
        saved.decode(saved.dynamic, saved.stand_in, self.value())
        return []

    @override
    def apply(self, saved: Saved, fetch: Fetch, *, strict: bool) -> None:
        value = saved.decode(saved.dynamic, owned(saved, fetch), self.value())
        call(self.name, "load_state_dict()", self.target.load_state_dict, value)


#: Containers that can be filled in place.
FILLABLE = (dict, list, set, bytearray, collections.deque, argparse.Namespace, types.SimpleNamespace)


class ContainerComponent(EncodedComponent):
    """A plain container, filled in place: it and the containers and fitting tensors in it keep their identity."""

    kind = "container"

    @override
    def value(self) -> Any:
        return self.target

    @override
    def check(self, saved: Saved, *, strict: bool) -> list[str]:
        value = saved.decode(saved.dynamic, saved.stand_in, self.target)
        if type(value) is not type(self.target):
            there, here = type(value).__name__, type(self.target).__name__
            return [f"{self.name} is a {there} in the checkpoint and a {here} here"]
        return []

    @override
    def apply(self, saved: Saved, fetch: Fetch, *, strict: bool) -> None:
        Filler(saved, fetch).decode_and_fill(saved.dynamic, self.target)


class ScalerComponent(EncodedComponent):
    """torch.amp.GradScaler, by its tensors: its state_dict() would wait for the GPU."""

    kind = "scaler"

    @override
    def value(self) -> Any:
        scaler = self.target
        if not scaler.is_enabled():
            return {"enabled": False}
        lazy = scaler._scale is None
        return {
            "enabled": True,
            "scale": scaler._init_scale if lazy else scaler._scale,
            "growth_tracker": scaler._init_growth_tracker if lazy else scaler._growth_tracker,
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
        }

    @override
    def check(self, saved: Saved, *, strict: bool) -> list[str]:
        fields = saved.fields(saved.dynamic)
        enabled = fields.flag("enabled")
        if enabled != self.target.is_enabled():
            words = {True: "enabled", False: "disabled"}
            return [f"{self.name}: the scaler is {words[enabled]} in the checkpoint and {words[not enabled]} here"]
        if not enabled:
            return []
        for name, shape in (("scale", "float32"), ("growth_tracker", "int32")):
            value = saved.decode(fields.raw(name))
            if isinstance(value, Ref) and (value.leaf.shape != () or value.leaf.dtype != shape):
                raise saved.damaged(f"{name!r} is no {shape} scalar")
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            if not isinstance(saved.decode(fields.raw(name)), (int, float)):
                raise saved.damaged(f"{name!r} is no number")
        return []

    @override
    def apply(self, saved: Saved, fetch: Fetch, *, strict: bool) -> None:
        value, scaler = saved.decode(saved.dynamic, owned(saved, fetch, "cpu")), self.target
        if not value["enabled"]:
            return
        scaler._init_scale = _number(value["scale"])
        scaler._init_growth_tracker = _number(value["growth_tracker"])
        for live, there in ((scaler._scale, value["scale"]), (scaler._growth_tracker, value["growth_tracker"])):
            if live is not None:  # else it is made from the initial values at the first use
                copy_exact(live, torch.as_tensor(there, dtype=live.dtype, device="cpu"))
        scaler.set_growth_factor(value["growth_factor"])
        scaler.set_backoff_factor(value["backoff_factor"])
        scaler.set_growth_interval(value["growth_interval"])


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


class GeneratorComponent(EncodedComponent):
    """A torch.Generator of the user's."""

    kind = "generator"

    @override
    def value(self) -> Any:
        return {"device": self.target.device.type, "state": self.target.get_state()}

    @override
    def check(self, saved: Saved, *, strict: bool) -> list[str]:
        fields = saved.fields(saved.dynamic)
        there, here = fields.text("device"), self.target.device.type
        if there != here:
            return [f"{self.name}: a generator of {there} in the checkpoint, of {here} here"]
        state, live = saved.decode(fields.raw("state")), self.target.get_state()
        if not isinstance(state, Ref) or state.leaf.dtype != "uint8" or state.leaf.shape != tuple(live.shape):
            raise saved.damaged("it is no generator's state")
        return []

    @override
    def apply(self, saved: Saved, fetch: Fetch, *, strict: bool) -> None:
        value = saved.decode(saved.dynamic, owned(saved, fetch, "cpu"))
        self.target.set_state(value["state"])
