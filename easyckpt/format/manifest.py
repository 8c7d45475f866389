"""The records in a checkpoint: its manifest, and the index of each rank.

The records beside them are in `rootrecord` and can be imported from here too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from easyckpt.errors import DamagedCheckpoint
from easyckpt.format import records
from easyckpt.format.canonical import Json, dumps
from easyckpt.format.checksum import chunk_count
from easyckpt.format.codec import decode, encode_plain
from easyckpt.format.fields import HEX_32, TOKEN, Fields
from easyckpt.format.image import ALIGNMENT, Layout, written_bytes
from easyckpt.format.layout import MAX_RANK, MAX_STEP, safe_name, safe_path
from easyckpt.format.rootrecord import LeaseRecord, RootRecord, Timeline

__all__ = ["FORMAT", "FileRecord", "Index", "LeaseRecord", "Manifest", "RootRecord", "ShardRecord", "Timeline"]

FORMAT = records.FORMAT

_MANIFEST = "easyckpt.manifest"
_INDEX = "easyckpt.index"

_CHUNK = re.compile(r"[0-9a-f]{16}")


def _file_name(fields: Fields, name: str) -> str:
    value = fields.text(name)
    if not safe_name(value):
        fields.damaged(name, "a plain file name")
    return value


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint, as it was when it was committed."""

    size: int
    """Bytes."""
    digest: str
    """As :func:`easyckpt.format.checksum.file_digest` gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``manifest.json``: the commit record. A directory is a checkpoint because this file is in it."""

    format: int = FORMAT
    features: tuple[str, ...] = ()
    """What a reader must know to read this checkpoint at all."""
    run: str
    timeline: str
    step: int
    world_size: int
    attempt: str
    created: float
    """Seconds since 1970."""
    parent: str | None = None
    """``run/timeline/step`` of the checkpoint that its run began from: one copied from another run's root."""
    files: dict[str, FileRecord]
    """Every other file of the directory, by its path in it."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """What the user logged for this step; values that the codec keeps, no tensors."""
    parts: tuple[str, ...] = ()
    """Where the files are another framework's: what each rank holds, packed; `easyckpt.format.parts` reads it."""

    def to_bytes(self, parts: Sequence[bytes] = ()) -> bytes:
        """Return the text of the file. `parts` are the texts that stand for :attr:`parts`, so that none is parsed."""
        texts = parts or [dumps(part) for part in self.parts]
        features = sorted({*self.features, records.PARTS}) if texts else self.features
        head = dumps(
            {
                "kind": _MANIFEST,
                "format": self.format,
                "features": list(features),
                "run": self.run,
                "timeline": self.timeline,
                "step": self.step,
                "world_size": self.world_size,
                "attempt": self.attempt,
                "created": self.created,
                "parent": self.parent,
                "files": {name: {"size": file.size, "digest": file.digest} for name, file in self.files.items()},
                "metrics": encode_plain(self.metrics, ("metrics",)),
            }
        )
        return records.seal(b'%b,"parts":[%b]}' % (head[:-1], b",".join(texts)) if texts else head)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read and check the file. Raises ForeignFormat, NewerFormat or DamagedCheckpoint."""
        fields = records.read(data, _MANIFEST)
        metrics = decode(fields.raw("metrics"), _no_leaf)
        if type(metrics) is not dict:
            fields.damaged("metrics", "a dict")
        features = fields.texts("features")
        return cls(
            format=fields.number("format"),
            features=features,
            run=fields.text("run", HEX_32),
            timeline=fields.text("timeline", TOKEN),
            step=fields.number("step", high=MAX_STEP),
            world_size=fields.number("world_size", low=1, high=MAX_RANK),
            attempt=fields.text("attempt", TOKEN),
            created=fields.real("created"),
            parent=fields.optional_text("parent"),
            files=_files(fields),
            metrics=metrics,
            parts=fields.texts("parts") if records.PARTS in features else (),
        )


def _files(fields: Fields) -> dict[str, FileRecord]:
    files = {}
    for name, value in fields.table("files").items():
        if not safe_path(name):
            fields.damaged("files", "a table of plain file names")
        record = Fields(value, f"{_MANIFEST}: file {name!r}")
        files[name] = FileRecord(record.number("size"), record.text("digest", records.DIGEST))
    return files


def _no_leaf(number: int) -> Any:
    raise DamagedCheckpoint(f"a record refers to tensor {number}, and it has none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """The shard file that belongs to an index."""

    name: str
    size: int
    header_bytes: int
    """Where the image begins."""
    write_replicated: bool
    """The file holds the replicated group too."""
    chunks: tuple[str, ...]
    """Chunk digests, counted from byte 0 of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """``rank-00000.json``: what lies where in the rank's shard, and its state that is not tensors."""

    format: int = FORMAT
    features: tuple[str, ...] = ()
    run: str
    timeline: str
    step: int
    rank: int
    world_size: int
    layout: Layout
    objects: Json
    """What changes each step, encoded."""
    shard: ShardRecord

    def to_bytes(self, objects: bytes | None = None) -> bytes:
        """Return the text of the file.

        `objects`, if given, is the canonical text that stands for :attr:`objects`, so that bytes from a slot need not
        be parsed to be written.
        """
        head: Json = {
            "kind": _INDEX,
            "format": self.format,
            "features": list(self.features),
            "run": self.run,
            "timeline": self.timeline,
            "step": self.step,
            "rank": self.rank,
            "world_size": self.world_size,
            "shard": {
                "name": self.shard.name,
                "size": self.shard.size,
                "header_bytes": self.shard.header_bytes,
                "write_replicated": self.shard.write_replicated,
                "chunks": list(self.shard.chunks),
            },
        }
        text = dumps(self.objects) if objects is None else objects
        return records.seal(b'%b,"objects":%b,"layout":%b}' % (dumps(head)[:-1], text, self.layout.encoded))

    @classmethod
    def from_bytes(cls, data: bytes) -> Index:
        """Read and check the file. Raises ForeignFormat, NewerFormat or DamagedCheckpoint."""
        fields = records.read(data, _INDEX)
        layout = Layout.from_json(fields.raw("layout"))
        if fields.number("rank") != layout.rank or fields.number("world_size") != layout.world_size:
            fields.damaged("layout", "the one of this rank")
        return cls(
            format=fields.number("format"),
            features=fields.texts("features"),
            run=fields.text("run", HEX_32),
            timeline=fields.text("timeline", TOKEN),
            step=fields.number("step", high=MAX_STEP),
            rank=layout.rank,
            world_size=layout.world_size,
            layout=layout,
            objects=fields.raw("objects"),
            shard=_shard(Fields(fields.raw("shard"), f"{_INDEX}: shard"), layout),
        )


def _shard(fields: Fields, layout: Layout) -> ShardRecord:
    shard = ShardRecord(
        name=_file_name(fields, "name"),
        size=fields.number("size"),
        header_bytes=fields.number("header_bytes", low=ALIGNMENT),
        write_replicated=fields.flag("write_replicated"),
        chunks=fields.texts("chunks", _CHUNK),
    )
    if shard.header_bytes % ALIGNMENT:
        fields.damaged("header_bytes", f"a multiple of {ALIGNMENT}")
    if shard.size != shard.header_bytes + written_bytes(layout, shard.write_replicated):
        fields.damaged("size", "what header and layout say")
    if len(shard.chunks) != chunk_count(shard.size):
        fields.damaged("chunks", "one digest for each chunk of the file")
    return shard
