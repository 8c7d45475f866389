"""Reading files that a job appends to: only what is new, in bounded memory, whole lines alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from easyckpt.storage.base import Storage

_PIECE = 1 << 20
_LONGEST_LINE = 1 << 20


class Tail:
    """Of a file of JSON lines, which may not be there yet, grow, or begin anew.

    Only the last `window` bytes of what is there at first are read; `skipped` tells whether that left anything out.
    """

    def __init__(self, storage: Storage, path: str, window: int) -> None:
        self._storage, self._path, self._window = storage, path, window
        self._offset: int | None = None
        self._rest = b""
        self._torn = False
        """The line that is read now lacks its beginning."""
        self.skipped = False

    def new_records(self) -> Iterator[dict[str, Any]]:
        """What has been appended since the last call; lines that are no JSON objects are passed over."""
        try:
            with self._storage.reader(self._path) as file:
                size = file.size
                self._begin(size)
                assert self._offset is not None
                while self._offset < size:
                    buffer = bytearray(min(_PIECE, size - self._offset))
                    count = file.read_into(buffer, self._offset)
                    if not count:
                        return
                    self._offset += count
                    yield from self._records(bytes(buffer[:count]))
        except FileNotFoundError:
            return

    def _begin(self, size: int) -> None:
        if self._offset is not None and self._offset <= size:
            return
        first = self._offset is None
        self._offset = max(0, size - self._window)
        self._rest, self._torn = b"", self._offset > 0
        self.skipped = (first or self.skipped) and self._torn

    def _records(self, data: bytes) -> Iterator[dict[str, Any]]:
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            torn, self._torn = self._torn, False
            record = None if torn else record_of(line)
            if record is not None:
                yield record
        self._torn = self._torn or len(rest) > _LONGEST_LINE
        self._rest = b"" if self._torn else rest


def record_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def last_record(storage: Storage, path: str, window: int = 1 << 16) -> dict[str, Any] | None:
    """The last whole line of a file that may be rewritten at any time."""
    records = list(Tail(storage, path, window).new_records())
    return records[-1] if records else None
