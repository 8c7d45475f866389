"""Which checkpoint in a directory of a Trainer's the Trainer itself calls the best."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from easyckpt.catalog import MAX_RECORD_BYTES, Catalog, Entry
from easyckpt.errors import EasyckptError
from easyckpt.format.layout import NamingScheme
from easyckpt.format.manifest import RootRecord
from easyckpt.format.trainer_names import STATE_FILE
from easyckpt.saving.policy import on_line
from easyckpt.storage.base import Storage


def trainers_best(storage: Storage, naming: NamingScheme, record: RootRecord, found: Catalog) -> int | None:
    """The step that the newest checkpoint's ``trainer_state.json`` names; None where it names none of this directory.

    The newest of the open line is asked first: what the Trainer has written by itself may be another training's, with
    higher numbers. It is asked where none of the line can tell. The directory may have been moved since: what counts
    is the name in it.
    """
    line = [entry for entry in found.committed() if on_line(record, entry)]
    for entry in [*_newest_first(line), *_newest_first(found.of_kind("foreign"))]:
        state = _state(storage, entry)
        if state is not None:
            best = state.get("best_model_checkpoint")
            return naming.parse_committed(os.path.basename(best)) if isinstance(best, str) else None
    return None


def _newest_first(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.step, reverse=True)


def _state(storage: Storage, entry: Entry) -> dict[str, object] | None:
    path = f"{entry.name}/{STATE_FILE}"
    try:
        value = json.loads(storage.read(path)) if storage.stat_size(path) <= MAX_RECORD_BYTES else None
    except (OSError, EasyckptError, ValueError, RecursionError):
        return None  # `verify` tells what it lacks; an older one may know
    return value if isinstance(value, dict) else None
