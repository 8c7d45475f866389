"""Work that one rank does for all, and errors that reach all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from easyckpt import errors
from easyckpt.distributed.mailbox import Json
from easyckpt.distributed.ranks import Ranks
from easyckpt.distributed.rendezvous import Channel


def done_by_rank_0(channel: Channel, ranks: Ranks, name: str, work: Callable[[], Json], timeout: float) -> Any:
    """Run `work` on rank 0 and return its result on every rank; an error of ours or of the system is raised on all.

    Work that may take longer than `timeout` calls `channel.busy` as it gets on.
    """
    failure: Exception | None = None
    answer: Json = None
    if ranks.rank == 0:
        try:
            answer = {"result": work()}
        except (errors.EasyckptError, OSError) as error:
            failure = error
            answer = {"error": type(error).__name__, "text": str(error)}
    answer = channel.broadcast(name, answer, timeout)
    if failure is not None:
        raise failure
    assert isinstance(answer, dict)
    if "error" in answer:
        raise _rebuilt(str(answer["error"]), f"rank 0: {answer['text']}")
    return answer["result"]


def all_good(channel: Channel, name: str, failure: Exception | None, timeout: float) -> None:
    """Meet the other ranks; if any of them comes with a failure, every rank raises."""
    value: Json = None if failure is None else {"error": type(failure).__name__, "text": str(failure)}
    answers = channel.exchange(name, value, timeout)
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if isinstance(answer, dict):
            raise _rebuilt(str(answer["error"]), f"rank {rank}: {answer['text']}")


def done_by_all(channel: Channel, name: str, work: Callable[[], Json] | None, timeout: float) -> list[Any]:
    """Run `work` on the ranks that have some, and return all results, by rank, on every rank.

    An error of one is raised on all. Work that may take longer than `timeout` calls `channel.busy` as it gets on.
    """
    failure: Exception | None = None
    answer: Json = {"result": None}
    try:
        if work is not None:
            answer = {"result": work()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait for this rank
        failure = error
        answer = {"error": type(error).__name__, "text": str(error)}
    answers = channel.exchange(name, answer, timeout)
    if failure is not None:
        raise failure
    for rank, other in enumerate(answers):
        if "error" in other:
            raise _rebuilt(str(other["error"]), f"rank {rank}: {other['text']}")
    return [other["result"] for other in answers]


def _rebuilt(name: str, text: str) -> errors.EasyckptError:
    """The same class of error as on the rank where it happened, if it is one of ours."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.EasyckptError):
        return kind(text)
    return errors.PeerFailed(f"{name}: {text}")
