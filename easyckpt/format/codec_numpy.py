"""numpy scalars and arrays in the codec: raw bytes with the dtype's own spelling, no objects."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from easyckpt.format.canonical import Json

# Exactly what `dtype.str` gives for bool, ints, floats, complex, bytes, text and times: never a dtype expression.
_DTYPE = re.compile(r"[<>|](?:[biufcSU][1-9][0-9]{0,8}|[mM]8(?:\[(?:[1-9][0-9]{0,8})?[a-zA-Zμ]{1,2}\])?)")
_LARGEST_CODE_POINT = 0x10FFFF


def _dtype_text(dtype: np.dtype[Any]) -> str:
    if _DTYPE.fullmatch(dtype.str) is None:
        raise TypeError(f"numpy values of dtype {dtype} cannot be kept")
    return dtype.str


def _read_dtype(payload: Json) -> np.dtype[Any]:
    if not isinstance(payload, str) or _DTYPE.fullmatch(payload) is None:
        raise ValueError("not a numpy dtype")
    dtype = np.dtype(payload)
    if dtype.str != payload:
        raise ValueError("not the canonical spelling of a numpy dtype")
    return dtype


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(payload: Json) -> bytes:
    if not isinstance(payload, str):
        raise TypeError("expected base64")
    return base64.b64decode(payload, validate=True)


def _encode_array(value: np.ndarray[Any, Any]) -> Json:
    dtype = _dtype_text(value.dtype)
    fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    order = "F" if fortran else "C"
    return [dtype, list(value.shape), order, _text(value.tobytes(order=order))]  # type: ignore[arg-type]


def _read_array(payload: Json) -> np.ndarray[Any, Any]:
    if not isinstance(payload, list):
        raise TypeError("expected a list")
    text, shape, order, data = payload
    if order not in ("C", "F") or not isinstance(shape, list) or len(shape) > 32:
        raise ValueError("not an array")
    sizes = [size for size in shape if type(size) is int and size >= 0]
    if len(sizes) != len(shape):
        raise ValueError("not a shape")
    dtype, content = _read_dtype(text), _bytes(data)
    if math.prod(sizes) * dtype.itemsize != len(content):
        raise ValueError("not as many bytes as shape and dtype say")
    _check_content(dtype, content)
    array: np.ndarray[Any, Any] = np.ndarray(
        tuple(sizes), dtype, bytearray(content), order="F" if order == "F" else "C"
    )
    return array  # over a bytearray: writable


def _check_content(dtype: np.dtype[Any], content: bytes) -> None:
    """Refuse bytes that numpy takes, and that break later: bools of 7, characters beyond Unicode."""
    if dtype.kind == "b" and content.translate(None, b"\0\1"):
        raise ValueError("a bool that is neither true nor false")
    if dtype.kind == "U" and content and int(np.frombuffer(content, f"{dtype.str[0]}u4").max()) > _LARGEST_CODE_POINT:
        raise ValueError("a character beyond Unicode")


def _encode_scalar(value: np.generic[Any]) -> Json:
    if type(value) is not value.dtype.type:
        raise TypeError(f"{type(value).__name__} is not one of numpy's own scalar types")
    return [_dtype_text(value.dtype), _text(value.tobytes())]


def _read_scalar(payload: Json) -> Any:
    if not isinstance(payload, list):
        raise TypeError("expected a list")
    text, data = payload
    dtype, content = _read_dtype(text), _bytes(data)
    if dtype.itemsize != len(content) or dtype.kind in "SU":
        raise ValueError("not a scalar")
    _check_content(dtype, content)
    return np.frombuffer(content, dtype)[0]


# Text and bytes go by content: an array would drop trailing zeros and has no form for an empty one.


def _encode_text_scalar(value: np.str_) -> Json:
    return _text(value.encode("utf-8", "surrogatepass"))  # str() would drop trailing zeros


def _read_text_scalar(payload: Json) -> Any:
    return np.str_(_bytes(payload).decode("utf-8", "surrogatepass"))


def _encode_bytes_scalar(value: np.bytes_) -> Json:
    return _text(bytes(value))


def _read_bytes_scalar(payload: Json) -> Any:
    return np.bytes_(_bytes(payload))


_SCALARS: set[type] = {
    scalar for scalar in np.sctypeDict.values() if np.dtype(scalar).kind in "biufcmM" and np.dtype(scalar).itemsize
}

#: Writers by exact type, as in :mod:`easyckpt.format.codec_leaves`.
WRITERS: dict[type, tuple[str, Callable[[Any], Json]]] = {
    np.ndarray: ("ndarray", _encode_array),
    np.str_: ("numpy.str", _encode_text_scalar),
    np.bytes_: ("numpy.bytes", _encode_bytes_scalar),
    **dict.fromkeys(_SCALARS, ("numpy", _encode_scalar)),
}

#: Readers by tag.
READERS: dict[str, Callable[[Json], Any]] = {
    "ndarray": _read_array,
    "numpy.str": _read_text_scalar,
    "numpy.bytes": _read_bytes_scalar,
    "numpy": _read_scalar,
}
