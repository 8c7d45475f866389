"""Values without children that JSON has no exact form for: how each is written and read back.

A leaf is ``{"$": tag, "v": payload}``. Readers get a payload that may be anything; whatever one of them raises from
`MALFORMED` becomes DamagedCheckpoint. They build values of the standard library, numpy and torch only.
"""

from __future__ import annotations

import base64
import datetime
import math
import pathlib
import re
import struct
from collections.abc import Callable
from typing import Any

import torch

from easyckpt.format.canonical import Json

try:
    from easyckpt.format import codec_numpy
except ImportError:  # numpy is optional, for torch too
    codec_numpy = None  # type: ignore[assignment]

#: What a reader may raise for a payload that is not its own.
MALFORMED = (ValueError, TypeError, OverflowError, LookupError, RuntimeError, MemoryError, AttributeError)

#: Longer ints are written in hexadecimal: reading them as decimal is slow, and Python may be told to refuse it.
_PLAIN_INT_BITS = 2000

_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_HEX_INT = re.compile(r"-?[0-9a-f]+")
_FLOAT_BITS = re.compile(r"[0-9a-f]{16}")
_DEVICE = re.compile(r"[a-z0-9_]{1,32}(?::(?:0|[1-9][0-9]{0,2}))?")
_NAMED_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_DTYPES = {str(dtype)[6:]: dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}


