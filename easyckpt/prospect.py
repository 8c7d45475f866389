"""A root that is opened, and looked into, before the objects of the job exist.

A framework that makes its optimizer late wants to know early where training will go on. So all ranks open the root,
restore the little that says so, and hand the opened root over to a Checkpointer once the objects are there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from typing_extensions import Self, Unpack

from easyckpt.config_sources import resolve
from easyckpt.dialects import Dialect
from easyckpt.framework import FrameworkCheckpointer
from easyckpt.ground import Ground
from easyckpt.loading.elsewhere import restore_elsewhere
from easyckpt.loading.loader import Loader, Restored
from easyckpt.loading.reader import run_now
from easyckpt.settings import Settings
from easyckpt.state.capture import StateCapture


class Prospect:
    """Of one job. All ranks make it, and call its methods in the same order."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        dialect: Dialect,
        *,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        process_group: Any = None,
        **settings: Unpack[Settings],
    ) -> None:
        """As a Checkpointer, with checkpoints of `dialect`."""
        self._ground = Ground(resolve(settings, config), process_group)
        try:
            self._ground.open(root, dialect)
        except BaseException as error:
            self._ground.__exit__(type(error), error, error.__traceback__)
            raise

    @property
    def root(self) -> str:
        """The root's absolute path."""
        return self._ground.opened.storage.root

    @property
    def storage(self) -> Any:
        """The root's storage."""
        return self._ground.opened.storage

    @property
    def ranks(self) -> Any:
        """Which rank this is, of how many."""
        return self._ground.ranks

    @property
    def channel(self) -> Any:
        """By which all ranks agree."""
        return self._ground.channel

    def look(self, state: Mapping[str, Any], *, step: int | None = None, timeline: str | None = None) -> Restored:
        """Restore the components in `state`, and nothing else, from the newest whole candidate, or from `step`.

        Several lines of training may have that step; `timeline` says whose is meant. Raises as Checkpointer.load does.
        The Checkpointer that is made of this restores the rest by `load_found`.
        """
        ground = self._ground
        opened, ranks = ground.opened, ground.ranks
        left_out = () if ground.config.audit is None else ground.config.audit.left_out
        loader = Loader(
            storage=opened.storage,
            naming=opened.dialect.naming,
            open_checkpoint=opened.dialect.open,
            arena=opened.arena,
            channel=ground.channel,
            ranks=ranks,
            run=opened.run,
            arena_id=opened.arena_id,
            capture=StateCapture(state, rank=ranks.rank, world_size=ranks.world_size),
            timeout=ground.config.peer_timeout,
            submit=run_now,
            emit=ground.events.emit,
        )
        wanted = tuple(name for name in state if name not in left_out)
        return loader.load(step=step, timeline=timeline, strict=True, components=wanted).restored

    @property
    def timeout(self) -> float:
        """Seconds that one rank waits for another."""
        return self._ground.config.peer_timeout

    def look_elsewhere(self, path: str, state: Mapping[str, Any]) -> Restored:
        """As `look`, in the checkpoint whose directory is `path`, in any root: it is only read."""
        live = StateCapture(state).components
        return restore_elsewhere(
            path,
            live,
            tuple(state),
            channel=self.channel,
            ranks=self.ranks,
            open_checkpoint=self._ground.opened.dialect.open,
            timeout=self.timeout,
        )

    def checkpointer(self, state: Mapping[str, Any]) -> FrameworkCheckpointer:
        """The Checkpointer of `state` in this root; this object is of no use any more."""
        made = FrameworkCheckpointer.__new__(FrameworkCheckpointer)
        made._build_on(self._ground, lambda ground: None, state)
        return made

    def close(self, error: BaseException | None = None) -> None:
        """Let go of the root without having saved anything; other ranks, which may wait, are told of an `error`."""
        self._ground.__exit__(None if error is None else type(error), error, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
