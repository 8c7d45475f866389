"""How the tensors of one rank lie in one flat image of bytes.

``image = [own group][gap][replicated group]``: what this rank writes comes first. Inside a group leaves are sorted by
descending item size, so all are aligned without gaps. A shard file is a safetensors header, padded with spaces to a
multiple of 4096 bytes, and a prefix of the image exactly as it stands in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

import xxhash

from easyckpt.errors import DamagedCheckpoint, NewerFormat, UnsupportedValue
from easyckpt.format.canonical import Json, dumps, loads
from easyckpt.format.codec import Path, path_from_json, path_text, path_to_json
from easyckpt.format.dtypes import DTYPES, ITEM_BYTES, dtype_name, storage_dtype
from easyckpt.format.fields import MAX_NUMBER, Fields

__all__ = [
    "ALIGNMENT", "DTYPES", "ITEM_BYTES", "PADDING_KEY", "Layout", "Leaf", "LeafSpec", "align", "dtype_name",
    "plan_layout", "shard_header", "shard_keys", "storage_dtype", "written_bytes",
]  # fmt: skip

#: Groups, and the image in a shard file, begin at multiples of this.
ALIGNMENT = 4096
LAYOUT_FORMAT = 1
PADDING_KEY = "easyckpt.padding"

#: The safetensors library refuses a longer header.
MAX_HEADER_BYTES = 100_000_000

_DEVICE = re.compile(r"[a-z0-9_]{1,32}")


def align(size: int) -> int:
    """Round `size` up to a multiple of 4096."""
    return -(-size // ALIGNMENT) * ALIGNMENT


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

    offset: int
    """Where its bytes begin, counted from the start of the image."""
    nbytes: int
    """How many bytes it has."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The image of one rank and the trees that say what each leaf is. Fixed as long as the state keeps its form."""

    leaves: tuple[Leaf, ...]
    """All tensors, by leaf number."""
    own_bytes: int
    """End of the group that this rank always writes."""
    image_bytes: int
    """End of the last group."""
    trees: Json
    """The static trees, by component."""
    rank: int
    world_size: int
    _encoded: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)
    _digest: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    _headers: dict[bool, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def replicated_offset(self) -> int:
        """Where the replicated group begins (the end of the image if there is none)."""
        return align(self.own_bytes) if self.image_bytes > self.own_bytes else self.own_bytes

    @property
    def encoded(self) -> bytes:
        """The layout as JSON text, made once."""
        if not self._encoded:
            self._encoded.append(_encode(self))
        return self._encoded[0]

    @property
    def digest(self) -> str:
        """xxh3_128 of :attr:`encoded`, 32 hex digits, made once."""
        if not self._digest:
            self._digest.append(xxhash.xxh3_128_hexdigest(self.encoded))
        return self._digest[0]

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """Read what :attr:`encoded` gave. Raises DamagedCheckpoint or NewerFormat."""
        return cls.from_json(loads(data))

    @classmethod
    def from_json(cls, value: Json) -> Layout:
        """As :meth:`from_bytes`, from parsed JSON; checks everything."""
        fields = Fields(value, "layout")
        if fields.number("format") != LAYOUT_FORMAT:
            raise NewerFormat(f"layout of format {fields.number('format')}; this version reads {LAYOUT_FORMAT}")
        world_size = fields.number("world_size", low=1)
        layout = cls(
            leaves=tuple(_leaf(item, number) for number, item in enumerate(fields.items("leaves"))),
            own_bytes=fields.number("own_bytes"),
            image_bytes=fields.number("image_bytes"),
            trees=fields.raw("trees"),
            rank=fields.number("rank", high=world_size - 1),
            world_size=world_size,
        )
        _check_places(layout)
        return layout


def _encode(layout: Layout) -> bytes:
    # Piece by piece, since one call for 20,000 leaves would hold the GIL for tens of milliseconds.
    head: Json = {
        "format": LAYOUT_FORMAT,
        "rank": layout.rank,
        "world_size": layout.world_size,
        "own_bytes": layout.own_bytes,
        "image_bytes": layout.image_bytes,
    }
    leaves = b",".join(dumps(_leaf_to_json(leaf)) for leaf in layout.leaves)
    return b'%b,"leaves":[%b],"trees":%b}' % (dumps(head)[:-1], leaves, dumps(layout.trees))


def _leaf_to_json(leaf: Leaf) -> Json:
    return {
        "path": path_to_json(leaf.path),
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "order": list(leaf.order),
        "device": leaf.device,
        "replicated": leaf.replicated,
        "offset": leaf.offset,
        "nbytes": leaf.nbytes,
    }


def _leaf(value: Json, number: int) -> Leaf:
    fields = Fields(value, f"layout: leaf {number}")
    dtype = fields.text("dtype")
    if dtype not in DTYPES:
        raise NewerFormat(f"layout: leaf {number} has dtype {dtype[:40]!r}, which this torch does not have")
    shape, order = fields.numbers("shape"), fields.numbers("order")
    if sorted(order) != list(range(len(shape))):
        fields.damaged("order", "a permutation of the dimensions")
    nbytes = fields.number("nbytes")
    if nbytes != _product(shape) * ITEM_BYTES[dtype]:
        fields.damaged("nbytes", "what shape and dtype say")
    return Leaf(
        path=path_from_json(fields.raw("path")),
        dtype=dtype,
        shape=shape,
        order=order,
        device=fields.text("device", _DEVICE),
        replicated=fields.flag("replicated"),
        offset=fields.number("offset"),
        nbytes=nbytes,
    )


def _product(shape: tuple[int, ...]) -> int:
    """The number of elements, not followed beyond what the format can hold."""
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count > MAX_NUMBER:
            raise DamagedCheckpoint("layout: a tensor larger than any memory")
    return count


def _check_places(layout: Layout) -> None:
    """Every leaf lies in its group, aligned; leaves cover their group without overlap or hole."""
    own = sorted((leaf for leaf in layout.leaves if not leaf.replicated), key=attrgetter("offset", "nbytes"))
    replicated = sorted((leaf for leaf in layout.leaves if leaf.replicated), key=attrgetter("offset", "nbytes"))
    second = align(layout.own_bytes) if replicated else layout.own_bytes
    for group, begin, end in ((own, 0, layout.own_bytes), (replicated, second, layout.image_bytes)):
        position = begin
        for leaf in group:
            if leaf.offset != position or leaf.offset % ITEM_BYTES[leaf.dtype]:
                raise DamagedCheckpoint(f"layout: {path_text(leaf.path)[:200]} is not where it should be in the image")
            position += leaf.nbytes
        if position != end:
            raise DamagedCheckpoint("layout: the leaves do not fill their group")


def plan_layout(specs: Iterable[LeafSpec], trees: Json, rank: int, world_size: int) -> Layout:
    """Give every leaf its place. With one rank everything is its own."""
    ordered = tuple(specs)
    alone = world_size == 1
    sizes = [math.prod(spec.shape) * ITEM_BYTES[spec.dtype] for spec in ordered]
    offsets = [0] * len(ordered)

    def place(numbers: list[int], position: int) -> int:
        for number in sorted(numbers, key=lambda number: -ITEM_BYTES[ordered[number].dtype]):
            offsets[number] = position
            position += sizes[number]
        return position

    replicated = [number for number, spec in enumerate(ordered) if spec.replicated and not alone]
    own_bytes = place([number for number, spec in enumerate(ordered) if alone or not spec.replicated], 0)
    image_bytes = place(replicated, align(own_bytes)) if replicated else own_bytes
    leaves = tuple(
        Leaf(spec.path, spec.dtype, spec.shape, spec.order, spec.device, spec.replicated and not alone, offset, nbytes)
        for spec, offset, nbytes in zip(ordered, offsets, sizes, strict=True)
    )
    return Layout(leaves, own_bytes, image_bytes, trees, rank, world_size)


def written_bytes(layout: Layout, write_replicated: bool) -> int:
    """Return how much of the image, from its start, goes into the shard file."""
    return layout.image_bytes if write_replicated else layout.own_bytes


def shard_keys(layout: Layout) -> tuple[str, ...]:
    """Return each leaf's key in a shard: its path joined by ".", ``#n`` appended on a clash."""
    taken = {"__metadata__", PADDING_KEY}
    keys = []
    for leaf in layout.leaves:
        text = key = path_text(leaf.path)
        count = 0
        while key in taken:
            count += 1
            key = f"{text}#{count}"
        taken.add(key)
        keys.append(key)
    return tuple(keys)


def shard_header(layout: Layout, write_replicated: bool) -> bytes:
    """Return the safetensors header of a shard: length and JSON, padded so that the image begins on a 4096 boundary.

    The shard file is this header and then the first :func:`written_bytes` of the image. Made once per layout.
    """
    if write_replicated not in layout._headers:
        layout._headers[write_replicated] = _header(layout, write_replicated)
    return layout._headers[write_replicated]


def _header(layout: Layout, write_replicated: bool) -> bytes:
    entries = [
        (leaf.offset, leaf.nbytes, key, storage_dtype(leaf.dtype), _shard_shape(leaf))
        for leaf, key in zip(layout.leaves, shard_keys(layout), strict=True)
        if write_replicated or not leaf.replicated
    ]
    gap = layout.replicated_offset - layout.own_bytes
    if write_replicated and gap:  # safetensors refuses holes
        entries.append((layout.own_bytes, gap, PADDING_KEY, "U8", [gap]))
    entries.sort()
    pieces = [b'{"__metadata__":{"format":"pt","easyckpt":"1"}']
    for offset, nbytes, key, dtype, shape in entries:
        entry: Json = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        pieces.append(b"%b:%b" % (dumps(key), dumps(entry)))
    text = b",".join(pieces) + b"}"
    padded = align(8 + len(text)) - 8
    if padded > MAX_HEADER_BYTES:
        raise UnsupportedValue(
            f"{len(entries)} tensors need a header of {padded} bytes; safetensors allows {MAX_HEADER_BYTES}"
        )
    return padded.to_bytes(8, "little") + text.ljust(padded, b" ")


def _shard_shape(leaf: Leaf) -> list[int]:
    shape = list(leaf.stored_shape)
    if storage_dtype(leaf.dtype) == "U8" and leaf.dtype != "uint8":
        item = ITEM_BYTES[leaf.dtype]
        if shape:
            shape[-1] *= item
        elif item > 1:
            shape = [item]
    return shape
