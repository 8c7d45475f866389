"""One rank's part of a checkpoint whose files have another framework's layout.

Such a directory holds the framework's own files and our manifest. What an index tells of a shard, a part tells of those
files: what the state is, and in which file the bytes of each tensor lie. It is kept in the manifest itself, packed: a
string of base64 and zlib, so that whoever only looks for checkpoints has one word to pass over for each rank.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from easyckpt.errors import DamagedCheckpoint, SaveFailed
from easyckpt.format.canonical import Json, dumps, loads
from easyckpt.format.codec import path_text
from easyckpt.format.fields import MAX_NUMBER, Fields
from easyckpt.format.image import Layout
from easyckpt.format.layout import safe_path
from easyckpt.format.manifest import FileRecord

#: The place of a leaf: (name of the file, offset in it); "" stands for the bytes that the part carries itself.
Place = tuple[str, int]
CARRIED = ""

#: A longer text of a part is refused: a few packed bytes could stand for more than memory holds.
MAX_TEXT_BYTES = 256 << 20
_LEVEL = 6


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds, and where its bytes are."""

    layout: Layout
    objects: Json
    """What changes each step, encoded."""
    places: tuple[Place | None, ...]
    """By leaf number; None: rank 0's part says where."""
    carried: bytes
    """Bytes of leaves for which the framework has no file."""

    @property
    def written(self) -> list[bool]:
        """By leaf number: this rank wrote it."""
        pairs = zip(self.layout.leaves, self.places, strict=True)
        return [place is not None or not leaf.replicated for leaf, place in pairs]

    @classmethod
    def from_json(cls, value: Json, rank: int, files: Mapping[str, FileRecord]) -> Part:
        """Read and check the part of `rank` out of a manifest that lists `files`. Raises FormatError."""
        fields = Fields(value, f"easyckpt.manifest: part {rank}")
        layout = Layout.from_json(fields.raw("layout"))
        if layout.rank != rank:
            fields.damaged("layout", f"the one of rank {rank}")
        try:
            carried = base64.b64decode(fields.text("carried"), validate=True)
        except (binascii.Error, ValueError):
            fields.damaged("carried", "base64")
        names = [CARRIED, *fields.texts("files")]
        sizes = [len(carried)]
        for name in names[1:]:
            if not safe_path(name) or name not in files:
                fields.damaged("files", "names of files that the manifest lists")
            sizes.append(files[name].size)
        places = tuple(_place(fields, item, names) for item in fields.items("places"))
        if len(places) != len(layout.leaves):
            fields.damaged("places", "one for each leaf")
        limits = dict(zip(names, sizes, strict=True))
        for leaf, place in zip(layout.leaves, places, strict=True):
            if place is None and not leaf.replicated and leaf.nbytes:
                fields.damaged("places", "complete")
            if place is not None and place[1] + leaf.nbytes > limits[place[0]]:
                fields.damaged("places", "within the files")
        return cls(layout, fields.raw("objects"), places, carried)


def _place(fields: Fields, item: Json, names: Sequence[str]) -> Place | None:
    if item is None:
        return None
    if isinstance(item, list) and len(item) == 2:
        file, offset = item
        if type(file) is int and type(offset) is int and 0 <= file < len(names) and 0 <= offset <= MAX_NUMBER:
            return names[file], offset
    return fields.damaged("places", "pairs of a file and an offset")


def part_text(layout: Layout, objects: bytes, places: Sequence[Place | None], carried: bytes) -> bytes:
    """The JSON text that stands for a part in the manifest: a string, packed.

    `objects` is the text as a slot holds it, so that it need not be parsed. Raises SaveFailed for one that nobody
    would read again.
    """
    names = sorted({place[0] for place in places if place is not None} - {CARRIED})
    numbers = {name: number for number, name in enumerate([CARRIED, *names])}
    pairs: list[Json] = [None if place is None else [numbers[place[0]], place[1]] for place in places]
    head: Json = {"files": list(names), "places": pairs, "carried": base64.b64encode(carried).decode("ascii")}
    text = b'%b,"objects":%b,"layout":%b}' % (dumps(head)[:-1], objects, layout.encoded)
    if len(text) > MAX_TEXT_BYTES:
        raise SaveFailed(f"rank {layout.rank}: its part would have {len(text)} bytes, more than any reader takes")
    return dumps(pack(text))


def pack(text: bytes) -> str:
    """The text of a part as the manifest holds it. Names, shapes and places are much the same from leaf to leaf."""
    return base64.b64encode(zlib.compress(text, _LEVEL)).decode("ascii")


def unpack(packed: str) -> bytes:
    """What :func:`pack` was given. Raises DamagedCheckpoint."""
    try:
        stream = zlib.decompressobj()
        text = stream.decompress(base64.b64decode(packed, validate=True), MAX_TEXT_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise DamagedCheckpoint(f"a part of the manifest cannot be unpacked: {error}") from None
    if not stream.eof or stream.unused_data:
        raise DamagedCheckpoint("a part of the manifest is cut short, or larger than any part of ours")
    return text


def read_part(parts: Sequence[str], rank: int, files: Mapping[str, FileRecord]) -> Part:
    """The part of `rank` out of a manifest's `parts`. Raises FormatError."""
    if rank >= len(parts):
        raise DamagedCheckpoint(f"the manifest holds {len(parts)} parts, and none of rank {rank}")
    return Part.from_json(loads(unpack(parts[rank])), rank, files)


def locate(part: Part, first: Part) -> list[tuple[Part, Place]]:
    """By leaf number: where its bytes are, and the part that says so, and carries them where they are in no file.

    `first` is rank 0's part, which says it of what all ranks share. Raises DamagedCheckpoint.
    """
    twins = {leaf.path: number for number, leaf in enumerate(first.layout.leaves) if leaf.replicated}
    found: list[tuple[Part, Place]] = []
    for leaf, own in zip(part.layout.leaves, part.places, strict=True):
        owner, place = part, own if leaf.nbytes else (CARRIED, 0)
        if place is None:
            number = twins.get(leaf.path)
            twin = None if number is None else first.layout.leaves[number]
            owner, place = first, None if number is None else first.places[number]
            mine = (leaf.dtype, leaf.shape, leaf.order)
            if twin is None or place is None or (twin.dtype, twin.shape, twin.order) != mine:
                raise DamagedCheckpoint(f"{path_text(leaf.path)[:200]} is replicated, and rank 0 does not hold it")
        found.append((owner, place))
    return found
