"""What one rank holds of a checkpoint, whatever its files look like: tensors that can be read piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from easyckpt.format.canonical import Json, dumps
from easyckpt.format.codec import Path, path_to_json
from easyckpt.format.image import Layout, LeafSpec

OnBytes = Callable[[int], None]


def ignore(count: int) -> None:
    """The OnBytes for whoever shows no progress."""


class Stretch(Protocol):
    """One tensor, wherever its bytes are: contiguous with its dimensions in `spec.order`."""

    @property
    def spec(self) -> LeafSpec:
        """What it is, and where in the state."""
        ...

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        ...

    @property
    def position(self) -> tuple[str, int]:
        """File and offset of its bytes. Who reads many tensors in this order reads each file once."""
        ...

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Its bytes from `begin` on, at least one element and at most up to `end`, as a flat uint8 tensor.

        What is returned is only lent: it may change at the next read of any tensor of the same checkpoint. Raises
        DamagedCheckpoint where the bytes are not those that were committed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds."""

    layout: Layout
    objects: Json
    stretches: Sequence[Stretch]
    """By leaf number; those that another rank wrote for this one, too."""
    written: Sequence[bool]
    """By leaf number: this rank wrote it."""


class Source(Protocol):
    """The files of one checkpoint."""

    def held(self, rank: int) -> Held:
        """What `rank` holds. Raises FormatError naming the file."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def place(path: Path) -> bytes:
    """A key for `path` that tells 1 from True and 1.0."""
    return dumps(path_to_json(path))