def expect(value: Any, kind: type) -> Any:
    """Return `value`, whose type must be exactly `kind`, else TypeError."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def is_plain_text(value: str) -> bool:
    """Does JSON keep this string? A high surrogate before a low one would come back as one character."""
    return value.isascii() or _SURROGATE_PAIR.search(value) is None


def encode_int(value: int) -> Json:
    """Return a JSON number, or a tagged one where the int is very long."""
    if value.bit_length() <= _PLAIN_INT_BITS:
        return value
    return {"$": "int", "v": f"{value:x}"}


def encode_float(value: float) -> Json:
    """Return a JSON number, or a tagged one for NaN (all of its bits) and the infinities."""
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    name = next((name for name, other in _NAMED_FLOATS.items() if struct.pack(">d", other) == bits), bits.hex())
    return {"$": "float", "v": name}


def encode_str(value: str) -> Json:
    """Return a JSON string, or a tagged one where JSON would change it."""
    if is_plain_text(value):
        return value
    return {"$": "str", "v": encode_bytes(value.encode("utf-8", "surrogatepass"))}


def encode_bytes(value: bytes | bytearray) -> str:
    """Return base64."""
    return base64.b64encode(value).decode("ascii")


def decode_bytes(payload: Json) -> bytes:
    """Read base64."""
    return base64.b64decode(expect(payload, str), validate=True)


def _read_int(payload: Json) -> int:
    if _HEX_INT.fullmatch(expect(payload, str)) is None:
        raise ValueError("not a hexadecimal number")
    return int(str(payload), 16)


def _read_float(payload: Json) -> float:
    text = expect(payload, str)
    if text in _NAMED_FLOATS:
        return _NAMED_FLOATS[text]
    if _FLOAT_BITS.fullmatch(text) is None:
        raise ValueError("not a float")
    value: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return value


def _any_int(payload: Json) -> int:
    if type(payload) is dict and payload.get("$") == "int":
        return _read_int(payload["v"])
    value: int = expect(payload, int)
    return value


def _any_float(payload: Json) -> float:
    if type(payload) is dict and payload.get("$") == "float":
        return _read_float(payload["v"])
    value: float = expect(payload, float)
    return value


def _read_complex(payload: Json) -> complex:
    real, imaginary = expect(payload, list)
    return complex(_any_float(real), _any_float(imaginary))


def _read_range(payload: Json) -> range:
    start, stop, step = expect(payload, list)
    return range(_any_int(start), _any_int(stop), _any_int(step))


def _encode_size(value: torch.Size) -> Json:
    return [int(size) for size in value]


def _read_size(payload: Json) -> torch.Size:
    return torch.Size([_any_int(size) for size in expect(payload, list)])


def _read_device(payload: Json) -> torch.device:
    if _DEVICE.fullmatch(expect(payload, str)) is None:
        raise ValueError("not a device")
    return torch.device(str(payload))


def _encode_zone(zone: datetime.tzinfo | None) -> Json:
    if zone is None:
        return None
    if type(zone) is not datetime.timezone:
        raise TypeError(f"its time zone is a {type(zone).__name__}; only datetime.timezone is kept")
    offset = zone.utcoffset(None)
    name = zone.tzname(None)
    named = datetime.timezone(offset).tzname(None) != name
    return [_encode_timedelta(offset), encode_str(name) if named else None]


def _read_zone(payload: Json) -> datetime.timezone | None:
    if payload is None:
        return None
    offset, name = expect(payload, list)
    if name is None:
        return datetime.timezone(_read_timedelta(offset))
    return datetime.timezone(_read_timedelta(offset), _any_str(name))


def _any_str(payload: Json) -> str:
    if type(payload) is dict and payload.get("$") == "str":
        return _read_str(payload["v"])
    value: str = expect(payload, str)
    return value


def _read_str(payload: Json) -> str:
    return decode_bytes(payload).decode("utf-8", "surrogatepass")


def _encode_datetime(value: datetime.datetime) -> Json:
    parts: list[Json] = [value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond]
    return [*parts, value.fold, _encode_zone(value.tzinfo)]


def _read_datetime(payload: Json) -> datetime.datetime:
    *parts, fold, zone = expect(payload, list)
    year, month, day, hour, minute, second, microsecond = (expect(part, int) for part in parts)
    return datetime.datetime(
        year, month, day, hour, minute, second, microsecond, _read_zone(zone), fold=expect(fold, int)
    )


def _encode_time(value: datetime.time) -> Json:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, _encode_zone(value.tzinfo)]


def _read_time(payload: Json) -> datetime.time:
    *parts, fold, zone = expect(payload, list)
    hour, minute, second, microsecond = (expect(part, int) for part in parts)
    return datetime.time(hour, minute, second, microsecond, _read_zone(zone), fold=expect(fold, int))


def _read_date(payload: Json) -> datetime.date:
    year, month, day = (expect(part, int) for part in expect(payload, list))
    return datetime.date(year, month, day)


def _encode_timedelta(value: datetime.timedelta) -> Json:
    return [value.days, value.seconds, value.microseconds]


def _read_timedelta(payload: Json) -> datetime.timedelta:
    days, seconds, microseconds = (expect(part, int) for part in expect(payload, list))
    return datetime.timedelta(days, seconds, microseconds)


_PATHS: dict[str, type[pathlib.PurePath]] = {
    kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))
}
# A concrete path of the other system becomes a pure one: the concrete class cannot be made here.
_FOREIGN_PATHS = {"PosixPath": pathlib.PurePosixPath, "WindowsPath": pathlib.PureWindowsPath}


def _encode_path(value: pathlib.PurePath) -> Json:
    return [type(value).__name__, encode_str(str(value))]


def _read_path(payload: Json) -> pathlib.PurePath:
    kind, text = expect(payload, list)
    name = expect(kind, str)
    return (_PATHS[name] if name in _PATHS else _FOREIGN_PATHS[name])(_any_str(text))


#: Writers by exact type: the tag, and what makes the payload (TypeError: this one cannot be kept, and why).
WRITERS: dict[type, tuple[str, Callable[[Any], Json]]] = {
    complex: ("complex", lambda value: [encode_float(value.real), encode_float(value.imag)]),
    bytes: ("bytes", encode_bytes),
    bytearray: ("bytearray", encode_bytes),
    range: ("range", lambda value: [encode_int(value.start), encode_int(value.stop), encode_int(value.step)]),
    torch.Size: ("size", _encode_size),
    torch.dtype: ("dtype", lambda value: str(value)[6:]),
    torch.device: ("device", str),
    datetime.datetime: ("datetime", _encode_datetime),
    datetime.date: ("date", lambda value: [value.year, value.month, value.day]),
    datetime.time: ("time", _encode_time),
    datetime.timedelta: ("timedelta", _encode_timedelta),
    **dict.fromkeys(_PATHS.values(), ("path", _encode_path)),
}

#: Readers by tag.
READERS: dict[str, Callable[[Json], Any]] = {
    "int": _read_int,
    "float": _read_float,
    "str": _read_str,
    "complex": _read_complex,
    "bytes": decode_bytes,
    "bytearray": lambda payload: bytearray(decode_bytes(payload)),
    "range": _read_range,
    "size": _read_size,
    "dtype": lambda payload: _DTYPES[expect(payload, str)],
    "device": _read_device,
    "datetime": _read_datetime,
    "date": _read_date,
    "time": _read_time,
    "timedelta": _read_timedelta,
    "path": _read_path,
}

if codec_numpy is not None:
    WRITERS.update(codec_numpy.WRITERS)
    READERS.update(codec_numpy.READERS)
