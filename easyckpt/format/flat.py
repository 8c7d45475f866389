"""An encoded value as a flat list of places: what tensor, or what other value, is where. Nothing is built from it.

Classes of the user's (enums, codecs) are not needed, so that every checkpoint can be looked into anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from easyckpt.errors import EasyckptError
from easyckpt.format import codec
from easyckpt.format.canonical import Json, dumps
from easyckpt.format.codec import Path, path_key

_LISTS = frozenset({"tuple", "slice", "deque", "namedtuple"})
_PAIRS = frozenset({"dict", "ordereddict", "defaultdict", "counter"})
_SETS = frozenset({"set", "frozenset"})
_ENCODED = "<encoded>"
_LONGEST = 60


class TensorRef(NamedTuple):
    """A tensor stands here."""

    number: int


class Container(NamedTuple):
    """Something that holds what follows below its place; `kind` says all that is not told by that."""

    kind: str


class Plain(NamedTuple):
    """A value without tensors below it, as the codec wrote it."""

    json: Json

    @property
    def number(self) -> float | None:
        """Its value, where it is a number."""
        value = self.json
        if type(value) is dict and value.get("$") in ("int", "float"):
            value = codec.decode(value, _no_tensor)
        return value if type(value) is int or type(value) is float else None

    def __str__(self) -> str:
        """A short text for people."""
        try:
            text = repr(codec.decode(self.json, _no_tensor))
        except (EasyckptError, ValueError):
            text = dumps(self.json).decode("ascii")
        text = " ".join(text.split())
        return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


Item: TypeAlias = TensorRef | Container | Plain


def _no_tensor(number: int) -> Any:
    raise LookupError(number)


def flatten(json: Json, path: Path) -> Iterator[tuple[Path, Item]]:
    """Yield (place, what is there) for `json`, which the codec wrote, at `path`; containers before what they hold.

    Sets are one value each: they have no order that means anything.
    """
    if type(json) is list:
        yield path, Container("list")
        yield from _all(enumerate(json), path)
    elif type(json) is not dict:
        yield path, Plain(json)
    elif "$" not in json:
        yield path, Container("dict")
        yield from _all(json.items(), path)
    else:
        yield from _tagged(str(json["$"]), json, path)


def _tagged(tag: str, json: dict[str, Json], path: Path) -> Iterator[tuple[Path, Item]]:
    inner = json.get("v")
    if tag == "tensor" and type(inner) is int:
        yield path, TensorRef(inner)
    elif tag in _SETS and type(inner) is list:
        yield path, Plain({**json, "v": sorted(inner, key=dumps)})
    elif tag in _LISTS and type(inner) is list:
        yield path, Container(_kind(tag, json))
        names = json.get("fields")
        keys = names if tag == "namedtuple" and type(names) is list and len(names) == len(inner) else range(len(inner))
        yield from _all(zip(keys, inner, strict=True), path)
    elif tag in _PAIRS and type(json.get("items")) is list:
        yield path, Container(_kind(tag, json))
        yield from _all(_pairs(json["items"]), path)
        if "metadata" in json:
            yield from flatten(json["metadata"], (*path, "_metadata"))
    elif tag in ("namespace", "codec"):
        yield path, Container(_kind(tag, json))
        # What a codec has made of a value has a place of its own: which codec it was must not be hidden by it.
        yield from flatten(inner, (*path, _ENCODED)) if tag == "codec" else _inside(inner, path)
    else:
        yield path, Plain(json)


def _kind(tag: str, json: dict[str, Json]) -> str:
    """The tag with what else the object says about itself: a deque's length, a factory, a class."""
    more = [f"{key}={value}" for key, value in json.items() if key not in ("$", "v", "items", "metadata", "fields")]
    return " ".join([tag, *more])


def _pairs(items: Json) -> Iterator[tuple[Any, Json]]:
    for pair in items if type(items) is list else ():
        if type(pair) is list and len(pair) == 2:
            yield path_key_of(pair[0]), pair[1]


def path_key_of(json: Json) -> Any:
    """What stands for a dict's key in a path."""
    if type(json) is not dict and type(json) is not list:
        return json
    try:
        return path_key(codec.decode(json, _no_tensor), json)
    except EasyckptError:  # an enum, or a codec of the user's
        return dumps(json).decode("ascii")


def _inside(json: Json, path: Path) -> Iterator[tuple[Path, Item]]:
    """What a container holds that is written as a dict."""
    found = flatten(json, path)
    next(found, None)
    yield from found


def _all(children: Any, path: Path) -> Iterator[tuple[Path, Item]]:
    for key, child in children:
        yield from flatten(child, (*path, key))
