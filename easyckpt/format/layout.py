"""Every name that easyckpt gives to a file or a directory outside of shared memory, and the parser of each.

Only this module and `memory_names` know names. A parser accepts the canonical spelling alone (what the matching
function returns) and answers None to everything else, so that a file that merely looks like ours is left in peace.
"""

from __future__ import annotations

import re
from typing import Protocol

MANIFEST = "manifest.json"
ROOT_FILE = "easyckpt.json"
LATEST = "latest"
#: How files of weights end: what is exported, and what is compared; and how people are told so.
SAFETENSORS = ".safetensors"
TORCH_FILES = (".pth", ".pt")
WEIGHTS_FILE = f"a {SAFETENSORS}, {TORCH_FILES[0]} or {TORCH_FILES[1]} file"
LEASE = "lease.json"
PINS = "pins"
EVENTS = "events"
METRICS = "metrics.jsonl"
AUDIT = "audit"
#: The files and directories in a root that are no checkpoints.
RECORDS = frozenset({ROOT_FILE, LATEST, LEASE, PINS, EVENTS, METRICS, AUDIT})
_PROBE = ".easyckpt-doctor-"
#: The line of training of checkpoints that another program wrote, and of which only the bytes are vouched for.
FOREIGN_LINE = "stock"

#: Steps have up to 18 digits, so that every one fits in 63 bits.
MAX_STEP = 10**18 - 1
MAX_RANK = 10**9 - 1

_STEP = r"step-(?P<step>[0-9]{8}|[1-9][0-9]{8,17})"
_WORD = r"[0-9A-Za-z_-]{1,64}"
#: How a rank is written in a name.
RANK = r"(?P<rank>[0-9]{5}|[1-9][0-9]{5,8})"

_step_dir = re.compile(_STEP)
_stale_dir = re.compile(rf"{_STEP}\.stale-(?P<word>{_WORD})")
_tmp_dir = re.compile(rf"\.{_STEP}\.(?P<word>{_WORD})\.tmp")
_trash = re.compile(r"\.trash-(?P<nonce>[0-9A-Za-z_]{1,64})-(?P<name>.+)")
_temp_file = re.compile(rf"\.(?P<name>.+)\.(?P<word>{_WORD})\.tmp")
_shard_file = re.compile(rf"rank-{RANK}\.safetensors")
_index_file = re.compile(rf"rank-{RANK}\.json")
_events_file = re.compile(rf"rank-{RANK}\.jsonl")
_pin = re.compile(r"step-(?P<step>0|[1-9][0-9]{0,17})")
_word = re.compile(_WORD)
_nonce = re.compile(r"[0-9A-Za-z_]{1,64}")


def checked(value: str, pattern: re.Pattern[str], what: str) -> str:
    """`value`, which goes into a name as it is; ValueError where it does not fit in."""
    if pattern.fullmatch(value) is None:
        raise ValueError(f"{value!r} cannot be {what} in a file name")
    return value


def checked_number(value: int, limit: int, what: str) -> int:
    """`value`, which goes into a name as a number; ValueError where a parser would not take it."""
    if not 0 <= value <= limit:
        raise ValueError(f"{what} {value} is not in 0..{limit}")
    return value


def _number(pattern: re.Pattern[str], name: str, group: str) -> int | None:
    match = pattern.fullmatch(name)
    return None if match is None else int(match[group])


def safe_name(name: object) -> bool:
    """Is `name`, which came out of a file, one plain path component that every file system can hold?"""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    if any(character in "/\\" or ord(character) < 32 or ord(character) == 127 for character in name):
        return False
    try:
        return len(name.encode("utf-8")) <= 255
    except UnicodeEncodeError:
        return False


def safe_path(path: object) -> bool:
    """Is `path`, which came out of a file, made of safe names joined by ``/``?"""
    return isinstance(path, str) and all(map(safe_name, path.split("/")))


# Directories of steps.


def step_dir(step: int) -> str:
    """``step-00000030``: a committed checkpoint."""
    return f"step-{checked_number(step, MAX_STEP, 'step'):08d}"


def parse_step_dir(name: str) -> int | None:
    """The step of a :func:`step_dir` name."""
    return _number(_step_dir, name, "step")


def stale_dir(step: int, timeline: str) -> str:
    """``step-00000030.stale-<timeline>``: committed, then set aside when `timeline` was opened before it."""
    return f"{step_dir(step)}.stale-{checked(timeline, _word, 'a timeline')}"


def parse_stale_dir(name: str) -> tuple[int, str] | None:
    """(step, timeline) of a :func:`stale_dir` name."""
    match = _stale_dir.fullmatch(name)
    return None if match is None else (int(match["step"]), match["word"])


def tmp_dir(step: int, attempt: str) -> str:
    """``.step-00000030.<attempt>.tmp``: one attempt at a commit, not yet made."""
    return f".{step_dir(step)}.{checked(attempt, _word, 'an attempt')}.tmp"


def parse_tmp_dir(name: str) -> tuple[int, str] | None:
    """(step, attempt) of a :func:`tmp_dir` name."""
    match = _tmp_dir.fullmatch(name)
    return None if match is None else (int(match["step"]), match["word"])


def trash_dir(name: str, nonce: str) -> str:
    """``.trash-<nonce>-<name>``: about to be deleted; never a candidate for anything."""
    if not safe_name(name):
        raise ValueError(f"{name!r} is not a name of a file")
    return f".trash-{checked(nonce, _nonce, 'a nonce')}-{name}"


def parse_trash_dir(name: str) -> str | None:
    """The name before it became a :func:`trash_dir` name."""
    match = _trash.fullmatch(name)
    return None if match is None or not safe_name(match["name"]) else match["name"]


