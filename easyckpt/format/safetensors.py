"""Headers of safetensors files, read without trust and written with the data on a page boundary."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from easyckpt.errors import ForeignFormat, UnsupportedValue
from easyckpt.format.canonical import Json, dumps
from easyckpt.format.dtypes import DTYPES, ITEM_BYTES, storage_dtype
from easyckpt.format.image import MAX_HEADER_BYTES, align

#: The torch dtype of each safetensors dtype.
_NAMES = {storage_dtype(name): name for name in reversed(DTYPES) if storage_dtype(name) != "U8" or name == "uint8"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    key: str
    dtype: str
    """As torch calls it."""
    shape: tuple[int, ...]
    begin: int
    """Where its bytes are, counted from the end of the header."""
    end: int


def header_size(first: bytes, size: int) -> int:
    """How long the header of a file of `size` bytes is, with the 8 bytes in `first`. Raises ForeignFormat."""
    length = int.from_bytes(first, "little")
    if len(first) != 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ForeignFormat("not a safetensors file: its first 8 bytes give no length of a header")
    return 8 + length


def parse_header(text: bytes, size: int) -> list[Entry]:
    """The tensors that the header's JSON `text` tells of, in the order of the file, all within `size` bytes of data.

    Raises ForeignFormat for whatever the safetensors library would refuse.
    """
    try:
        table = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ForeignFormat(f"not a safetensors file: its header is no JSON: {error}") from None
    if type(table) is not dict:
        raise ForeignFormat("not a safetensors file: its header is no JSON object")
    entries = [_entry(key, value) for key, value in table.items() if key != "__metadata__"]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = 0
    for entry in entries:
        if entry.begin != position or entry.end - position != math.prod(entry.shape) * ITEM_BYTES[entry.dtype]:
            raise ForeignFormat(f"not a safetensors file: {entry.key[:100]!r} does not lie where it should")
        position = entry.end
    if position != size:
        raise ForeignFormat(f"not a safetensors file: its tensors have {position} bytes, the file has {size} for them")
    return entries


def _entry(key: str, value: Json) -> Entry:
    try:
        assert isinstance(value, dict)
        shape, offsets, dtype = value["shape"], value["data_offsets"], value["dtype"]
        assert isinstance(shape, list)
        assert isinstance(offsets, list)
        begin, end = offsets
        numbers = [number for number in (*shape, begin, end) if type(number) is int and number >= 0]
        assert len(numbers) == len(shape) + 2
        return Entry(key, _NAMES[str(dtype)], tuple(numbers[:-2]), numbers[-2], numbers[-1])
    except (AssertionError, KeyError, ValueError):
        raise ForeignFormat(f"the header's entry for {key[:100]!r} is not one that this version can read") from None


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file whose data are `tensors` (key, dtype, shape), one after the other without gaps.

    Raises UnsupportedValue for a dtype that safetensors has not, and for more names than a header can hold.
    """
    table: dict[str, Json] = {"__metadata__": dict(metadata)}
    position = 0
    for key, dtype, shape in tensors:
        if dtype not in _NAMES.values():
            raise UnsupportedValue(f"{key[:200]}: safetensors has no {dtype}; a .pth file holds it")
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        table[key] = {"dtype": storage_dtype(dtype), "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = dumps(table)
    padded = align(8 + len(text)) - 8
    if padded > MAX_HEADER_BYTES:
        raise UnsupportedValue(f"{len(table)} tensors need a header of {padded} bytes; safetensors allows fewer")
    return padded.to_bytes(8, "little") + text.ljust(padded, b" ")
