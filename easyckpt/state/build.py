"""Which adapter takes which object, and which names and objects are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from easyckpt.errors import ConfigError
from easyckpt.state.components import Component, check_name
from easyckpt.state.generators import own_kinds
from easyckpt.state.modules import ModuleComponent, unwrap
from easyckpt.state.objects import (
    FILLABLE,
    ContainerComponent,
    ForeignComponent,
    GeneratorComponent,
    ScalerComponent,
)
from easyckpt.state.optimizers import OptimizerComponent, is_native
from easyckpt.state.own_generators import OwnGeneratorComponent


def make_component(name: str, target: Any) -> Component:
    """Return the adapter for `target`. Raises ConfigError for an object that has no state to hand over."""
    if isinstance(target, Component):
        return target
    if isinstance(target, nn.Module):
        return ModuleComponent(name, target)
    if is_native(target):
        return OptimizerComponent(name, target)
    if _is_scaler(target):
        return ScalerComponent(name, target)
    if isinstance(target, torch.Generator):
        return GeneratorComponent(name, target)
    if type(target) in own_kinds():
        return OwnGeneratorComponent(name, target)
    if callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None)):
        return ForeignComponent(name, target)
    if isinstance(target, FILLABLE):
        return ContainerComponent(name, target)
    if target is None:
        raise ConfigError(f"state[{name!r}] is None: leave it out, in the runs that resume as well")
    kind = f"{type(target).__module__}.{type(target).__qualname__}"
    raise ConfigError(
        f"state[{name!r}] is a {kind}, which has no state_dict and load_state_dict. Give the object these methods, "
        "or put a value into a dict or list that your loop reads it from"
    )


def _is_scaler(target: Any) -> bool:
    if not isinstance(target, torch.amp.GradScaler):
        return False
    kind = type(target)
    return kind.state_dict is torch.amp.GradScaler.state_dict and (
        kind.load_state_dict is torch.amp.GradScaler.load_state_dict
    )


def make_components(state: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Component]:
    """Return the adapters by name; `extra` are easyckpt's own, with reserved names. Raises ConfigError."""
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"state must be a dict of named components such as {{'model': model}}, not a {type(state).__name__}"
        )
    seen: dict[int, str] = {}
    for name, target in state.items():
        key = id(unwrap(target) if isinstance(target, nn.Module) else target)
        if key in seen:
            raise ConfigError(f"state: {seen[key]!r} and {check_name(name)!r} are the same object; name it once")
        seen[key] = check_name(name)
    components = {name: make_component(name, target) for name, target in state.items()}
    components.update((name, make_component(name, target)) for name, target in extra.items())
    return components
