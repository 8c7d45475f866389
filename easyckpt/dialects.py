"""How checkpoints look in a root: their names, their files, and where the run's own records are.

The engine's own dialect is `NATIVE`. An integration brings another one, in which its framework's tools find what they
look for; snapshots, commit, retention, verification and restoring are the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from easyckpt.config import CheckpointConfig
from easyckpt.format import layout
from easyckpt.format.layout import NamingScheme
from easyckpt.format.trainer_names import RECORDS_DIRECTORY, TrainerNaming
from easyckpt.loading.parts_reader import open_parts
from easyckpt.loading.reader import OpenCheckpoint, open_storage
from easyckpt.saving.parts_writer import PartsWriter, Plan
from easyckpt.saving.writer import ShardWriter
from easyckpt.storage.base import Storage
from easyckpt.storage.local import LocalStorage
from easyckpt.storage.records_apart import RecordsApart


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """See the module's docstring."""

    naming: NamingScheme
    place: Callable[[str | os.PathLike[str], bool | None], LocalStorage]
    """Opens the storage of a root; the second argument is the setting `direct_io`."""
    writer: Callable[[Storage, CheckpointConfig], ShardWriter]
    open: OpenCheckpoint
    keeps_other_lines: bool = False
    """A line that begins from nothing leaves what it finds in the root where it is."""


def native() -> Dialect:
    """Directories and files as the engine names and writes them by itself."""
    return Dialect(
        naming=layout.NativeNaming(),
        place=lambda root, direct_io: LocalStorage(root, direct_io=direct_io),
        writer=lambda storage, config: ShardWriter(storage, min_free_bytes=config.min_free_bytes),
        open=open_storage,
    )


def of_trainer(plan: Plan) -> Dialect:
    """Directories as Hugging Face's Trainer has them, with the files that `plan` makes of a snapshot."""
    return Dialect(
        naming=TrainerNaming(),
        place=lambda root, direct_io: RecordsApart(root, records=RECORDS_DIRECTORY, direct_io=direct_io),
        writer=lambda storage, config: PartsWriter(storage, plan, min_free_bytes=config.min_free_bytes),
        open=open_parts,
        keeps_other_lines=True,
    )
