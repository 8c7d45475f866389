"""What has become of a flush that nobody decides any more: the root is asked, for a bounded time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout

from easyckpt.errors import EasyckptError, OutcomeUnknown, StorageError
from easyckpt.saving.messages import Flush
from easyckpt.saving.worker import Worker


def answer(
    flush: Flush, error: EasyckptError, committed_by: Callable[[Flush], bool], timeout: float
) -> OutcomeUnknown | None:
    """None when `flush` is committed, as `committed_by` says; else that nobody knows, because of `error`.

    A storage that has no answer within `timeout` seconds is waited for no longer.
    """
    try:
        if _look(flush, committed_by, timeout):
            return None
        return OutcomeUnknown(f"step {flush.step}: {error}; it is not committed so far")
    except Exception as problem:  # noqa: BLE001 - whatever it is (no thread starts while Python ends): all must end
        return OutcomeUnknown(f"step {flush.step}: {error}; looking into the root failed too: {problem}")


def _look(flush: Flush, committed_by: Callable[[Flush], bool], timeout: float) -> bool:
    worker = Worker("easyckpt-look")
    try:
        return worker.submit(lambda: committed_by(flush)).result(timeout)
    except FutureTimeout:
        raise StorageError(f"no answer for {timeout:g} s") from None
    finally:
        worker.stop(0.0)
