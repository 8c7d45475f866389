"""Every name that easyckpt gives to a file or a directory in shared memory, and the parser of each; see `layout`."""

from __future__ import annotations

import re

import xxhash

from easyckpt.format.layout import MAX_RANK, RANK, checked, checked_number, safe_name

OWNER = ".owner"
#: How the names of directories begin in which audits keep their runs' shared memory; the file in them that carries the
#: audit's record lock.
AUDIT_MEMORY = "easyckpt-audit-"
AUDIT_OWNER = "audit.owner"

_arena_id = re.compile(r"[0-9a-f]{12}-[0-9a-f]{8}")
_arena_file = re.compile(
    r"easyckpt-(?P<user>[0-9A-Za-z_.-]{1,64})-(?P<arena>[0-9a-f]{12}-[0-9a-f]{8})-"
    rf"{RANK}\.(?:(?P<slot>0|[1-9][0-9]{{0,5}})|owner)"
)


def arena_id(run: str, root_realpath: str) -> str:
    """What all arenas of one run in one root have in common; a copied root gets another one."""
    place = xxhash.xxh3_64_hexdigest(root_realpath.encode("utf-8", "surrogateescape"))[:8]
    return checked(f"{run[:12]}-{place}", _arena_id, "an arena id")


def _label(user: str) -> str:
    # Who owns a file is asked of the file system.
    return re.sub(r"[^0-9A-Za-z_.-]", "_", user)[:64] or "_"


def slot_file(user: str, arena_id: str, rank: int, slot: int) -> str:
    """``easyckpt-<user>-<arena id>-<rank>.<slot>``: one snapshot in shared memory."""
    checked_number(slot, 999_999, "slot")
    return f"{_arena_stem(user, arena_id, rank)}.{slot}"


def owner_file(user: str, arena_id: str, rank: int) -> str:
    """``easyckpt-<user>-<arena id>-<rank>.owner``: carries the record lock of the process that owns the arena."""
    return f"{_arena_stem(user, arena_id, rank)}.owner"


def _arena_stem(user: str, arena: str, rank: int) -> str:
    checked(arena, _arena_id, "an arena id")
    return f"easyckpt-{_label(user)}-{arena}-{checked_number(rank, MAX_RANK, 'rank'):05d}"


def owner_beside(slot_path: str) -> str:
    """The owner file of the arena that the slot at `slot_path` belongs to, in the same directory."""
    return slot_path.rpartition(".")[0] + ".owner"


def node_lock_file(user: str) -> str:
    """``easyckpt-<user>.lock``: held while ranks of one node divide its memory."""
    return f"easyckpt-{_label(user)}.lock"


def is_arena_file(name: str, user: str | None = None, arena: str | None = None) -> bool:
    """Is this a :func:`slot_file` or an :func:`owner_file` name, of that user and arena where they are given?"""
    match = _arena_file.fullmatch(name)
    return match is not None and _has(match, user, arena, None)


def is_slot_file(name: str, user: str | None = None, arena: str | None = None, rank: int | None = None) -> bool:
    """Is this a :func:`slot_file` name, of that user, arena and rank where they are given?"""
    match = _arena_file.fullmatch(name)
    return match is not None and match["slot"] is not None and _has(match, user, arena, rank)


def parse_arena_file(name: str) -> tuple[str, str, int, int | None] | None:
    """(user's label, arena id, rank, slot) of a name of an arena; the slot is None for an :func:`owner_file`."""
    match = _arena_file.fullmatch(name)
    if match is None:
        return None
    return match["user"], match["arena"], int(match["rank"]), None if match["slot"] is None else int(match["slot"])


def is_audit_memory(name: str) -> bool:
    """Is this the name of a directory that an audit keeps its runs' shared memory in?"""
    return name.startswith(AUDIT_MEMORY) and safe_name(name)


def _has(match: re.Match[str], user: str | None, arena: str | None, rank: int | None) -> bool:
    return (
        (user is None or match["user"] == _label(user))
        and (arena is None or match["arena"] == arena)
        and (rank is None or int(match["rank"]) == rank)
    )
