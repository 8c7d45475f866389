"""One data loader's place as a value, and such values read out of a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from easyckpt.state.generators import check_host_states


@dataclass(slots=True)
class Position:
    """One loader's place. `own` are the generators that belong to the loader and its parts, by the part's name."""

    epoch: int = -1
    consumed: int = 0
    finished: bool = False
    total: int | None = None
    start: dict[str, Any] = field(default_factory=dict)
    """The host's generators when the epoch's first index was about to be drawn."""
    own_start: dict[str, torch.Tensor] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    """Their newest states: kept current by state_dict in tensors that stay the same objects."""
    live: dict[str, torch.Generator] = field(default_factory=dict)
    fresh: bool = False
    """Loaded, and its epoch or a later one not asked for since."""
    loops: int = 0
    """Loops begun in this process; the newest is the only one that may go on."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        for part, generator in self.live.items():
            state = generator.get_state()
            if part in self.own:
                self.own[part].copy_(state)
            else:
                self.own[part] = state
        names = ("epoch", "consumed", "finished", "total", "start", "own_start", "own")
        return {name: getattr(self, name) for name in names}


def parse_positions(state: Any) -> dict[str, Position]:
    """The positions in what `DataPosition.state_dict` has returned. Raises ValueError where it cannot be that."""
    try:
        return {str(name): _position(saved) for name, saved in state.items()}
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _position(saved: Mapping[str, Any]) -> Position:
    start, consumed = dict(saved["start"]), int(saved["consumed"])
    if start or consumed > 0:
        check_host_states(start)
    return Position(
        epoch=int(saved["epoch"]),
        consumed=consumed,
        finished=bool(saved["finished"]),
        total=None if saved["total"] is None else int(saved["total"]),
        start=copy.deepcopy(start),
        own_start=_states(saved["own_start"]),
        own=_states(saved["own"]),
        fresh=True,
    )


def _states(saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if not all(isinstance(state, torch.Tensor) and state.dtype == torch.uint8 for state in saved.values()):
        raise ValueError("the state of a loader's generator is malformed")
    return {str(part): state.clone() for part, state in saved.items()}
