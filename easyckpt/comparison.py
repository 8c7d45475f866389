"""Two checkpoints, compared to the bit: which tensors and which other values differ, and by how much.

What counts is what a program would get back: a tensor's elements in their logical order, whatever memory format each
side kept them in, and the other state value by value. Where a tensor lived (CPU or GPU) does not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from easyckpt.catalog import Entry
from easyckpt.contents import Component, OnBytes, Opened, Stretch, ignore
from easyckpt.format.canonical import dumps
from easyckpt.format.codec import Path, path_text
from easyckpt.format.difference import ASIDE, further
from easyckpt.format.flat import Container, Plain
from easyckpt.storage.base import Storage
from easyckpt.tensor_comparison import Outcome, compare_tensors

#: Lines of the metrics file that a snapshot carries, with the time of the clock: a log, which no two runs share.
_CARRIED: Path = ("easyckpt.metrics", "unwritten")


def _counts(path: Path) -> bool:
    """Whether what lies there can make two runs different."""
    return path[:2] != _CARRIED and ASIDE not in path


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor, or one value of the other state, that differs."""

    component: str
    """The first element of the path."""
    path: str
    """As people write it."""
    rank: int
    largest: float | None
    """Largest absolute difference; 0 where only zeros' signs differ, NaN where a NaN is on one side or both, an int for
    whole numbers (exactly). None: not a matter of numbers."""
    differing: int
    """Elements whose bits differ; 0 for what cannot be compared element by element, and for what is no tensor."""
    note: str
    """What differs, such as ``only in A`` or ``[0, 3]: 0.1 against 0.2``."""


@dataclass(slots=True)
class Compared:
    """One component, over all ranks."""

    component: str
    tensors: int = 0
    """Tensors compared, those on one side only too; tied ones and what all ranks share count once."""
    values: int = 0
    """Values that are no tensors."""
    nbytes: int = 0
    """Bytes of the tensors (of the first checkpoint's, where it has them)."""
    differing: int = 0
    """Tensors and values that differ."""
    largest: float | None = None
    """The largest of the differences that are numbers; NaN where one is NaN."""
    first: str | None = None
    """Path of the first that differs, in the order of the checkpoint: tensors before other values."""

    @property
    def equal(self) -> bool:
        """Whether everything is equal to the bit."""
        return self.differing == 0


@dataclass(slots=True)
class Comparison:
    """What two checkpoints have in common."""

    components: dict[str, Compared] = field(default_factory=dict)
    """By name, in the order of the first checkpoint; those of the second alone come last."""
    differences: list[Difference] = field(default_factory=list)
    """All of them, by rank, and then in the order of the checkpoint."""

    @property
    def equal(self) -> bool:
        """Whether everything is equal to the bit."""
        return not self.differences


def compare(one: tuple[Storage, Entry], other: tuple[Storage, Entry], on_bytes: OnBytes | None = None) -> Comparison:
    """Compare two checkpoints, all ranks, streaming both past the cache in bounded memory.

    `on_bytes` hears how many bytes were read, of both together. Raises DamagedCheckpoint where bytes are not what was
    committed: what differs by accident is no difference.
    """
    result = Comparison()
    with Opened(*one, on_bytes or ignore) as here, Opened(*other, on_bytes or ignore) as there:
        for rank in range(max(here.world_size, there.world_size)):
            mine = here.components(rank) if rank < here.world_size else {}
            theirs = there.components(rank) if rank < there.world_size else {}
            compare_components(mine, theirs, rank, result)
    return result


def compare_components(mine: dict[str, Component], theirs: dict[str, Component], rank: int, result: Comparison) -> None:
    """Compare what one rank (or one file) holds on both sides, and add it to `result`."""
    for name in {**mine, **theirs}:
        total = result.components.setdefault(name, Compared(name))
        one, other = mine.get(name), theirs.get(name)
        for found in _component(one, other, rank, total):
            result.differences.append(found)
            total.differing += 1
            total.largest = further(total.largest, found.largest)
            total.first = total.first or found.path


