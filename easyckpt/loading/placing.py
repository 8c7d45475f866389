"""What lies where: in which shard files the tensors that a rank wants are, and where in memory they go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from easyckpt.errors import DamagedCheckpoint
from easyckpt.format.codec import path_text
from easyckpt.format.image import Layout, Leaf, align
from easyckpt.format.manifest import Index, ShardRecord


@dataclass(frozen=True, slots=True)
class Part:
    """A range of one shard file and its place in the image: file bytes from `begin` on go to `place` on."""

    layout: Layout
    shard: ShardRecord
    begin: int
    place: int
    needed: tuple[Leaf, ...]
    """Leaves of `layout` with bytes in this range that somebody wants."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that one rank reads: its parts, the place of each of its leaves in the image, and how large that is."""

    parts: tuple[Part, ...]
    places: tuple[int | None, ...]
    nbytes: int


def plan_of(index: Index, owner: Index, wanted: Callable[[Leaf], bool], where: str) -> Plan:
    """Where each wanted leaf comes from and goes to. `owner` is the index whose shard has the replicated leaves."""
    layout = index.layout
    chosen = [wanted(leaf) for leaf in layout.leaves]
    if owner is index:
        needed = tuple(leaf for leaf, ask in zip(layout.leaves, chosen, strict=True) if ask)
        places = tuple(leaf.offset if ask else None for leaf, ask in zip(layout.leaves, chosen, strict=True))
        part = Part(layout, index.shard, index.shard.header_bytes, 0, needed)
        _check_coverage(index, needed, where)
        return Plan((part,), places, align(index.shard.size - index.shard.header_bytes))
    source = owner.layout
    start, place = source.replicated_offset, align(layout.own_bytes)
    theirs = {leaf.path: leaf for leaf in source.leaves if leaf.replicated}
    own: list[Leaf] = []
    shared: list[Leaf] = []
    found: list[int | None] = []
    for leaf, ask in zip(layout.leaves, chosen, strict=True):
        if not ask:
            found.append(None)
        elif not leaf.replicated:
            own.append(leaf)
            found.append(leaf.offset)
        else:
            twin = theirs.get(leaf.path)
            if twin is None or (twin.dtype, twin.shape, twin.order) != (leaf.dtype, leaf.shape, leaf.order):
                raise DamagedCheckpoint(
                    f"{where}: {path_text(leaf.path)[:200]} is replicated, and {owner.shard.name} does not hold it"
                )
            shared.append(twin)
            found.append(place + twin.offset - start)
    _check_coverage(owner, shared, where)
    parts = (
        Part(layout, index.shard, index.shard.header_bytes, 0, tuple(own)),
        Part(source, owner.shard, owner.shard.header_bytes + start, place, tuple(shared)),
    )
    # What is mapped is never more than what the files, whose sizes are checked, can fill.
    shared_bytes = source.image_bytes - start if any(leaf.nbytes for leaf in shared) else 0
    return Plan(parts, tuple(found), place + align(shared_bytes))


def _check_coverage(index: Index, needed: Iterable[Leaf], where: str) -> None:
    """Every needed leaf lies within the bytes that `index` says its shard holds."""
    end = index.shard.size - index.shard.header_bytes
    for leaf in needed:
        if leaf.nbytes and leaf.offset + leaf.nbytes > end:
            raise DamagedCheckpoint(
                f"{where}: {index.shard.name} does not hold {path_text(leaf.path)[:200]}, and no other shard does"
            )
