"""The first page of a slot: what it holds, and whether to believe it.

::

    0   magic, 8 bytes          16  word, 8 bytes: sequence (low half), state (high half)
    8   version, 4 bytes        24  image capacity, 8 bytes
    12  payload length, 4 bytes 32  digest of the page (xxh3_128, itself counted as zeros), 16 bytes
    48  payload: JSON, then zeros to 4096

The word is one aligned store. The sequence is odd while anything behind it changes; only a page that says SEALED is
verified and believed, and its digest covers every byte of the page. Static and object bytes have digests of their own
in the payload: the static ones are hashed only when they change.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import xxhash

from easyckpt.errors import DamagedCheckpoint, ForeignFormat, NewerFormat, UsageError
from easyckpt.memory.mapping import PAGE

MAGIC = b"ezckslot"
VERSION = 1
HEADER_BYTES = PAGE
WORD_OFFSET = 16
BODY_OFFSET = 24
_FIXED = struct.Struct("<8sIIQQ16s")
_WORD = struct.Struct("<Q")
_DIGEST = slice(32, 48)
_MAX_PAYLOAD = HEADER_BYTES - _FIXED.size
_MAX_SIZE = 1 << 62

#: States are far from one another, so that no flipped bit makes one of another.
EMPTY = int.from_bytes(b"EMPT", "little")
WRITING = int.from_bytes(b"WRIT", "little")
SEALED = int.from_bytes(b"SEAL", "little")
STATES = {EMPTY: "empty", WRITING: "being written", SEALED: "sealed"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotMeta:
    """What a sealed slot holds. The caller fills the first block; sizes and time are filled by `seal`."""

    run: str
    arena_id: str
    incarnation: str
    timeline: str
    step: int
    rank: int
    world_size: int
    layout_digest: str
    image_bytes: int
    image_digest: str | None = None
    """Digest of the image, computed by the caller when the `memory_checksum` option is on."""
    static_bytes: int = 0
    objects_bytes: int = 0
    sealed_at: float = 0.0
    """Unix time of the seal; 0 lets `seal` fill it."""


_TEXTS = ("run", "arena_id", "incarnation", "timeline", "layout_digest")
_NUMBERS = ("step", "rank", "world_size", "image_bytes", "static_bytes", "objects_bytes")
_FIELDS = {field.name for field in dataclasses.fields(SlotMeta)} | {"static_digest", "objects_digest"}


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """A verified page of a sealed slot."""

    meta: SlotMeta
    image_capacity: int
    sequence: int
    static_digest: str
    objects_digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """The part of a page that is true in every state."""

    image_capacity: int
    state: int
    sequence: int


def word(state: int, sequence: int) -> int:
    """The 8 bytes that carry state and sequence together."""
    return (state << 32) | (sequence & 0xFFFFFFFF)


def sealed_word(sequence: int) -> bytes:
    """The word of a slot sealed at `sequence`, as it stands in the page."""
    return _WORD.pack(word(SEALED, sequence))


def split_word(value: int) -> tuple[int, int]:
    """(state, sequence) of a word."""
    return value >> 32, value & 0xFFFFFFFF


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3_128 in hex: the digest of static and object bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def pack_empty(image_capacity: int) -> bytes:
    """The page of a slot that holds nothing yet."""
    page = bytearray(HEADER_BYTES)
    _FIXED.pack_into(page, 0, MAGIC, VERSION, 0, word(EMPTY, 0), image_capacity, b"")
    return bytes(page)


def pack_sealed(meta: SlotMeta, image_capacity: int, sequence: int, static_digest: str, objects_digest: str) -> bytes:
    """The page of a sealed slot; UsageError when the texts in `meta` are too long for it."""
    fields: dict[str, Any] = {name: getattr(meta, name) for name in SlotMeta.__slots__}
    fields["static_digest"] = static_digest
    fields["objects_digest"] = objects_digest
    payload = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(payload) > _MAX_PAYLOAD:
        raise UsageError(f"a slot's header takes {_MAX_PAYLOAD} bytes, not {len(payload)}: shorten the identifiers")
    page = bytearray(HEADER_BYTES)
    _FIXED.pack_into(page, 0, MAGIC, VERSION, len(payload), word(SEALED, sequence), image_capacity, b"")
    page[_FIXED.size : _FIXED.size + len(payload)] = payload
    page[_DIGEST] = xxhash.xxh3_128_digest(page)
    return bytes(page)


def parse_geometry(page: bytes, file_bytes: int, where: str) -> Geometry:
    """Read what is true in every state. Raises ForeignFormat, NewerFormat or DamagedCheckpoint."""
    if len(page) < HEADER_BYTES:
        raise DamagedCheckpoint(f"{where}: {len(page)} bytes are too few for a slot's header")
    magic, version, _, value, image_capacity, _ = _FIXED.unpack_from(page)
    if magic != MAGIC:
        raise ForeignFormat(f"{where}: not a snapshot slot of easyckpt (magic {magic!r})")
    if version > VERSION:
        raise NewerFormat(f"{where}: slot version {version}, this easyckpt knows {VERSION}: use a newer one")
    if version != VERSION:
        raise DamagedCheckpoint(f"{where}: slot version {version} does not exist")
    state, sequence = split_word(value)
    if state not in STATES:
        raise DamagedCheckpoint(f"{where}: unknown slot state {state:#x}")
    if state != WRITING and sequence % 2:
        raise DamagedCheckpoint(f"{where}: the slot is {STATES[state]}, but its sequence {sequence} is odd")
    if image_capacity % PAGE or not PAGE <= image_capacity <= file_bytes - HEADER_BYTES:
        raise DamagedCheckpoint(f"{where}: an image of {image_capacity} bytes is not in a file of {file_bytes}")
    return Geometry(image_capacity, state, sequence)


def parse_sealed(page: bytes, file_bytes: int, where: str) -> Header | None:
    """Verify a page and read all of it; None when the slot is not sealed. Raises as `parse_geometry`."""
    geometry = parse_geometry(page, file_bytes, where)
    if geometry.state != SEALED:
        return None
    blank = bytearray(page[:HEADER_BYTES])
    blank[_DIGEST] = bytes(16)
    if xxhash.xxh3_128_digest(blank) != page[_DIGEST]:
        raise DamagedCheckpoint(f"{where}: the slot's header does not match its checksum")
    length = _FIXED.unpack_from(page)[2]
    if length > _MAX_PAYLOAD:
        raise DamagedCheckpoint(f"{where}: a payload of {length} bytes does not fit the slot's header")
    try:
        fields = json.loads(page[_FIXED.size : _FIXED.size + length].decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where}: the slot's payload is not JSON: {error}") from None
    meta = _check_fields(fields, where)
    tail = file_bytes - HEADER_BYTES - geometry.image_capacity
    if meta.image_bytes > geometry.image_capacity or meta.static_bytes + meta.objects_bytes > tail:
        raise DamagedCheckpoint(
            f"{where}: {meta.image_bytes} + {meta.static_bytes} + {meta.objects_bytes} bytes are more than the slot has"
        )
    return Header(meta, geometry.image_capacity, geometry.sequence, fields["static_digest"], fields["objects_digest"])


def _check_fields(fields: Any, where: str) -> SlotMeta:
    """Believe nothing: the checksum shows rot, not a writer's mistake or malice."""

    def refuse(name: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{where}: field {name!r} of the slot's header is {fields.get(name)!r}")

    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        raise DamagedCheckpoint(f"{where}: the slot's payload has not the fields of version {VERSION}")
    for name in (*_TEXTS, "static_digest", "objects_digest"):
        if not isinstance(fields[name], str):
            raise refuse(name)
    for name in _NUMBERS:
        value = fields[name]
        if type(value) is not int or not 0 <= value < _MAX_SIZE:
            raise refuse(name)
    if not fields["rank"] < fields["world_size"]:
        raise refuse("rank")
    if not (fields["image_digest"] is None or isinstance(fields["image_digest"], str)):
        raise refuse("image_digest")
    sealed_at = fields["sealed_at"]
    if type(sealed_at) not in (int, float) or not 0 <= sealed_at < _MAX_SIZE:
        raise refuse("sealed_at")
    return SlotMeta(**{name: fields[name] for name in SlotMeta.__slots__})
