"""Filling the user's live containers with saved values: they keep their identity, and so do tensors that fit."""

from __future__ import annotations

import argparse
import collections
import sys
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from easyckpt.state.components import Fetch, Saved, owned
from easyckpt.state.tensors import copy_exact, same_kind

if TYPE_CHECKING:
    from easyckpt.format.codec import Json

_MISSING = object()
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)


class Filler:
    """Fills live values of one component; one for all of its trees, so that tied tensors are tied again."""

    def __init__(self, saved: Saved, fetch: Fetch) -> None:
        self._saved = saved
        # Every tensor is the state's own from the start: a codec of the user's may keep what it is given.
        self._own = owned(saved, fetch)

    def decode_and_fill(self, tree: Json, live: Any) -> Any:
        """The saved value; `live` itself, filled, where it is a container of the same type."""
        return fill(live, self._saved.decode(tree, self._own, live))


def fill(live: Any, saved: Any) -> Any:
    """Return `saved`, made of `live` and of what is inside it as far as types, shapes and dtypes are equal."""
    if isinstance(saved, torch.Tensor):
        return _fill_tensor(live, saved)
    if type(live) is not type(saved):
        live = _MISSING
    if isinstance(saved, dict):
        return _fill_dict(live, saved)
    if isinstance(saved, (list, collections.deque)):
        return _fill_sequence(live, saved)
    if isinstance(saved, tuple):
        return _fill_tuple(live, saved)
    if live is _MISSING:
        return saved
    if isinstance(saved, set):
        live.clear()
        live.update(saved)
        return live
    if isinstance(saved, bytearray):
        live[:] = saved
        return live
    if isinstance(saved, _NAMESPACES):
        fill(vars(live), vars(saved))
        return live
    return _fill_array(live, saved)


def _fill_tensor(live: Any, saved: torch.Tensor) -> torch.Tensor:
    if not same_kind(live, tuple(saved.shape), saved.dtype):
        return saved.to(live.device) if isinstance(live, torch.Tensor) and live.device.type != "meta" else saved
    copy_exact(live, saved)
    return live  # type: ignore[no-any-return]


def _fill_dict(live: Any, saved: dict[Any, Any]) -> dict[Any, Any]:
    inside = {} if live is _MISSING else live
    filled = [(key, fill(dict.get(inside, key, _MISSING), value)) for key, value in saved.items()]
    if live is _MISSING:
        live = saved
    elif list(live) != list(saved) or list(map(type, live)) != list(map(type, saved)):
        live.clear()
    for key, value in filled:
        live[key] = value  # update() would add up in a Counter
    return live  # type: ignore[no-any-return]


def _fill_all(live: Any, saved: Iterable[Any]) -> list[Any]:
    inside = [] if live is _MISSING else list(live)
    return [fill(inside[place] if place < len(inside) else _MISSING, value) for place, value in enumerate(saved)]


def _fill_sequence(live: Any, saved: Any) -> Any:
    filled = _fill_all(live, saved)
    if live is _MISSING or (isinstance(saved, collections.deque) and live.maxlen != saved.maxlen):
        live = saved
    live.clear()
    live.extend(filled)
    return live


def _fill_tuple(live: Any, saved: tuple[Any, ...]) -> tuple[Any, ...]:
    filled = _fill_all(live, saved)
    if live is not _MISSING and len(live) == len(filled) and all(map(_is, live, filled)):
        return live  # type: ignore[no-any-return]
    if type(saved) is tuple or not hasattr(saved, "_make"):
        return tuple(filled) if type(saved) is tuple else saved
    return saved._make(filled)  # type: ignore[no-any-return]


def _is(one: object, other: object) -> bool:
    return one is other


def _fill_array(live: Any, saved: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None or type(saved) is not numpy.ndarray:
        return saved
    if live.dtype != saved.dtype or live.shape != saved.shape or not live.flags.writeable:
        return saved
    live[...] = saved
    return live
