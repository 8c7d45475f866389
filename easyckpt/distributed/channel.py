"""Agreement between all ranks on the training thread: an exchange of values through the store, never a collective."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn, Protocol

from easyckpt.distributed.mailbox import Json, board_key, dump, load, post_key
from easyckpt.distributed.store import StoreClient
from easyckpt.errors import PeerError, PeerFailed, PeerTimeout

#: Keys of one exchange are reused three exchanges later: then every rank has certainly deleted its own.
_GENERATIONS: Final = 3
#: Between two signs of life.
_BEAT_SECONDS: Final = 0.5
#: What rank 0 adds to the count of those who have left; more than there are ranks.
_DEPARTURE_OF_RANK_0: Final = 1 << 32


class Channel(Protocol):
    """Agreement between all ranks, which call the same methods in the same order. Never a collective."""

    def exchange(self, name: str, value: Json, timeout: float) -> list[Json]:
        """Every rank's value, by rank. PeerTimeout names the ranks that did not come within `timeout` seconds."""

    def broadcast(self, name: str, value: Json, timeout: float) -> Json:
        """Rank 0's value, on every rank; also waits for all ranks."""

    def busy(self) -> None:
        """Tell the ranks that wait that this one has got on with what they wait for: their timeout begins anew.

        For work whose time grows with the state (reading it). Costs next to nothing when called often; never raises.
        """

    def fail(self, reason: str) -> None:
        """Tell the ranks that wait, now or later, that this one will not come: PeerFailed with `reason`.

        Never raises. This rank's channel is of no use afterwards.
        """

    def close(self, linger: float = 0.0) -> None:
        """Leave, after the mailbox's last use; rank 0 stays for up to `linger` seconds until all others have left.

        Never raises. The last rank to leave deletes what is left of this Checkpointer in the store.
        """


class LocalChannel:
    """Channel of a single process."""

    def exchange(self, name: str, value: Json, timeout: float) -> list[Json]:
        """The own value, as JSON would return it."""
        return [load(dump(value))]

    def broadcast(self, name: str, value: Json, timeout: float) -> Json:
        """The own value, as JSON would return it."""
        return load(dump(value))

    def busy(self) -> None:
        """Nobody to tell."""

    def fail(self, reason: str) -> None:
        """Nobody to tell."""

    def close(self, linger: float = 0.0) -> None:
        """Nobody to leave."""


