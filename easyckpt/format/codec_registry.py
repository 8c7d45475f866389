"""Codecs that users register for types that easyckpt does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from easyckpt.errors import UsageError
from easyckpt.format.codec_leaves import WRITERS

T = TypeVar("T")


class Codec(NamedTuple):
    """How one type is kept."""

    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


BY_TYPE: dict[type, Codec] = {}
BY_NAME: dict[str, Codec] = {}

_OWN = (bool, int, float, str, list, tuple, dict, set, frozenset, type(None))


def register_codec(
    kind: type[T], encode: Callable[[T], Any], decode: Callable[[Any], T], name: str | None = None
) -> None:
    """Keep values of exactly the type `kind` through `encode`, which returns a supported value; tensors may be in it.

    Files name the codec by `name` alone (by default the type's module and qualified name), so it must be registered
    before they are read. Registering the same type and name again replaces the functions. Raises UsageError for a
    type that easyckpt keeps itself, and for a name that belongs to another type.
    """
    name = f"{kind.__module__}.{kind.__qualname__}" if name is None else name
    if kind in _OWN or kind in WRITERS:
        raise UsageError(f"register_codec: {kind.__qualname__} is kept exactly without a codec")
    known = BY_TYPE.get(kind)
    if (known is not None and known.name != name) or (known is None and name in BY_NAME):
        raise UsageError(f"register_codec: {name!r} or {kind.__qualname__} is registered already; choose another name")
    BY_TYPE[kind] = BY_NAME[name] = Codec(name, encode, decode)
