"""``Storage`` in a directory that is not ours alone: the run's own records lie in a subdirectory of it.

For everybody above, nothing changes: a record has the same path as in a root of ours, and is listed with the root.
"""

from __future__ import annotations

import os

from typing_extensions import override

from easyckpt.format import layout
from easyckpt.format.layout import NamingScheme
from easyckpt.format.trainer_names import RECORDS_DIRECTORY, TrainerNaming
from easyckpt.storage.local import LocalStorage


class RecordsApart(LocalStorage):
    """Keeps the root's records, and what replaces them, in `records` below the root."""

    def __init__(self, root: str | os.PathLike[str], *, records: str, direct_io: bool | None = None) -> None:
        super().__init__(root, direct_io=direct_io)
        self._records = records

    @override
    def _split(self, path: str) -> list[str]:
        parts = super()._split(path)
        return [self._records, *parts] if parts and _is_record(parts[0]) else parts

    @override
    def listdir(self, path: str) -> list[str]:
        names = super().listdir(path)
        if path:
            return names
        try:
            inside = super().listdir(self._records)
        except FileNotFoundError:
            return names
        return sorted({*names, *filter(_is_record, inside)})

    @override
    def sync_dir(self, path: str) -> None:
        if not path and self.exists(self._records):
            super().sync_dir(self._records)
        super().sync_dir(path)


def _is_record(name: str) -> bool:
    return name in layout.RECORDS or layout.is_temp_file(name)


def open_place(root: str | os.PathLike[str], *, direct_io: bool | None = None) -> tuple[LocalStorage, NamingScheme]:
    """The storage and the names of a root, whoever's directory it is: what is there tells."""
    storage = LocalStorage(root, direct_io=direct_io)
    if os.path.lexists(os.path.join(storage.root, RECORDS_DIRECTORY, layout.ROOT_FILE)):
        return RecordsApart(root, records=RECORDS_DIRECTORY, direct_io=direct_io), TrainerNaming()
    return storage, layout.NativeNaming()
