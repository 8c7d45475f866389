"""Exact encoding of Python values as JSON, with the tensors taken out.

Strings, ints, finite floats, bools, None, lists and dicts with string keys are themselves; everything else is an
object with the key ``"$"``, its tag. `codec_decode` reads it back.
"""

from __future__ import annotations

import argparse
import collections
import enum
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from easyckpt.errors import DamagedCheckpoint, UnsupportedValue
from easyckpt.format import codec_registry
from easyckpt.format.canonical import Json, dumps, loads
from easyckpt.format.codec_decode import FACTORIES, MAX_NESTING, NAMESPACES, MissingContext, decode
from easyckpt.format.codec_leaves import WRITERS, encode_float, encode_int, encode_str, is_plain_text
from easyckpt.format.codec_registry import register_codec

__all__ = [
    "Json", "Key", "MissingContext", "Path", "decode", "dumps", "encode", "encode_plain", "loads", "path_from_json",
    "path_key", "path_text", "path_to_json", "register_codec",
]  # fmt: skip

#: str, int, float, bool, None, bytes or a tuple of them.
Key: TypeAlias = Any
Path: TypeAlias = tuple[Key, ...]

OnTensor: TypeAlias = Callable[[Path, torch.Tensor], int]

_FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}
_NAMESPACE_NAMES = {kind: name for name, kind in NAMESPACES.items()}
_SIMPLE_KEYS = (str, int, float, bool, type(None), bytes)


def encode(value: Any, path: Path, on_tensor: OnTensor) -> Json:
    """Return `value` as JSON. `on_tensor` gets each tensor in it, with its path, and returns its leaf number.

    `path` is where the value is. Raises UnsupportedValue, naming the path, for what cannot be kept exactly.
    """
    return _Encoder(on_tensor).value(value, path, 0)


def encode_plain(value: Any, path: Path = ()) -> Json:
    """As :func:`encode`, for a value that has no tensors in it."""
    return encode(value, path, _refuse_tensor)


def _refuse_tensor(path: Path, tensor: torch.Tensor) -> int:
    raise UnsupportedValue(f"{_place(path)}: a tensor cannot be kept at this place; use its item() or tolist()")


def _place(path: Path) -> str:
    return path_text(path) or "the value"


def _unsupported(value: Any, path: Path, reason: str = "") -> UnsupportedValue:
    kind = type(value)
    return UnsupportedValue(
        f"{_place(path)}: a value of type {kind.__module__}.{kind.__qualname__} cannot be kept exactly"
        f"{': ' + reason if reason else ''}; register a codec with easyckpt.register_codec(type, encode, decode), "
        f"or take it out of the state"
    )


class _Encoder:
    __slots__ = ("_on_tensor",)

    def __init__(self, on_tensor: OnTensor) -> None:
        self._on_tensor = on_tensor

    def value(self, value: Any, path: Path, depth: int) -> Json:
        kind = type(value)
        if kind is str:
            return encode_str(value)
        if value is None:
            return None
        if kind is bool:
            return bool(value)
        if kind is int:
            return encode_int(value)
        if kind is float:
            return encode_float(value)
        if depth >= MAX_NESTING:
            raise UnsupportedValue(f"{_place(path)[:500]}: nested deeper than {MAX_NESTING} levels, or in itself")
        container = _CONTAINERS.get(kind)
        if container is not None:
            return container(self, value, path, depth + 1)
        if kind in WRITERS:
            tag, write = WRITERS[kind]
            try:
                return {"$": tag, "v": write(value)}
            except TypeError as error:
                raise _unsupported(value, path, str(error)) from None
        return self._special(value, path, depth + 1)

    def _special(self, value: Any, path: Path, depth: int) -> Json:
        """What is told by more than its exact type."""
        codec = codec_registry.BY_TYPE.get(type(value))
        if codec is not None:
            return {"$": "codec", "name": codec.name, "v": self.value(codec.encode(value), path, depth)}
        if isinstance(value, torch.Tensor):
            return {"$": "tensor", "v": self._on_tensor(path, value)}
        if isinstance(value, enum.Enum):
            return self._enum(value, path)
        if isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_make"):
            return self._namedtuple(value, path, depth)
        raise _unsupported(value, path)

    def _enum(self, value: enum.Enum, path: Path) -> Json:
        kind = type(value).__qualname__
        if isinstance(value, enum.Flag):
            return {"$": "flag", "class": kind, "v": encode_int(value.value)}
        return {"$": "enum", "class": kind, "v": encode_str(value.name)}

    def _namedtuple(self, value: Any, path: Path, depth: int) -> Json:
        if getattr(value, "__dict__", None):
            raise _unsupported(value, path, "a namedtuple with attributes of its own")
        fields: list[str] = list(value._fields)
        values = [self.value(item, (*path, name), depth) for name, item in zip(fields, value, strict=True)]
        return {"$": "namedtuple", "name": type(value).__name__, "fields": list(fields), "v": values}

    def sequence(self, value: Iterable[Any], path: Path, depth: int) -> list[Json]:
        return [self.value(item, (*path, number), depth) for number, item in enumerate(value)]

    def table(self, value: dict[Any, Any], path: Path, depth: int) -> Json:
        if "$" not in value and all(type(key) is str and is_plain_text(key) for key in value):
            return {key: self.value(item, (*path, key), depth) for key, item in value.items()}
        return {"$": "dict", "items": self.pairs(value, path, depth)}

    def pairs(self, value: dict[Any, Any], path: Path, depth: int) -> Json:
        pairs: list[Json] = []
        for key, item in value.items():
            encoded = _Encoder(_refuse_tensor).value(key, path, depth)
            pairs.append([encoded, self.value(item, (*path, path_key(key, encoded)), depth)])
        return pairs

    def ordered(self, value: collections.OrderedDict[Any, Any], path: Path, depth: int) -> Json:
        attributes = vars(value)
        if attributes.keys() - {"_metadata"}:
            raise _unsupported(value, path, "an OrderedDict with attributes of its own")
        result: dict[str, Json] = {"$": "ordereddict", "items": self.pairs(value, path, depth)}
        if attributes:  # torch keeps the versions of modules here
            result["metadata"] = self.value(attributes["_metadata"], (*path, "_metadata"), depth)
        return result

    def default(self, value: collections.defaultdict[Any, Any], path: Path, depth: int) -> Json:
        factory = value.default_factory
        name = _FACTORY_NAMES.get(factory, "like") if factory is None or isinstance(factory, type) else "like"
        return {"$": "defaultdict", "factory": name, "items": self.pairs(value, path, depth)}

    def namespace(self, value: Any, path: Path, depth: int) -> Json:
        attributes = vars(value)
        if any(type(name) is not str for name in attributes):
            raise _unsupported(value, path, "an attribute whose name is not a string")
        return {"$": "namespace", "class": _NAMESPACE_NAMES[type(value)], "v": self.table(attributes, path, depth + 1)}


