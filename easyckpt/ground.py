"""What a Checkpointer stands on before there is a state: its settings, the other ranks, and an opened root."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType
from typing import Any

from easyckpt import farewell, opening, wiring
from easyckpt.config import CheckpointConfig
from easyckpt.dialects import Dialect
from easyckpt.events import EventLog
from easyckpt.opening import OpenedRoot


class Ground:
    """Used with ``with``: what was taken is let go of at its end, unless `keep` was called. All ranks make one."""

    events: EventLog
    opened: OpenedRoot

    def __init__(self, config: CheckpointConfig, process_group: Any) -> None:
        self.config = config
        self.undo = contextlib.ExitStack()
        """How to let go of it, last things first."""
        self.ranks, self.channel, self.mailbox = wiring.meet(process_group, config)
        self.undo.callback(self.channel.close)
        self.undo.callback(self.mailbox.close)

    def open(self, root: str | os.PathLike[str], dialect: Dialect) -> None:
        """Own the root (an audit's, where that asks for one) and this rank's memory. Raises as a Checkpointer does."""
        audit = self.config.audit
        place = audit.root if audit is not None and audit.root is not None else root
        self.events = EventLog(self.ranks.rank, None, self.config.log_file_path)
        self.undo.callback(self.events.close)
        self.opened, self.ranks = opening.open_root(
            place, self.config, self.ranks, self.channel, events=self.events, dialect=dialect
        )
        self.undo.callback(self.opened.arena.close, remove=False)
        self.undo.callback(farewell.release_lease, self.opened, self.events)

    def keep(self) -> None:
        """Whoever stands on it now lets go of it."""
        self.undo.pop_all()

    def __enter__(self) -> Ground:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.channel.fail(f"{type(error).__name__}: {error}")  # before the rest is undone: others wait
        self.undo.close()
