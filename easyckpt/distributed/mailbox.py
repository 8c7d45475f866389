"""State that the ranks show each other while they train: one post a rank, one board by rank 0, overwritten in place.

Nothing here waits for anybody. The coordinator thread of each rank has a mailbox with an own connection, so that it
is never held up by the training thread's exchanges, nor the other way round.
"""

from __future__ import annotations

import json
from typing import Any, Protocol, TypeAlias

from easyckpt.distributed.store import StoreClient

#: None, bool, int, float, str, list, or dict with str keys. Any, since whoever reads one knows its shape.
Json: TypeAlias = Any


class Mailbox(Protocol):
    """What the coordinators tell each other. Every call is bounded; a lost store raises PeerError."""

    def post(self, value: Json) -> None:
        """Overwrite this rank's post."""

    def posts(self) -> list[Json]:
        """The newest post of every rank, by rank; None for one that has posted nothing. In one round trip."""

    def publish(self, value: Json) -> None:
        """Overwrite the board. Rank 0 only."""

    def board(self) -> Json:
        """The newest board; None before the first one."""

    def close(self) -> None:
        """Give the connection up; later calls raise PeerError."""


class StoreMailbox:
    """Mailbox over the c10d store."""

    def __init__(self, client: StoreClient, prefix: str, rank: int, world_size: int) -> None:
        self._client = client
        self._rank = rank
        self._posts = [post_key(prefix, other) for other in range(world_size)]
        self._board = board_key(prefix)

    def prepare(self) -> None:
        """Create the keys that this rank writes; on every rank before any rank reads."""
        self._client.set(self._posts[self._rank], b"null")
        if self._rank == 0:
            self._client.set(self._board, b"null")

    def post(self, value: Json) -> None:
        """Overwrite this rank's post."""
        self._client.set(self._posts[self._rank], dump(value))

    def posts(self) -> list[Json]:
        """The newest post of every rank, by rank."""
        return [load(value) for value in self._client.get_many(self._posts)]

    def publish(self, value: Json) -> None:
        """Overwrite the board."""
        assert self._rank == 0, "only rank 0 publishes"
        self._client.set(self._board, dump(value))

    def board(self) -> Json:
        """The newest board."""
        return load(self._client.get_many([self._board])[0])

    def close(self) -> None:
        """Give the connection up."""
        self._client.close()


class LocalMailbox:
    """Mailbox of a single process: the same values as through a store, also in what JSON does to them."""

    def __init__(self) -> None:
        self._post = self._board = b"null"

    def post(self, value: Json) -> None:
        """Overwrite the post."""
        self._post = dump(value)

    def posts(self) -> list[Json]:
        """The one post."""
        return [load(self._post)]

    def publish(self, value: Json) -> None:
        """Overwrite the board."""
        self._board = dump(value)

    def board(self) -> Json:
        """The newest board."""
        return load(self._board)

    def close(self) -> None:
        """Nothing to give up."""


def post_key(prefix: str, rank: int) -> str:
    """Where `rank` posts."""
    return f"{prefix}post/{rank}"


def board_key(prefix: str) -> str:
    """Where rank 0 publishes."""
    return f"{prefix}board"


def dump(value: Json) -> bytes:
    """The bytes that go into the store."""
    return json.dumps(value, separators=(",", ":")).encode()


def load(data: bytes) -> Json:
    """The value back."""
    value: Json = json.loads(data)
    return value