_CONTAINERS: dict[type, Callable[[_Encoder, Any, Path, int], Json]] = {
    list: _Encoder.sequence,
    dict: _Encoder.table,
    tuple: lambda encoder, value, path, depth: {"$": "tuple", "v": encoder.sequence(value, path, depth)},
    set: lambda encoder, value, path, depth: {"$": "set", "v": encoder.sequence(value, path, depth)},
    frozenset: lambda encoder, value, path, depth: {"$": "frozenset", "v": encoder.sequence(value, path, depth)},
    slice: lambda encoder, value, path, depth: {
        "$": "slice",
        "v": encoder.sequence((value.start, value.stop, value.step), path, depth),
    },
    collections.deque: lambda encoder, value, path, depth: {
        "$": "deque",
        "maxlen": value.maxlen,
        "v": encoder.sequence(value, path, depth),
    },
    collections.Counter: lambda encoder, value, path, depth: {
        "$": "counter",
        "items": encoder.pairs(value, path, depth),
    },
    collections.OrderedDict: _Encoder.ordered,
    collections.defaultdict: _Encoder.default,
    argparse.Namespace: _Encoder.namespace,
    types.SimpleNamespace: _Encoder.namespace,
}


# Paths.


def _is_simple(key: Key, depth: int = 0) -> bool:
    if type(key) is tuple:
        return depth < 8 and all(_is_simple(part, depth + 1) for part in key)
    return type(key) in _SIMPLE_KEYS


def path_key(key: Any, encoded: Json) -> Key:
    """What stands for a dict's key in a path: itself, or its encoded text where it is no simple value."""
    return key if _is_simple(key) else dumps(encoded).decode("ascii")


def path_to_json(path: Path) -> list[Json]:
    """Return `path` as JSON, each key exactly."""
    keys: list[Json] = []
    for key in path:
        if not _is_simple(key):
            raise _unsupported(key, path, "as a key of a path")
        keys.append(encode_plain(key))
    return keys


_PLAIN_KEYS = frozenset({str, int})


def path_from_json(value: Json) -> Path:
    """Read what :func:`path_to_json` gave. Raises DamagedCheckpoint."""
    if type(value) is not list:
        raise DamagedCheckpoint("a path is not a list")
    if set(map(type, value)) <= _PLAIN_KEYS:
        return tuple(value)
    path = tuple(key if type(key) is str or type(key) is int else decode(key, _no_tensor) for key in value)
    if not all(map(_is_simple, path)):
        raise DamagedCheckpoint("a path has a key that is no simple value")
    return path


def _no_tensor(number: int) -> Any:
    raise DamagedCheckpoint(f"tensor {number} where none can be")


def path_text(path: Path) -> str:
    """Return `path` for people and as a key in a shard: ``model.layers.0.weight``. Not always unique."""
    text = ".".join(key if type(key) is str else _key_text(key) for key in path)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _key_text(key: Key) -> str:
    try:
        return repr(key)
    except ValueError:  # an int with more digits than Python prints
        return dumps(encode_plain(key)).decode("ascii")
