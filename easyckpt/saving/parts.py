"""What a Checkpointer saves with, put together by `wiring`."""

from __future__ import annotations

from dataclasses import dataclass

from easyckpt.config import CheckpointConfig
from easyckpt.distributed.mailbox import Mailbox
from easyckpt.distributed.ranks import Ranks
from easyckpt.distributed.rendezvous import Channel
from easyckpt.events import EventLog
from easyckpt.format.layout import NamingScheme
from easyckpt.memory.arena import Arena
from easyckpt.saving.accumulation import AccumulationWatch
from easyckpt.saving.coordinator import Coordinator
from easyckpt.saving.flusher import Flusher
from easyckpt.saving.metrics import Metrics
from easyckpt.saving.staging import Stager
from easyckpt.state.capture import StateCapture
from easyckpt.storage.base import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverParts:
    """The rooms that a Saver works with."""

    config: CheckpointConfig
    ranks: Ranks
    channel: Channel
    mailbox: Mailbox
    storage: Storage
    naming: NamingScheme
    run: str
    arena_id: str
    incarnation: str
    capture: StateCapture
    arena: Arena
    stager: Stager
    accumulation: AccumulationWatch
    coordinator: Coordinator
    flusher: Flusher
    events: EventLog
    metrics: Metrics