def _component(one: Component | None, other: Component | None, rank: int, total: Compared) -> Iterator[Difference]:
    if one is None or other is None:
        alone = one or other
        assert alone is not None
        total.tensors += len(alone.primary)
        total.nbytes += sum(alone.tensors[key].nbytes for key in alone.primary)
        total.values += sum(isinstance(value, Plain) for value in alone.values.values())
        yield Difference(alone.name, alone.name, rank, None, 0, "only in B" if one is None else "only in A")
        return
    if one.kind != other.kind:
        yield Difference(one.name, one.name, rank, None, 0, f"kind {one.kind} against {other.kind}")
    primary = dict.fromkeys([*one.primary, *other.primary])
    found: dict[bytes, Difference] = {}
    # In the order of the file, so that each of its bytes is read once; told in the order of the checkpoint.
    for key in sorted(primary, key=lambda key: _position(one.tensors.get(key))):
        a, b = one.tensors.get(key), other.tensors.get(key)
        path = one.paths[key] if key in one.paths else other.paths[key]
        if not _counts(path):
            continue
        total.tensors += 1
        total.nbytes += sum(side.nbytes for side in (a or b,) if side)
        outcome = _tensors(a, b, key in other.values or key in one.values)
        if outcome is not None:
            found[key] = Difference(one.name, path_text(path), rank, *outcome)
    yield from (found[key] for key in primary if key in found)
    yield from _others(one, other, rank, total)


def _position(stretch: Stretch | None) -> tuple[bool, str, int]:
    """Those that are only on the other side come last."""
    return (True, "", 0) if stretch is None else (False, *stretch.position)


def _tensors(one: Stretch | None, other: Stretch | None, value: bool) -> Outcome | None:
    """As `compare_tensors`, for one that may be missing. `value`: something else is there, which is told elsewhere."""
    if one is not None and other is not None:
        return compare_tensors(one, other)
    return None if value else (None, 0, "only in B" if one is None else "only in A")


def _others(one: Component, other: Component, rank: int, total: Compared) -> Iterator[Difference]:
    """What is no tensor, and which tensors are tied."""
    told: Path | None = None
    for key in {**one.paths, **other.paths}:
        path = one.paths[key] if key in one.paths else other.paths[key]
        a, b = one.values.get(key), other.values.get(key)
        total.values += isinstance(a, Plain) or isinstance(b, Plain)
        if (told is not None and path[: len(told)] == told) or not _counts(path):
            continue
        largest = None
        if a is None and b is None:
            alone = (key in one.tensors) != (key in other.tensors)
            if alone and not (key in one.primary or key in other.primary):  # tied there, and told nowhere else
                note = "only in A" if key in one.tensors else "only in B"
            else:
                note = _tied(key, one, other)
        elif _identity(a) == _identity(b):
            continue
        else:
            note, largest = _values(a, b, one.tensors.get(key), other.tensors.get(key))
            told = path if isinstance(a, Container) or isinstance(b, Container) else None  # not what is in it, too
        if note:
            yield Difference(one.name, path_text(path), rank, largest, 0, note)


def _identity(value: Plain | Container | None) -> tuple[str, bytes] | None:
    """Equal for equal values only: Python's 1, 1.0 and True are three."""
    if value is None:
        return None
    return ("plain", dumps(value.json)) if isinstance(value, Plain) else ("container", value.kind.encode("utf-8"))


def _tied(key: bytes, one: Component, other: Component) -> str:
    """How a tensor is tied on one side and not, or elsewhere, on the other; empty where it is alike or only on one."""
    a, b = one.ties.get(key), other.ties.get(key)
    if a == b or key not in one.tensors or key not in other.tensors:
        return ""
    words = ["a tensor of its own" if tie is None else f"tied to {path_text(tie)}" for tie in (a, b)]
    return f"{words[0]} against {words[1]}"


def _values(
    a: Plain | Container | None, b: Plain | Container | None, tensor_a: Stretch | None, tensor_b: Stretch | None
) -> tuple[str, float | None]:
    words = []
    for value, tensor in ((a, tensor_a), (b, tensor_b)):
        if value is None:
            words.append("" if tensor is None else "a tensor")
        else:
            words.append(str(value) if isinstance(value, Plain) else f"a {value.kind}")
    if "" in words:
        return ("only in A" if words[0] else "only in B"), None
    largest = None
    if isinstance(a, Plain) and isinstance(b, Plain):
        x, y = a.number, b.number
        if x is not None and y is not None:
            with contextlib.suppress(OverflowError):  # a whole number that no float holds
                largest = abs(x - y)
    return (f"{words[0]} against {words[1]}" if words[0] != words[1] else f"{words[0]} of other bits"), largest
