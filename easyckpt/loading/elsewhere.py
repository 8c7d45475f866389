"""Restoring from one checkpoint that lies anywhere: it is only read, by all ranks together."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from easyckpt import catalog
from easyckpt.distributed.agree import done_by_rank_0
from easyckpt.distributed.ranks import Ranks
from easyckpt.distributed.rendezvous import Channel
from easyckpt.errors import DamagedCheckpoint
from easyckpt.loading.apply import restore_agreed
from easyckpt.loading.loader import Restored, fit
from easyckpt.loading.reader import OpenCheckpoint, run_now, telling
from easyckpt.loading.resolve import Candidate
from easyckpt.loading.snapshot import Snapshot
from easyckpt.state.apply import apply_all
from easyckpt.state.components import Component
from easyckpt.storage.local import LocalStorage


def restore_elsewhere(
    path: str,
    live: Mapping[str, Component],
    names: Collection[str] | None,
    *,
    channel: Channel,
    ranks: Ranks,
    open_checkpoint: OpenCheckpoint,
    timeout: float,
) -> Restored:
    """Restore the components `names` of `live` (None: all) from the directory `path`. Raises as Checkpointer.load."""
    parent, name = os.path.split(os.path.realpath(path))
    storage = LocalStorage(parent)

    def find() -> dict[str, Any]:
        try:
            manifest = catalog.read_manifest(storage, name)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{path} has no manifest") from None
        source = Candidate(
            step=manifest.step, tier="storage", timeline=manifest.timeline, source=name, attempt=manifest.attempt
        )
        return source.to_json()

    found = Candidate.from_json(done_by_rank_0(channel, ranks, "a checkpoint of another root", find, timeout))

    def open_candidate(candidate: Candidate) -> Snapshot:
        return open_checkpoint(
            storage,
            candidate.source,
            rank=ranks.rank,
            world_size=ranks.world_size,
            attempt=candidate.attempt,
            image=None,
            submit=telling(run_now, channel.busy),
        )

    def apply(snapshot: Snapshot) -> None:
        image = snapshot.layout
        apply_all(live, image, image.trees, snapshot.objects, snapshot.leaf, components=names)

    taken = restore_agreed(
        channel,
        [found],
        open_candidate,
        lambda snapshot: fit(snapshot, live, True, names, lambda step, what: None),
        apply,
        timeout=timeout,
    )
    assert taken is not None  # one that is damaged is an error
    return Restored(taken.step, "storage", path, ranks.world_size, taken.timeline)
