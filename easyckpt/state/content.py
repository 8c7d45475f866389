"""Digests of live values: equal for equal content, in another process too."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash


def content_digest(value: Any) -> str:
    """Of tensors and arrays their form and bytes, of containers what is in them, of plain values the values.

    Of anything else only the class: what it prints may hold an address.
    """
    digest = xxhash.xxh3_128()
    _feed(digest, value)
    return digest.hexdigest()


def digest_of(value: Any) -> str:
    """The same, where no value of the user's may be an error."""
    try:
        return content_digest(value)
    except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
        return f"not digestible: {type(error).__name__}"


def _feed(digest: xxhash.xxh3_128, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        _feed_tensor(digest, value.detach())
    elif isinstance(value, (np.ndarray, np.generic)):
        digest.update(f"array {value.dtype.str} {value.shape};".encode())
        if value.dtype.hasobject:
            _feed(digest, value.tolist())  # its bytes are addresses
        else:
            digest.update(np.ascontiguousarray(value).tobytes())
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for key, item in value.items():
            _feed(digest, key)
            _feed(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"sequence {len(value)};".encode())
        for item in value:
            _feed(digest, item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _feed(digest, [getattr(value, field.name) for field in dataclasses.fields(value)])
    else:
        digest.update(f"object {type(value).__module__}.{type(value).__qualname__};".encode())


def _feed_tensor(digest: xxhash.xxh3_128, tensor: torch.Tensor) -> None:
    digest.update(f"tensor {tensor.dtype} {tuple(tensor.shape)} {tensor.layout};".encode())
    if tensor.layout is not torch.strided or tensor.is_meta:
        return
    flat = tensor.cpu().contiguous()
    if flat.nbytes:  # through memory: NumPy lacks some types
        digest.update((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))
