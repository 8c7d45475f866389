"""``Storage`` in a directory that is not ours alone: the run's own records lie in a subdirectory of it.

For everybody above, nothing changes: a record has the same path as in a root of ours, and is listed with the root.
"""

from __future__ import annotations

import contextlib
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
        if path or self._records not in names:
            return names
        try:
            inside = super().listdir(self._records)
        except FileNotFoundError:
            inside = []
        return sorted({*names, *filter(_is_record, inside)} - {self._records})

    @override
    def makedirs(self, path: str) -> None:
        super().makedirs(path or self._records)

    @override
    def remove_empty_root(self) -> None:
        with contextlib.suppress(OSError):
            self._os.rmdir(f"{self.root}/{self._records}")
        super().remove_empty_root()

    @override
    def sync_dir(self, path: str) -> None:
        if not path and self.exists(self._records):
            super().sync_dir(self._records)
        super().sync_dir(path)


def _is_record(name: str) -> bool:
    return name in layout.RECORDS or layout.is_temp_file(name)


def open_place(root: str | os.PathLike[str], *, direct_io: bool | None = None) -> tuple[LocalStorage, NamingScheme]:
    """The storage and the names of a root, whoever's directory it is: what is there tells."""
    naming = TrainerNaming() if _is_trainers(LocalStorage(root).root) else layout.NativeNaming()
    return place_of(naming, root, direct_io=direct_io), naming


def place_of(naming: NamingScheme, root: str | os.PathLike[str], *, direct_io: bool | None = None) -> LocalStorage:
    """The storage of a root whose checkpoints are called by `naming`."""
    if naming.shared:
        return RecordsApart(root, records=RECORDS_DIRECTORY, direct_io=direct_io)
    return LocalStorage(root, direct_io=direct_io)


def _is_trainers(root: str) -> bool:
    if os.path.lexists(os.path.join(root, RECORDS_DIRECTORY, layout.ROOT_FILE)):
        return True
    if os.path.lexists(os.path.join(root, layout.ROOT_FILE)):
        return False
    try:
        names = os.listdir(root)
    except OSError:  # whoever uses it is told
        return False
    copied = [name for name in names if TrainerNaming().parse_committed(name) is not None]
    return any(os.path.lexists(os.path.join(root, name, layout.MANIFEST)) for name in copied)
