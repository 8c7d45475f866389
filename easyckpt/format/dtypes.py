"""The dtypes that the format holds, and what safetensors calls them."""

from __future__ import annotations

import torch

from easyckpt.errors import UnsupportedValue

#: torch dtypes that safetensors has too, with its name for them. All others are written as bytes (U8).
_SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_OTHERS = (
    "complex32", "complex128", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
    *(f"{sign}int{bits}" for bits in range(1, 8) for sign in ("", "u")),
)  # fmt: skip

#: Every dtype of this torch whose tensors are their storage (quantized ones are more), by name.
DTYPES: dict[str, torch.dtype] = {
    name: dtype for name in (*_SAFETENSORS, *_OTHERS) if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
ITEM_BYTES: dict[str, int] = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that the format uses for `dtype`; UnsupportedValue for quantized and unknown ones."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise UnsupportedValue(f"tensors of {dtype} cannot be kept exactly") from None


def storage_dtype(dtype: str) -> str:
    """Return the safetensors name for the torch dtype called `dtype`: U8 where that library has none."""
    return _SAFETENSORS.get(dtype, "U8")
