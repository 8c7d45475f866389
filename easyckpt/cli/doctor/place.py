"""What is known of the root that doctor is asked about, or of the directory that stands in for it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from easyckpt import catalog
from easyckpt.catalog import Entry
from easyckpt.errors import EasyckptError, UsageError
from easyckpt.format import layout, memory_names
from easyckpt.format.manifest import Index, RootRecord
from easyckpt.format.parts import read_part
from easyckpt.storage.local import LocalStorage
from easyckpt.storage.records_apart import open_place
from easyckpt.storage.walk import root_path


@dataclass(frozen=True, slots=True)
class Place:
    """A directory that exists: the root, or the nearest one above where it would be made."""

    asked: str
    directory: str
    record: RootRecord | None = None
    problem: str | None = None
    """What is wrong with the root's record."""
    newest: Entry | None = None
    image_bytes: int | None = None
    """What one rank's snapshot takes, by the newest checkpoint."""

    @property
    def arena_id(self) -> str | None:
        """Of the root's run."""
        return None if self.record is None else memory_names.arena_id(self.record.run, os.path.realpath(self.directory))


def look_at(given: str | None) -> Place:
    """Find out about `given` (None: the current directory). Raises UsageError, ConfigError or OSError."""
    asked = os.path.abspath(root_path(given or "."))
    directory = asked
    while not os.path.lexists(directory):
        directory = os.path.dirname(directory)
    if not os.path.isdir(directory):
        raise UsageError(f"{directory}: not a directory; doctor takes the root of a run, or where one is to be made")
    if directory != asked:
        return Place(asked, directory)
    storage, naming = open_place(directory)
    try:
        record = catalog.read_root(storage)
    except EasyckptError as error:
        return Place(asked, directory, problem=str(error))
    committed = catalog.scan(storage, naming).committed()
    if record is None or not committed:
        return Place(asked, directory, record)
    return Place(asked, directory, record, newest=committed[-1], image_bytes=_image_bytes(storage, committed[-1]))


def _image_bytes(storage: LocalStorage, entry: Entry) -> int | None:
    assert entry.manifest is not None
    try:
        if entry.manifest.parts:
            return read_part(entry.manifest.parts, 0, entry.manifest.files).layout.image_bytes
        return Index.from_bytes(storage.read(f"{entry.name}/{layout.index_file(0)}")).layout.image_bytes
    except (EasyckptError, OSError):  # of a model only, damaged, or rotated away
        return None
