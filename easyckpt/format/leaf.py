"""One tensor of an image: what it is, where it lies, who writes it; and the table of all of them in a layout.

A layout may have tens of thousands of leaves. Their table is kept by columns, so that it is small, and so that reading
it checks a column at a time instead of building and questioning an object for each leaf.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from easyckpt.errors import DamagedCheckpoint, NewerFormat
from easyckpt.format.canonical import Json, dumps
from easyckpt.format.codec import Path, path_from_json, path_to_json
from easyckpt.format.dtypes import ITEM_BYTES
from easyckpt.format.fields import MAX_NUMBER, Fields

#: What is kept of each leaf. ``global`` is reserved for pieces of sharded tensors (their whole shape and the
#: piece's place in it); in this version every leaf is a whole tensor, and it is null.
COLUMNS = ("path", "dtype", "shape", "order", "device", "replicated", "owner", "offset", "nbytes", "global")

Value = TypeVar("Value")

_DEVICE = re.compile(r"[a-z0-9_]{1,32}")


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One tensor as the state has it."""

    path: Path
    """Where it is in the state."""
    dtype: str
    """Its dtype's name, such as ``float32``."""
    shape: tuple[int, ...]
    """Its shape."""
    order: tuple[int, ...]
    """The permutation of its dimensions in which it is contiguous; ``(0, 1, ...)`` for most."""
    device: str
    """The type of its device, such as ``cuda``."""
    replicated: bool
    """All ranks hold the same bytes, so that one rank writes them."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The contiguous shape in which its bytes lie in the image."""
        return tuple(self.shape[dimension] for dimension in self.order)


@dataclass(frozen=True, slots=True)
class Leaf(LeafSpec):
    """One tensor and its place in the image."""

    owner: int
    """The rank that writes it: this one, or rank 0 for what is replicated."""
    offset: int
    """Where its bytes begin, counted from the start of the image."""
    nbytes: int
    """How many bytes it has."""


def leaves_to_json(leaves: Sequence[Leaf]) -> bytes:
    """The table of `leaves` as JSON text."""
    columns: dict[str, Iterable[Json]] = {
        "path": (path_to_json(leaf.path) for leaf in leaves),
        "dtype": (leaf.dtype for leaf in leaves),
        "shape": (list(leaf.shape) for leaf in leaves),
        "order": (list(leaf.order) for leaf in leaves),
        "device": (leaf.device for leaf in leaves),
        "replicated": (leaf.replicated for leaf in leaves),
        "owner": (leaf.owner for leaf in leaves),
        "offset": (leaf.offset for leaf in leaves),
        "nbytes": (leaf.nbytes for leaf in leaves),
    }
    # Value by value, since one call for a whole column would hold the GIL for long.
    texts = [b"%b:[%b]" % (dumps(name), b",".join(map(dumps, values))) for name, values in columns.items()]
    return b'{%b,"global":null}' % b",".join(texts)


def leaves_from_json(value: Json, rank: int) -> tuple[Leaf, ...]:
    """Read the table of the layout of `rank`; checks everything about each leaf but its place among the others.

    Raises DamagedCheckpoint naming the column, NewerFormat for what only a later version knows.
    """
    table = Fields(value, "layout: leaves")
    if not isinstance(value, dict) or value.keys() != set(COLUMNS) or table.raw("global") is not None:
        raise NewerFormat("layout: its leaves have other columns than this version reads: upgrade easyckpt")
    paths = list(map(path_from_json, table.items("path")))
    dtypes = _column(table, "dtype", str, len(paths))
    if unknown := set(dtypes) - ITEM_BYTES.keys():
        raise NewerFormat(f"layout: a leaf has dtype {min(unknown)[:40]!r}, which this torch does not have")
    shapes, orders = _counts(table, "shape", len(paths)), _counts(table, "order", len(paths))
    devices = _column(table, "device", str, len(paths))
    if not all(map(_DEVICE.fullmatch, set(devices))):
        table.damaged("device", "types of devices")
    shared = _column(table, "replicated", bool, len(paths))
    owners = _column(table, "owner", int, len(paths))
    if any(owner != (0 if replicated else rank) for owner, replicated in zip(owners, shared, strict=True)):
        raise NewerFormat("layout: a leaf was written by another rank than this version would choose: upgrade easyckpt")
    offsets, sizes = _column(table, "offset", int, len(paths)), _column(table, "nbytes", int, len(paths))
    _check_numbers(table, dtypes, shapes, orders, sizes)
    return tuple(map(Leaf, paths, dtypes, shapes, orders, devices, shared, owners, offsets, sizes))


def _column(table: Fields, name: str, kind: type[Value], count: int) -> list[Value]:
    """A column of values of exactly this type."""
    values = table.items(name)
    if len(values) != count or not set(map(type, values)) <= {kind}:
        table.damaged(name, f"{count} values of type {kind.__name__}")
    return values  # type: ignore[return-value]


def _counts(table: Fields, name: str, count: int) -> list[tuple[int, ...]]:
    lists = _column(table, name, list, count)
    if not set(map(type, chain.from_iterable(lists))) <= {int} or min(chain.from_iterable(lists), default=0) < 0:
        table.damaged(name, "lists of whole numbers")
    return list(map(tuple, lists))


def _check_numbers(
    table: Fields,
    dtypes: list[str],
    shapes: list[tuple[int, ...]],
    orders: list[tuple[int, ...]],
    sizes: list[int],
) -> None:
    """Every order is a permutation of its shape's dimensions, every size what shape and dtype say."""
    for order in set(orders):
        if sorted(order) != list(range(len(order))):
            table.damaged("order", "permutations of dimensions")
    if list(map(len, orders)) != list(map(len, shapes)):
        table.damaged("order", "permutations of the dimensions of each shape")
    for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
        if size != _element_count(shape) * ITEM_BYTES[dtype]:
            table.damaged("nbytes", "what shapes and dtypes say")


def _element_count(shape: tuple[int, ...]) -> int:
    """The number of elements, not followed beyond what the format can hold. Raises DamagedCheckpoint."""
    if max(shape, default=0) > MAX_NUMBER:  # of an empty tensor, too: torch could not make it
        raise DamagedCheckpoint("layout: a dimension larger than any memory")
    count = 0 if 0 in shape else 1
    for size in shape:
        count *= size
        if count > MAX_NUMBER:
            raise DamagedCheckpoint("layout: a tensor larger than any memory")
    return count
