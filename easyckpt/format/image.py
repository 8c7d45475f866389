"""How the tensors of one rank lie in one flat image of bytes.

``image = [own group][gap][replicated group]``: what this rank writes comes first. Inside a group leaves are sorted by
descending item size, so all are aligned without gaps. A shard file is a safetensors header, padded with spaces to a
multiple of 4096 bytes, and a prefix of the image exactly as it stands in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

import xxhash

from easyckpt.errors import DamagedCheckpoint, NewerFormat, UnsupportedValue
from easyckpt.format.canonical import Json, dumps, loads
from easyckpt.format.codec import path_text
from easyckpt.format.dtypes import DTYPES, ITEM_BYTES, dtype_name, storage_dtype
from easyckpt.format.fields import Fields
from easyckpt.format.leaf import Leaf, LeafSpec, leaves_from_json, leaves_to_json

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


def align(size: int) -> int:
    """Round `size` up to a multiple of 4096."""
    return -(-size // ALIGNMENT) * ALIGNMENT


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
        rank = fields.number("rank", high=world_size - 1)
        layout = cls(
            leaves=leaves_from_json(fields.raw("leaves"), rank),
            own_bytes=fields.number("own_bytes"),
            image_bytes=fields.number("image_bytes"),
            trees=fields.raw("trees"),
            rank=rank,
            world_size=world_size,
        )
        _check_places(layout)
        return layout


def _encode(layout: Layout) -> bytes:
    head: Json = {
        "format": LAYOUT_FORMAT,
        "rank": layout.rank,
        "world_size": layout.world_size,
        "own_bytes": layout.own_bytes,
        "image_bytes": layout.image_bytes,
    }
    return b'%b,"leaves":%b,"trees":%b}' % (dumps(head)[:-1], leaves_to_json(layout.leaves), dumps(layout.trees))


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
    everywhere = [spec.replicated and world_size > 1 for spec in ordered]
    sizes = [math.prod(spec.shape) * ITEM_BYTES[spec.dtype] for spec in ordered]
    offsets = [0] * len(ordered)

    def place(numbers: list[int], position: int) -> int:
        for number in sorted(numbers, key=lambda number: -ITEM_BYTES[ordered[number].dtype]):
            offsets[number] = position
            position += sizes[number]
        return position

    replicated = [number for number, shared in enumerate(everywhere) if shared]
    own_bytes = place([number for number, shared in enumerate(everywhere) if not shared], 0)
    image_bytes = place(replicated, align(own_bytes)) if replicated else own_bytes
    leaves = tuple(
        Leaf(spec.path, spec.dtype, spec.shape, spec.order, spec.device, shared, 0 if shared else rank, offset, nbytes)
        for spec, shared, offset, nbytes in zip(ordered, everywhere, offsets, sizes, strict=True)
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
