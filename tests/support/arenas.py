"""Arenas without a job: what they are called, and what their slots hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from easyckpt.format import memory_names
from easyckpt.memory.arena import Arena
from easyckpt.memory.header import SlotMeta

USER = "tester"
RUN = "ab" * 16
ARENA = memory_names.arena_id(RUN, "/some/root")
MIB = 1 << 20
META = SlotMeta(
    run=RUN,
    arena_id=ARENA,
    incarnation="first",
    timeline="t1",
    step=0,
    rank=0,
    world_size=2,
    layout_digest="d",
    image_bytes=MIB,
)


def make(
    directory: str | Path,
    count: int = 3,
    *,
    rank: int = 0,
    run: str = RUN,
    arena_id: str = ARENA,
    budget_bytes: int = 256 * MIB,
    **options: Any,
) -> Arena:
    """The arena of a rank's second start; what `META` says is of the first."""
    return Arena(
        str(directory), USER, arena_id, rank, count, run=run, incarnation="second", budget_bytes=budget_bytes, **options
    )