# Files in a checkpoint and beside it.


def shard_file(rank: int) -> str:
    """``rank-00000.safetensors``: the tensors that one rank wrote."""
    return f"rank-{checked_number(rank, MAX_RANK, 'rank'):05d}.safetensors"


def parse_shard_file(name: str) -> int | None:
    """The rank of a :func:`shard_file` name."""
    return _number(_shard_file, name, "rank")


def index_file(rank: int) -> str:
    """``rank-00000.json``: what lies where in the shard, and the rank's other state."""
    return f"rank-{checked_number(rank, MAX_RANK, 'rank'):05d}.json"


def parse_index_file(name: str) -> int | None:
    """The rank of an :func:`index_file` name."""
    return _number(_index_file, name, "rank")


def pin_file(step: int) -> str:
    """``pins/step-30``: its presence keeps that step from retention."""
    return f"{PINS}/step-{checked_number(step, MAX_STEP, 'step')}"


def parse_pin_file(name: str) -> int | None:
    """The step of a file in the pins directory (the name without the directory)."""
    return _number(_pin, name, "step")


def events_file(rank: int) -> str:
    """``events/rank-00000.jsonl``: what that rank did."""
    return f"{EVENTS}/rank-{checked_number(rank, MAX_RANK, 'rank'):05d}.jsonl"


def parse_events_file(name: str) -> int | None:
    """The rank of a file in the events directory (the name without the directory)."""
    return _number(_events_file, name, "rank")


def audit_file(rank: int) -> str:
    """``audit/rank-00000.jsonl``: what that rank has noted of an audited run."""
    return f"{AUDIT}/rank-{checked_number(rank, MAX_RANK, 'rank'):05d}.jsonl"


def temp_file(name: str, nonce: str) -> str:
    """``.<name>.<nonce>.tmp``: the new content of the small file `name` before it takes its place."""
    temporary = f".{name}.{checked(nonce, _word, 'a nonce')}.tmp"
    if not safe_name(name) or parse_tmp_dir(temporary) is not None:
        raise ValueError(f"{name!r} is not a name of a small file")
    return temporary


def is_temp_file(name: str) -> bool:
    """Is this a :func:`temp_file` name (and not a :func:`tmp_dir` name)?"""
    match = _temp_file.fullmatch(name)
    return match is not None and safe_name(match["name"]) and parse_tmp_dir(name) is None


def is_beside_lease(name: str) -> bool:
    """Is this a :func:`temp_file` of the lease, or of such a file, which is made through a temporary one itself?"""
    match = _temp_file.fullmatch(name)
    return match is not None and is_temp_file(name) and (match["name"] == LEASE or is_beside_lease(match["name"]))


def probe_dir(nonce: str) -> str:
    """``.easyckpt-doctor-<nonce>``: where `doctor` tries a root out; no candidate for anything."""
    return f"{_PROBE}{checked(nonce, _nonce, 'a nonce')}"


def is_probe_dir(name: str) -> bool:
    """Is this a :func:`probe_dir` name?"""
    return name.startswith(_PROBE) and _nonce.fullmatch(name.removeprefix(_PROBE)) is not None


# Files of weights outside a root.


def weights_format(name: str) -> str | None:
    """``safetensors`` or ``torch``, by how `name` ends; None for all else."""
    if name.lower().endswith(SAFETENSORS):
        return "safetensors"
    return "torch" if name.lower().endswith(TORCH_FILES) else None


class NamingScheme(Protocol):
    """How directories of checkpoints are called in a root: the door for other frameworks' names.

    A parser answers None to everything but what its method returns, and no name has two meanings.
    """

    shared: bool
    """Another program gives its directories the names of committed checkpoints too."""

    def committed(self, step: int) -> str:
        """Name of a committed checkpoint."""
        ...

    def parse_committed(self, name: str) -> int | None:
        """Step of a committed name."""
        ...

    def temporary(self, step: int, attempt: str) -> str:
        """Name of one attempt's directory."""
        ...

    def parse_temporary(self, name: str) -> tuple[int, str] | None:
        """(step, attempt) of a temporary name."""
        ...

    def stale(self, step: int, timeline: str) -> str:
        """Name of a committed checkpoint that was set aside when `timeline` was opened before it."""
        ...

    def parse_stale(self, name: str) -> tuple[int, str] | None:
        """(step, timeline) of a stale name."""
        ...

    def trash(self, name: str, nonce: str) -> str:
        """Name under which `name` waits for its deletion."""
        ...

    def parse_trash(self, name: str) -> str | None:
        """The name before, of a name in the trash."""
        ...


class NativeNaming:
    """The names of this module."""

    shared = False

    def committed(self, step: int) -> str:
        """As :func:`step_dir`."""
        return step_dir(step)

    def parse_committed(self, name: str) -> int | None:
        """As :func:`parse_step_dir`."""
        return parse_step_dir(name)

    def temporary(self, step: int, attempt: str) -> str:
        """As :func:`tmp_dir`."""
        return tmp_dir(step, attempt)

    def parse_temporary(self, name: str) -> tuple[int, str] | None:
        """As :func:`parse_tmp_dir`."""
        return parse_tmp_dir(name)

    def stale(self, step: int, timeline: str) -> str:
        """As :func:`stale_dir`."""
        return stale_dir(step, timeline)

    def parse_stale(self, name: str) -> tuple[int, str] | None:
        """As :func:`parse_stale_dir`."""
        return parse_stale_dir(name)

    def trash(self, name: str, nonce: str) -> str:
        """As :func:`trash_dir`."""
        return trash_dir(name, nonce)

    def parse_trash(self, name: str) -> str | None:
        """As :func:`parse_trash_dir`."""
        return parse_trash_dir(name)
