"""JSON text as easyckpt writes it, and its strict reader.

One value has one text: compact separators, ASCII only (lone surrogates survive as escapes), no NaN or Infinity
literals, key order as given.
"""

from __future__ import annotations

import json
import math
from itertools import chain
from typing import Any, TypeAlias

from easyckpt.errors import DamagedCheckpoint

Json: TypeAlias = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

#: Deepest nesting that :func:`loads` accepts.
MAX_DEPTH = 200

_CONTAINERS = frozenset({dict, list})
_encoder = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"), check_circular=False)


def dumps(value: Json) -> bytes:
    """Return the canonical text of `value`, which holds only JSON types and finite floats (else ValueError)."""
    return _encoder.encode(value).encode("ascii")


def loads(data: bytes | bytearray | memoryview) -> Json:
    """Parse one JSON document. Raises DamagedCheckpoint for anything but plain, finite, shallow JSON."""
    try:
        text = bytes(data).decode("ascii")
        value: Json = _decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"not a JSON document: {str(error)[:200]}") from None
    if _deeper_than(value, MAX_DEPTH):
        raise DamagedCheckpoint(f"JSON nested deeper than {MAX_DEPTH} levels")
    return value


def _deeper_than(value: Json, limit: int) -> bool:
    """One look at each value: an index may hold hundreds of thousands."""
    level: list[Any] = [value] if type(value) in _CONTAINERS else []
    for _ in range(limit):
        children = chain.from_iterable(
            container.values() if type(container) is dict else container for container in level
        )
        level = [child for child in children if type(child) in _CONTAINERS]
        if not level:
            return False
    return True


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("an object names a key twice")
    return table


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