class StoreChannel:
    """Channel over the c10d store. After an error it is broken for good: the ranks may be out of step."""

    def __init__(self, client: StoreClient, prefix: str, rank: int, world_size: int) -> None:
        self._client = client
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._number = 0
        self._broken: PeerError | None = None
        self._left = False
        self._beats = 0
        self._next_beat = 0.0

    def exchange(self, name: str, value: Json, timeout: float) -> list[Json]:
        """Every rank's value, by rank."""
        if self._broken is not None:
            raise type(self._broken)(f"{name}: not tried, an earlier agreement failed: {self._broken}")
        data = dump({"number": self._number, "name": name, "value": value})
        try:
            return self._exchange(name, data, timeout)
        except PeerTimeout as error:
            self._give_up(error)  # a rank that comes later must not believe that all have agreed
            raise
        except PeerError as error:
            self._broken = error
            raise
        except BaseException:
            self._give_up(PeerFailed(f"{name!r} was interrupted on rank {self._rank}"))
            raise

    def _exchange(self, name: str, data: bytes, timeout: float) -> list[Json]:
        deadline = time.monotonic() + timeout
        beats: dict[int, bytes] = {}
        generation = self._number % _GENERATIONS
        keys = [exchange_key(self._prefix, generation, rank) for rank in range(self._world_size)]
        self._client.set(keys[self._rank], data, deadline)
        for _ in polls():
            self._raise_if_failed(name, deadline)
            if self._client.check(keys, deadline):
                break
            if time.monotonic() >= deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._client.check([key])]
                heard, beats = beats, self._beats_of(missing)
                if silent := [rank for rank in missing if beats.get(rank) == heard.get(rank)]:
                    raise_timeout(silent, timeout, name)
                deadline = time.monotonic() + timeout
        messages: list[Any] = [load(message) for message in self._client.get_many(keys, deadline)]
        # All have sent this one, so all have finished reading the one before.
        before = (self._number - 1) % _GENERATIONS
        self._client.delete([exchange_key(self._prefix, before, self._rank)], deadline)
        for rank, message in enumerate(messages):
            if (message["number"], message["name"]) != (self._number, name):
                raise PeerError(
                    f"the ranks are out of step: rank {rank} is at {message['name']!r}, rank {self._rank} at {name!r}."
                    " All ranks must make the same calls to the Checkpointer in the same order"
                )
        self._number += 1
        return [message["value"] for message in messages]

    def broadcast(self, name: str, value: Json, timeout: float) -> Json:
        """Rank 0's value, on every rank."""
        return self.exchange(name, value if self._rank == 0 else None, timeout)[0]

    def busy(self) -> None:
        """Tell the ranks that wait that this one gets on."""
        now = time.monotonic()
        if now >= self._next_beat and self._broken is None:
            self._next_beat = now + _BEAT_SECONDS
            self._beats += 1
            with contextlib.suppress(PeerError):  # the next agreement meets it again, and raises it
                self._client.set(beat_key(self._prefix, self._rank), b"%d %d" % (self._number, self._beats))

    def _beats_of(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """The last sign of life of those of `ranks` that gave one since the last agreement."""
        keys = {rank: beat_key(self._prefix, rank) for rank in ranks}
        there = {rank: key for rank, key in keys.items() if self._client.check([key])}
        beats = {rank: self._client.get_many([key])[0] for rank, key in there.items()}
        return {rank: beat for rank, beat in beats.items() if beat.startswith(b"%d " % self._number)}

    def fail(self, reason: str) -> None:
        """Tell the ranks that wait that this one will not come."""
        self._give_up(PeerFailed(reason))

    def _give_up(self, error: PeerError) -> None:
        if self._broken is None:
            self._broken = error
            message = {"rank": self._rank, "reason": str(error), "timeout": isinstance(error, PeerTimeout)}
            with contextlib.suppress(PeerError):  # then the others have lost the store too, and know
                self._client.set(failure_key(self._prefix), dump(message))

    def _raise_if_failed(self, name: str, deadline: float) -> None:
        key = failure_key(self._prefix)
        if self._client.check([key], deadline):
            failure: Any = load(self._client.get_many([key], deadline)[0])
            kind = PeerTimeout if failure["timeout"] else PeerFailed
            raise kind(f"{name}: rank {failure['rank']} gave up: {failure['reason']}")

    def close(self, linger: float = 0.0) -> None:
        """Leave; see Channel."""
        if self._left:
            return
        self._left = True
        try:
            self._leave(time.monotonic() + linger)
        except PeerError:
            pass  # nobody is left to say goodbye to, and nothing depends on it
        finally:
            self._broken = self._broken or PeerError("the Checkpointer was closed")
            self._client.close()

    def _leave(self, deadline: float) -> None:
        counter = departure_key(self._prefix)
        others = self._world_size - 1
        if self._rank == 0:
            for _ in polls():
                if self._client.add(counter, 0) >= others or time.monotonic() >= deadline:
                    break
        # Whoever makes the sum complete is the last one, and nobody looks at the counter after that.
        gone = self._client.add(counter, _DEPARTURE_OF_RANK_0 if self._rank == 0 else 1)
        if gone == _DEPARTURE_OF_RANK_0 + others:
            self._client.delete(list(all_keys(self._prefix, self._world_size)))


def raise_timeout(missing: Sequence[int], timeout: float, name: str) -> NoReturn:
    """Raise PeerTimeout for the ranks `missing` at `name`."""
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    raise PeerTimeout(
        f"{who} did not come to {name!r} within {timeout:g} s: look at the log of {who} first. If it is alive and only"
        " slow, raise peer_timeout; if it waits elsewhere, the ranks do not make the same calls"
    )


def exchange_key(prefix: str, generation: int, rank: int) -> str:
    """Where `rank` puts its value."""
    return f"{prefix}exchange/{generation}/{rank}"


def beat_key(prefix: str, rank: int) -> str:
    """Where `rank` counts its signs of life."""
    return f"{prefix}beat/{rank}"


def failure_key(prefix: str) -> str:
    """Where a rank that gives up says so."""
    return f"{prefix}failed"


def departure_key(prefix: str) -> str:
    """Where the ranks that left are counted."""
    return f"{prefix}left"


def all_keys(prefix: str, world_size: int) -> Iterator[str]:
    """Every key that a Checkpointer may have in the store."""
    for rank in range(world_size):
        yield post_key(prefix, rank)
        yield beat_key(prefix, rank)
        for generation in range(_GENERATIONS):
            yield exchange_key(prefix, generation, rank)
    yield from (board_key(prefix), failure_key(prefix), departure_key(prefix))


def polls() -> Iterator[None]:
    """Come back at once, then in growing intervals of 0.2 to 30 ms."""
    pause = 0.0002
    while True:
        yield
        time.sleep(pause)
        pause = min(pause * 1.3, 0.03)
