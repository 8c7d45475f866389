"""How far two tensors of one dtype are apart, bit by bit and as numbers; exact, and in bounded memory."""

from __future__ import annotations

import math

import torch

#: Below this key a component keeps what no two runs share, such as logs with times of the clock: it is never compared.
ASIDE = "easyckpt.aside"

#: Elements that are looked at as numbers in one go: what is made on the way takes a few megabytes.
_BLOCK = 1 << 17
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_SMALL_INTS = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32}
)  # fmt: skip
_LARGE_INTS = frozenset({torch.int64, torch.uint64})
#: Seen as signed, and with this bit turned, unsigned numbers keep their order and their distances.
_SIGN = -(1 << 63)


def further(one: float | None, other: float | None) -> float | None:
    """The larger of two differences; NaN is larger than all, None (no number's matter) smaller."""
    if one is None or other is None:
        return other if one is None else one
    if math.isnan(one) or math.isnan(other):
        return math.nan
    return max(one, other)


def is_number(dtype: torch.dtype) -> bool:
    """Whether the elements of `dtype` are numbers that can be subtracted (packed and raw ones are not)."""
    known = dtype in _SMALL_INTS or dtype in _LARGE_INTS or dtype in _REAL
    return known or (dtype.is_floating_point and not str(dtype).endswith("_x2"))


def differing_bits(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of each element, whether its bits differ. Both are flat bytes (uint8) of elements of `dtype`."""
    unequal = _bits(one, dtype) != _bits(other, dtype)
    return unequal.any(dim=1) if unequal.dim() == 2 else unequal


def largest_difference(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> tuple[int, float | None]:
    """(elements whose bits differ, largest absolute difference among them) of two equally long flat byte tensors.

    The difference is exact for integers of every size; floats are subtracted in float64, complex numbers by modulus.
    It is 0 where only the sign of a zero differs, NaN where a NaN is on one side or both, and None where `dtype` has
    no numbers or nothing differs.
    """
    if torch.equal(one, other):
        return 0, None
    count, largest = 0, None
    step = _BLOCK * dtype.itemsize
    for begin in range(0, one.numel(), step):
        pair = one[begin : begin + step], other[begin : begin + step]
        if torch.equal(*pair):
            continue
        where = differing_bits(*pair, dtype)
        count += int(where.sum())
        if is_number(dtype):
            here, there = (_bits(side, dtype) for side in pair)
            if not bool(where.all()):  # picking takes longer than subtracting
                here, there = here[where], there[where]
            here, there = here.reshape(-1), there.reshape(-1)
            largest = further(largest, _largest(here, there, dtype))
    return count, largest


def _bits(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 16:
        return data.view(torch.int64).view(-1, 2)
    return data.view(_BITS[dtype.itemsize])


def _largest(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest difference of elements given as integers of their bits (of 16 bytes: two each)."""
    if dtype in _LARGE_INTS:
        if dtype is torch.uint64:
            one, other = one ^ _SIGN, other ^ _SIGN
        # Wraps around: the bits of the exact difference as an unsigned number, whose largest is to be found.
        wrapped = torch.maximum(one, other) - torch.minimum(one, other)
        return int((wrapped ^ _SIGN).max()) - _SIGN
    if dtype in _SMALL_INTS:
        plain = torch.uint8 if dtype is torch.bool else dtype
        return int((one.view(plain).to(torch.int64) - other.view(plain).to(torch.int64)).abs().max())
    real = _REAL.get(dtype)
    if real is not None:
        apart = (one.view(real).to(torch.float64) - other.view(real).to(torch.float64)).view(-1, 2)
        return float(torch.hypot(apart[:, 0], apart[:, 1]).max())
    return float((_as_double(one, dtype) - _as_double(other, dtype)).abs().max())


def _as_double(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = bits.view(dtype)
    return values.to(torch.float64) if dtype.itemsize > 1 else values.to(torch.float32).to(torch.float64)


def element_text(data: torch.Tensor, dtype: torch.dtype) -> str:
    """One element, given by its bytes, for people: so many digits that elements that differ look different."""
    if not is_number(dtype):
        return "0x" + bytes(reversed(data.tolist())).hex()
    if dtype is torch.bool:
        return {0: "False", 1: "True"}.get(int(data[0]), f"0x{int(data[0]):02x}")
    real = _REAL.get(dtype)
    if real is not None:
        parts = data.view(real).to(torch.float64).tolist()
        return f"({_number_text(parts[0], real)}, {_number_text(parts[1], real)}j)"
    if dtype in _LARGE_INTS or dtype in _SMALL_INTS:
        number = int.from_bytes(bytes(data.tolist()), "little", signed=str(dtype).startswith("torch.int"))
        return str(number)
    return _number_text(float(_as_double(_bits(data, dtype), dtype)[0]), dtype)


def _number_text(value: float, dtype: torch.dtype) -> str:
    return "NaN" if math.isnan(value) else f"{value:.{17 if dtype is torch.float64 else 9}g}"
