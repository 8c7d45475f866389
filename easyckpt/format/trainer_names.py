"""Names in a directory that is Hugging Face's Trainer's as well: ``checkpoint-30``, and records of ours beside it.

The Trainer, its tools and its uploads look for names that begin with ``checkpoint-`` and leave alone those that begin
with an underscore. So committed checkpoints have the Trainer's names, and everything else begins with ``_easyckpt``.
"""

from __future__ import annotations

import re

from easyckpt.format.layout import MAX_RANK, MAX_STEP, checked, checked_number, safe_name

#: Where the run's own records are (`layout.RECORDS`), below the directory of checkpoints.
RECORDS_DIRECTORY = "_easyckpt"

#: Where the program writes what it adds to a checkpoint by itself.
PROGRAMS_DIRECTORY = "_easyckpt-added"

#: The Trainer's own state, in each checkpoint.
STATE_FILE = "trainer_state.json"

_STEP = r"checkpoint-(?P<step>0|[1-9][0-9]{0,17})"
_WORD = r"[0-9A-Za-z_-]{1,64}"
_TEMPORARY, _STALE, _TRASH = "_easyckpt-tmp-", "_easyckpt-stale-", "_easyckpt-trash-"

_word = re.compile(_WORD)
_nonce = re.compile(r"[0-9A-Za-z_]{1,64}")
_committed = re.compile(_STEP)
_temporary = re.compile(rf"{_TEMPORARY}{_STEP}\.(?P<word>{_WORD})")
_stale = re.compile(rf"{_STALE}{_STEP}\.(?P<word>{_WORD})")
_trash = re.compile(rf"{_TRASH}(?P<nonce>[0-9A-Za-z_]{{1,64}})-(?P<name>.+)")


class TrainerNaming:
    """See `easyckpt.format.layout.NamingScheme`."""

    shared = True

    def committed(self, step: int) -> str:
        """``checkpoint-30``."""
        return f"checkpoint-{checked_number(step, MAX_STEP, 'step')}"

    def parse_committed(self, name: str) -> int | None:
        """The step of a :meth:`committed` name."""
        match = _committed.fullmatch(name)
        return None if match is None else int(match["step"])

    def temporary(self, step: int, attempt: str) -> str:
        """``_easyckpt-tmp-checkpoint-30.<attempt>``: one attempt at a commit, not yet made."""
        return f"{_TEMPORARY}{self.committed(step)}.{checked(attempt, _word, 'an attempt')}"

    def parse_temporary(self, name: str) -> tuple[int, str] | None:
        """(step, attempt) of a :meth:`temporary` name."""
        match = _temporary.fullmatch(name)
        return None if match is None else (int(match["step"]), match["word"])

    def stale(self, step: int, timeline: str) -> str:
        """``_easyckpt-stale-checkpoint-30.<timeline>``: set aside for `timeline`."""
        return f"{_STALE}{self.committed(step)}.{checked(timeline, _word, 'a timeline')}"

    def parse_stale(self, name: str) -> tuple[int, str] | None:
        """(step, timeline) of a :meth:`stale` name."""
        match = _stale.fullmatch(name)
        return None if match is None else (int(match["step"]), match["word"])

    def trash(self, name: str, nonce: str) -> str:
        """``_easyckpt-trash-<nonce>-<name>``: about to be deleted."""
        if not safe_name(name):
            raise ValueError(f"{name!r} is not a name of a file")
        return f"{_TRASH}{checked(nonce, _nonce, 'a nonce')}-{name}"

    def parse_trash(self, name: str) -> str | None:
        """The name before it became a :meth:`trash` name."""
        match = _trash.fullmatch(name)
        return None if match is None or not safe_name(match["name"]) else match["name"]


def part_file(rank: int) -> str:
    """``_easyckpt-part-00000.json``: what one rank holds, until the commit takes it into the manifest."""
    return f"_easyckpt-part-{checked_number(rank, MAX_RANK, 'rank'):05d}.json"


def carried_file(rank: int) -> str:
    """``_easyckpt-rank-00000.bin``: bytes of a rank for which no file of the framework has a place."""
    return f"_easyckpt-rank-{checked_number(rank, MAX_RANK, 'rank'):05d}.bin"
