"""The reading half of the codec.

It builds values of the standard library, numpy and torch only: nothing is imported, and no class is looked up by a
name from the file. Classes come from `like`, the live object at the same place.
"""

from __future__ import annotations

import argparse
import collections
import enum
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any

from easyckpt.errors import DamagedCheckpoint, FormatError, StateMismatch
from easyckpt.format import codec_registry
from easyckpt.format.canonical import Json
from easyckpt.format.codec_leaves import MALFORMED, READERS, expect

#: Deepest nesting of values. Each level costs at most three levels of JSON.
MAX_NESTING = 60

#: Default factories that a defaultdict may name.
FACTORIES: dict[str, Any] = {"none": None, "list": list, "int": int, "dict": dict, "set": set, "float": float}
NAMESPACES: dict[str, type[Any]] = {"argparse": argparse.Namespace, "types": types.SimpleNamespace}


class MissingContext(FormatError, StateMismatch):
    """Sound bytes that cannot be read here: they need a live enum, a live factory or a registered codec."""


class _LeafFailedError(Exception):
    """Carries what `leaf` raised past the handlers of malformed input, which it is not."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def decode(json: Json, leaf: Callable[[int], Any], like: Any = None) -> Any:
    """Return the value that `encode` was given. `leaf` returns the tensor of a leaf number (LookupError: none such).

    `like` is the live object at that place: classes of namedtuples and enums, and factories of defaultdicts, are
    taken from it. A namedtuple without a live one gets a generated class.
    Raises DamagedCheckpoint for malformed input of any kind, and MissingContext where `like` or a codec is needed.
    """
    try:
        return _Decoder(leaf).value(json, like, 0)
    except _LeafFailedError as failure:
        raise failure.error from None


def _malformed(tag: str, error: Exception | None = None) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"malformed value {tag[:40]!r}" + (f": {str(error)[:200]}" if error else ""))


class _Decoder:
    __slots__ = ("_leaf",)

    def __init__(self, leaf: Callable[[int], Any]) -> None:
        self._leaf = leaf

    def value(self, json: Json, like: Any, depth: int) -> Any:
        kind = type(json)
        if json is None or kind is str or kind is bool or kind is int or kind is float:
            return json
        if depth > MAX_NESTING:
            raise DamagedCheckpoint(f"values nested deeper than {MAX_NESTING} levels")
        if type(json) is list:
            return self._sequence(json, like, depth + 1)
        if type(json) is not dict:
            raise DamagedCheckpoint(f"{kind.__name__} is not JSON")
        if "$" not in json:
            return {key: self.value(item, _child(like, key), depth + 1) for key, item in json.items()}
        tag = json["$"]
        if type(tag) is not str:
            raise DamagedCheckpoint("a tag is not a string")
        return self._tagged(tag, json, like, depth + 1)

    def _tagged(self, tag: str, json: dict[str, Json], like: Any, depth: int) -> Any:
        try:
            if tag in READERS:
                return READERS[tag](json["v"])
            container = _CONTAINERS.get(tag)
            if container is None:
                raise DamagedCheckpoint(f"unknown tag {tag[:40]!r}")
            return container(self, json, like, depth)
        except MALFORMED as error:
            raise _malformed(tag, error) from None

    def _sequence(self, json: list[Json], like: Any, depth: int) -> list[Any]:
        if isinstance(like, (list, tuple)) and len(like) >= len(json):
            return [self.value(item, other, depth) for item, other in zip(json, like, strict=False)]
        return [self.value(item, _child(like, number), depth) for number, item in enumerate(json)]

    def items(self, json: dict[str, Json], like: Any, depth: int) -> list[Any]:
        """The list under "v"."""
        return self._sequence(expect(json["v"], list), like, depth)

    def fill(self, target: Any, json: dict[str, Json], like: Any, depth: int) -> Any:
        """Put the pairs under "items" into `target`, a dict of some kind."""
        pairs = expect(json["items"], list)
        for pair in pairs:
            name, item = expect(pair, list)
            key = self.value(name, _enum_key(name, like), depth)
            target[key] = self.value(item, _child(like, key), depth)
        if len(target) != len(pairs):
            raise ValueError("a key comes twice")
        return target

    def tensor(self, json: dict[str, Json], like: Any, depth: int) -> Any:
        number = expect(json["v"], int)
        if number < 0:
            raise ValueError("a negative leaf number")
        try:
            return self._leaf(number)
        except LookupError:
            raise ValueError(f"there is no tensor {number}") from None
        except Exception as error:
            raise _LeafFailedError(error) from error

    def codec(self, json: dict[str, Json], like: Any, depth: int) -> Any:
        name = expect(json["name"], str)
        codec = codec_registry.BY_NAME.get(name)
        if codec is None:
            raise MissingContext(
                f"a value was kept by the codec {name[:100]!r}, which is not registered here: "
                f"call easyckpt.register_codec(type, encode, decode, name) before reading"
            )
        payload = self.value(json["v"], None, depth)
        try:
            return codec.decode(payload)
        except Exception as error:
            raise _malformed(name, error) from error

    def namedtuple(self, json: dict[str, Json], like: Any, depth: int) -> Any:
        fields = tuple(expect(field, str) for field in expect(json["fields"], list))
        values = self.items(json, like, depth)
        if len(values) != len(fields):
            raise ValueError("not one value for each field")
        if isinstance(like, tuple) and getattr(like, "_fields", None) == fields:
            return tuple.__new__(type(like), values)
        return _generated(expect(json["name"], str), fields)._make(values)

    def enum(self, json: dict[str, Json], like: Any, depth: int) -> Any:
        kind, name = _enum_class(json, like, enum.Enum), self.value(json["v"], None, depth)
        if type(name) is not str or name not in kind.__members__:
            raise MissingContext(f"the enum {kind.__qualname__} has no member {str(name)[:40]!r} here")
        return kind.__members__[name]

    def flag(self, json: dict[str, Json], like: Any, depth: int) -> Any:
        kind, value = _enum_class(json, like, enum.Flag), expect(self.value(json["v"], None, depth), int)
        try:
            return kind(value)
        except ValueError as error:
            raise MissingContext(f"the flag {kind.__qualname__} has no such value here: {str(error)[:200]}") from None

    def defaultdict(self, json: dict[str, Json], like: Any, depth: int) -> Any:
        name = expect(json["factory"], str)
        if name != "like":
            factory = FACTORIES[name]
        elif isinstance(like, collections.defaultdict):
            factory = like.default_factory
        else:
            raise MissingContext("a defaultdict with a factory of its own needs the live defaultdict at its place")
        return self.fill(collections.defaultdict(factory), json, like, depth)

    def ordereddict(self, json: dict[str, Json], like: Any, depth: int) -> Any:
        result: Any = self.fill(collections.OrderedDict(), json, like, depth)
        if "metadata" in json:
            result._metadata = self.value(json["metadata"], getattr(like, "_metadata", None), depth)
        return result

    def namespace(self, json: dict[str, Json], like: Any, depth: int) -> Any:
        kind = NAMESPACES[expect(json["class"], str)]
        attributes = self.value(json["v"], vars(like) if type(like) is kind else None, depth)
        if type(attributes) is not dict or any(type(name) is not str for name in attributes):
            raise ValueError("attributes are not a dict with strings for keys")
        result = kind()
        vars(result).update(attributes)
        return result

    def deque(self, json: dict[str, Json], like: Any, depth: int) -> Any:
        values = self.items(json, list(like) if isinstance(like, collections.deque) else None, depth)
        maxlen: Any = json["maxlen"]
        if maxlen is not None and not len(values) <= expect(maxlen, int):
            raise ValueError("longer than its maxlen")
        return collections.deque(values, maxlen)

    def elements(self, json: dict[str, Json], kind: Any, depth: int) -> Any:
        values = self.items(json, None, depth)
        result = kind(values)
        if len(result) != len(values):
            raise ValueError("an element comes twice")
        return result


_CONTAINERS: dict[str, Callable[[_Decoder, dict[str, Json], Any, int], Any]] = {
    "tensor": _Decoder.tensor,
    "codec": _Decoder.codec,
    "tuple": lambda decoder, json, like, depth: tuple(decoder.items(json, like, depth)),
    "set": lambda decoder, json, like, depth: decoder.elements(json, set, depth),
    "frozenset": lambda decoder, json, like, depth: decoder.elements(json, frozenset, depth),
    "slice": lambda decoder, json, like, depth: _slice(*decoder.items(json, None, depth)),
    "dict": lambda decoder, json, like, depth: decoder.fill({}, json, like, depth),
    "counter": lambda decoder, json, like, depth: decoder.fill(collections.Counter(), json, like, depth),
    "ordereddict": _Decoder.ordereddict,
    "defaultdict": _Decoder.defaultdict,
    "namespace": _Decoder.namespace,
    "deque": _Decoder.deque,
    "namedtuple": _Decoder.namedtuple,
    "enum": _Decoder.enum,
    "flag": _Decoder.flag,
}


def _slice(start: Any, stop: Any, step: Any) -> slice:
    return slice(start, stop, step)


def _child(like: Any, key: Any) -> Any:
    """The live object under `key` of `like`, if it is a plain container that has one."""
    if isinstance(like, dict):
        return dict.get(like, key)
    if isinstance(like, (list, tuple)) and type(key) is int and 0 <= key < len(like):
        return like[key]
    return None


def _enum_key(json: Json, like: Any) -> Any:
    """A live key of the enum class that the encoded key `json` names."""
    if isinstance(json, dict) and json.get("$") in ("enum", "flag") and isinstance(like, dict):
        for key in like:
            if isinstance(key, enum.Enum) and type(key).__qualname__ == json.get("class"):
                return key
    return None


def _enum_class(json: dict[str, Json], like: Any, base: type[Any]) -> Any:
    name = expect(json["class"], str)
    if isinstance(like, base) and type(like).__qualname__ == name:
        return type(like)
    raise MissingContext(f"a member of the enum {name[:100]!r} needs a live member of it at the same place")


class _Generated(tuple[Any, ...]):
    """A namedtuple made without `collections.namedtuple`, which evaluates source text with the names in it."""

    __slots__ = ()
    _fields: tuple[str, ...] = ()

    @classmethod
    def _make(cls, values: Iterable[Any]) -> Any:
        return tuple.__new__(cls, values)

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changes: Any) -> Any:
        return self._make({**self._asdict(), **changes}.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"


def _generated(name: str, fields: tuple[str, ...]) -> Any:
    for number, word in enumerate(fields):
        if not word.isidentifier() or (word.startswith("_") and word != f"_{number}"):  # as rename=True makes them
            raise ValueError("not the name of a field")
    if not name.isidentifier() or len(set(fields)) != len(fields):
        raise ValueError("not a namedtuple")
    members = {word: property(operator.itemgetter(number)) for number, word in enumerate(fields)}
    return type(name, (_Generated,), {"__slots__": (), "_fields": fields, **members})
