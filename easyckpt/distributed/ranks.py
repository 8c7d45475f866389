"""Which process of the job this one is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from easyckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this process in the job, or in the process group that the Checkpointer was given."""

    rank: int
    world_size: int
    local_rank: int
    """Number among the processes that share this node's memory."""
    local_world_size: int
    group: Any = field(default=None, compare=False, repr=False)
    """The process group; None for a single process."""
    neighbours: tuple[int, ...] = ()
    """The other ranks that share this node's memory, once `rendezvous.settle_locality` has found them."""

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.world_size == 1


def discover(process_group: Any = None, environ: Mapping[str, str] | None = None) -> Ranks:
    """Find out the ranks from `process_group` (None: the default group where one is initialised).

    Where the environment does not tell how many processes share the node (no torchrun, or a subgroup), all of the
    group are taken to share it, which is safe for dividing memory; `rendezvous.settle_locality` finds the truth.
    Raises UsageError for WORLD_SIZE > 1 without an initialised process group, and in a process outside the group.
    """
    environ = os.environ if environ is None else environ
    available = dist.is_available() and dist.is_initialized()
    if not available:
        if process_group is not None:
            raise UsageError("process_group was given, but torch.distributed is not initialised (or destroyed already)")
        return _alone(environ)
    group = dist.group.WORLD if process_group is None else process_group
    try:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"process_group is not a live process group of this process: {error}") from error
    if rank < 0:
        raise UsageError("this process is not a member of process_group: only its members may make the Checkpointer")
    local = _local(environ) if group is dist.group.WORLD else None
    local_rank, local_world_size = local if local is not None else (rank, world_size)
    return Ranks(rank, world_size, local_rank, local_world_size, group)


def _alone(environ: Mapping[str, str]) -> Ranks:
    world_size = environ.get("WORLD_SIZE", "1")
    if world_size not in ("", "1"):
        raise UsageError(
            f"WORLD_SIZE is {world_size}, but torch.distributed is not initialised: call"
            " torch.distributed.init_process_group() before making the Checkpointer, on every rank"
        )
    return Ranks(0, 1, 0, 1)


def _local(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """What torchrun says about the node; None where it says nothing that makes sense."""
    try:
        rank, size = int(environ["LOCAL_RANK"]), int(environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return (rank, size) if 0 <= rank < size else None
