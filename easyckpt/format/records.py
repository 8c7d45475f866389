"""The envelope of every record file: JSON whose last field is the digest of all before it."""

from __future__ import annotations

import re

from easyckpt.errors import DamagedCheckpoint, ForeignFormat, NewerFormat
from easyckpt.format.canonical import Json, dumps, loads
from easyckpt.format.checksum import digest_bytes
from easyckpt.format.fields import Fields

#: The version of the files on disk that this program writes, and the newest that it reads.
FORMAT = 1

#: The manifest says itself what each rank holds, since the files are another framework's.
PARTS = "parts"
#: Required features that this program knows. A record that names another one is refused.
FEATURES: frozenset[str] = frozenset({PARTS})

DIGEST = re.compile(r"xxh3:[0-9a-f]{16}")

_SEAL = re.compile(rb',"digest":"(xxh3:[0-9a-f]{16})"\}\Z')


def seal(body: bytes) -> bytes:
    """Append the digest of `body`, the text of a non-empty JSON object, as its last field."""
    return b'%b,"digest":"%b"}' % (body[:-1], digest_bytes(body).encode("ascii"))


def write(kind: str, fields: dict[str, Json]) -> bytes:
    """Return the text of a record of `kind`."""
    return seal(dumps({"kind": kind, **fields}))


def read(data: bytes, kind: str) -> Fields:
    """Return the fields of a record whose kind, digest, format and features were checked.

    Raises ForeignFormat (JSON, but not this kind of record), NewerFormat, or DamagedCheckpoint.
    """
    match = _SEAL.search(data)
    value = loads(data)
    if not isinstance(value, dict) or value.get("kind") != kind:
        raise ForeignFormat(f"not an {kind} record")
    fields = Fields(value, kind)
    if match is None or digest_bytes(data[: match.start()] + b"}") != match[1].decode("ascii"):
        raise DamagedCheckpoint(f"{kind}: the record's digest does not match its text: torn, rotten or edited")
    if fields.number("format", low=1) > FORMAT:
        raise NewerFormat(
            f"{kind}: format {fields.number('format')}; this version reads up to {FORMAT}: upgrade easyckpt"
        )
    if unknown := sorted(set(fields.texts("features")) - FEATURES):
        raise NewerFormat(f"{kind}: needs {', '.join(unknown)[:200]}, which this version lacks: upgrade easyckpt")
    return fields
