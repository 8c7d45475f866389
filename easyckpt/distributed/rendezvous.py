"""How the ranks find each other and agree on values, over connections of their own to the c10d store.

``connect`` gives a Checkpointer its Channel (for the training thread) and Mailbox (for the coordinator thread). Their
keys share a random prefix that rank 0 draws and each rank confirms in a handshake of three steps (hello with a random
token, welcome with all tokens, acknowledgement): torchrun keeps one store over all restarts of a job, and the restart
count differs between nodes, so neither may decide whose keys are read. The number of keys is fixed per Checkpointer.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch.distributed as dist

from easyckpt.distributed.channel import Channel, LocalChannel, StoreChannel, all_keys, polls, raise_timeout
from easyckpt.distributed.mailbox import LocalMailbox, Mailbox, StoreMailbox, dump, load
from easyckpt.distributed.ranks import Ranks
from easyckpt.distributed.store import StoreClient, store_of

__all__ = [
    "Channel",
    "LocalChannel",
    "LocalMailbox",
    "Mailbox",
    "StoreChannel",
    "StoreClient",
    "connect",
    "settle_locality",
]

#: Prefixes of the Checkpointers that this process made as rank 0; the last rank to leave deletes their keys.
_own_prefixes: Final[set[str]] = set()


def connect(ranks: Ranks, purpose: str, timeout: float) -> tuple[Channel, Mailbox]:
    """Meet the other ranks' call of the same `purpose` and agree on a prefix for this Checkpointer's keys.

    All ranks of `ranks.group` call it, in the same order for one purpose; a call of a killed predecessor is never
    mistaken for one of this job. `timeout` (seconds) bounds the meeting, and each later call of the mailbox. Raises
    PeerTimeout naming the ranks that did not come, PeerError for a lost store, UsageError for an unusable one.
    """
    if ranks.alone:
        return LocalChannel(), LocalMailbox()
    store = store_of(ranks.group)
    clients: list[StoreClient] = []
    try:
        for _ in range(2):
            clients.append(StoreClient(store, timeout, ranks.world_size))
        meeting = _Meeting(clients[0], ranks, _place_of(ranks.group, purpose), timeout)
        prefix = meeting.as_rank_0(clients[1]) if ranks.rank == 0 else meeting.as_other(clients[1])
    except BaseException:
        for client in clients:
            client.close()
        raise
    channel = StoreChannel(clients[0], prefix, ranks.rank, ranks.world_size)
    return channel, StoreMailbox(clients[1], prefix, ranks.rank, ranks.world_size)


class _Meeting:
    """The handshake. Its keys are fixed, may hold anything of dead predecessors, and are told apart by tokens."""

    def __init__(self, client: StoreClient, ranks: Ranks, place: str, timeout: float) -> None:
        self._client = client
        self._ranks = ranks
        self._place = place
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._token = secrets.token_hex(16)

    def as_other(self, mail_client: StoreClient) -> str:
        """Say hello until rank 0's welcome repeats the token; only then is it an answer to this very process."""
        rank = self._ranks.rank
        self._client.set(f"{self._place}hello/{rank}", self._token.encode(), self._deadline)
        for _ in polls():
            welcome = self._welcome()
            if welcome is not None and welcome["tokens"].get(str(rank)) == self._token:
                break
            if time.monotonic() >= self._deadline:
                raise_timeout([0], self._timeout, "the meeting of all ranks")
        prefix = str(welcome["prefix"])
        StoreMailbox(mail_client, prefix, rank, self._ranks.world_size).prepare()
        self._client.set(f"{self._place}ack/{rank}", f"{prefix} {self._token}".encode(), self._deadline)
        return prefix

    def as_rank_0(self, mail_client: StoreClient) -> str:
        """Welcome whoever says hello until every rank has acknowledged."""
        self._sweep()
        prefix = f"easyckpt/{secrets.token_hex(8)}/"
        _own_prefixes.add(prefix)
        StoreMailbox(mail_client, prefix, 0, self._ranks.world_size).prepare()
        tokens: dict[str, str] = {}
        missing = list(range(1, self._ranks.world_size))
        for _ in polls():
            # Hellos are read before acknowledgements: a rank that is on its way to the next meeting already has
            # acknowledged this one before its new hello, and must not be welcomed to this one with it.
            hellos = self._read("hello", missing)
            acks = self._read("ack", missing)
            missing = [rank for rank in missing if acks.get(rank) != f"{prefix} {tokens.get(str(rank))}"]
            if not missing:
                return prefix
            fresh = {str(rank): hellos[rank] for rank in missing if rank in hellos}
            if not fresh.items() <= tokens.items():
                tokens |= fresh
                self._client.set(f"{self._place}welcome", dump({"prefix": prefix, "tokens": tokens}), self._deadline)
            if time.monotonic() >= self._deadline:
                raise_timeout(missing, self._timeout, "the meeting of all ranks")
        raise AssertionError("polling never ends by itself")

    def _welcome(self) -> Any:
        key = f"{self._place}welcome"
        if not self._client.check([key], self._deadline):
            return None
        return load(self._client.get_many([key], self._deadline)[0])

    def _read(self, what: str, ranks: Sequence[int]) -> dict[int, str]:
        """The texts under `what` of those of `ranks` that have written any."""
        keys = {rank: f"{self._place}{what}/{rank}" for rank in ranks}
        if not self._client.check(list(keys.values()), self._deadline):
            keys = {rank: key for rank, key in keys.items() if self._client.check([key], self._deadline)}
        if not keys:
            return {}
        values = self._client.get_many(list(keys.values()), self._deadline)
        return {rank: value.decode(errors="replace") for rank, value in zip(keys, values, strict=True)}

    def _sweep(self) -> None:
        """Delete the keys of a predecessor that was killed, so that restarts do not fill the store."""
        welcome = self._welcome()
        if welcome is not None and welcome["prefix"] not in _own_prefixes:
            self._client.delete(list(all_keys(welcome["prefix"], self._ranks.world_size)), self._deadline)


def settle_locality(ranks: Ranks, channel: Channel, node: str, timeout: float) -> Ranks:
    """`ranks` with the true local_rank, local_world_size and neighbours, agreed by all ranks.

    `node` is any text that two ranks have in common exactly when they share memory: host name, boot id (where it can be
    read), and device and inode of the memory directory (two containers of one host have different ones).
    """
    nodes = channel.exchange("node", node, timeout)
    here = [rank for rank, other in enumerate(nodes) if other == node]
    local_rank, neighbours = here.index(ranks.rank), tuple(rank for rank in here if rank != ranks.rank)
    return replace(ranks, local_rank=local_rank, local_world_size=len(here), neighbours=neighbours)


def _place_of(group: Any, purpose: str) -> str:
    """The prefix of the meeting's keys: one for each process group and purpose."""
    members = ",".join(map(str, dist.get_process_group_ranks(group)))
    text = f"{getattr(group, 'group_name', '')}|{members}|{purpose}"
    return f"easyckpt/meet/{hashlib.sha256(text.encode()).hexdigest()[:16]}/"
