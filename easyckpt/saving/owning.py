"""Owning a root without a job: for what the command line changes in it. A job that lives is refused by its name."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator

from easyckpt.config import CheckpointConfig
from easyckpt.errors import EasyckptError, LeaseLost, RootInUse
from easyckpt.format import memory_names
from easyckpt.memory.owner import OwnerLock
from easyckpt.memory.place import memory_directory, user_name
from easyckpt.storage.base import Storage
from easyckpt.storage.lease import Lease
from easyckpt.storage.lease_chain import look

logger = logging.getLogger("easyckpt")


@contextlib.contextmanager
def owned_root(
    storage: Storage, run: str, config: CheckpointConfig, on_wait: Callable[[str], None] | None = None
) -> Iterator[Callable[[], None]]:
    """Own the existing root of `storage`, whose run is `run`, as a job that starts now would.

    Yields what raises LeaseLost once that is over, to be called before each change of the root. `on_wait` hears what is
    waited for while another job may own it. Raises RootInUse, which names the owner, where one lives.
    """
    storage.makedirs("")  # where records lie apart, their directory is missing as long as there are only copies
    directory, _ = memory_directory(config.memory_dir)
    arena = memory_names.arena_id(run, os.path.realpath(storage.root))
    # The lock of the job's rank 0: a job that lives here holds it, and one that starts meanwhile does not get it.
    owner = os.path.join(directory, memory_names.owner_file(user_name(), arena, 0))
    with owned_arenas([owner], storage), owned_lease(storage, run, owner, config, on_wait) as check:
        yield check


@contextlib.contextmanager
def owned_arenas(owners: Collection[str], storage: Storage) -> Iterator[None]:
    """Own the arenas of these owner files, as a job that starts now would: it waits, or this refuses."""
    with contextlib.ExitStack() as stack:
        for path in sorted(owners):
            lock = OwnerLock(path)
            if not lock.try_acquire():
                raise RootInUse(
                    f"{storage.root} is in use by {OwnerLock.describe_holder(path)} ({path} is locked): stop that job "
                    "first"
                )
            stack.callback(_give_back, lock, storage)
        yield


def _give_back(lock: OwnerLock, storage: Storage) -> None:
    """Release `lock`, without a trace if it was made for this.

    A lease that could not be released names it: the file, found free, proves to the next owner that this one is gone.
    """
    try:
        seen = look(storage)
        named = seen is not None and (seen.owner is None or seen.owner.lock == lock.path)
    except (EasyckptError, OSError):
        named = True
    lock.release(unlink=lock.made and not named)


@contextlib.contextmanager
def owned_lease(
    storage: Storage, run: str, owner: str, config: CheckpointConfig, on_wait: Callable[[str], None] | None = None
) -> Iterator[Callable[[], None]]:
    """Hold the lease of a root, renewed, while the owner file `owner` is locked; see :func:`owned_root`."""
    lease = Lease(
        storage,
        root_lock_path=owner,
        incarnation=secrets.token_hex(4),
        run=run,
        timeout=config.lease_timeout,
        is_free=OwnerLock.is_free,
    )
    lease.acquire(on_wait)
    try:
        with _renewed(lease, config.lease_interval):
            yield lease.check
    finally:
        lease.release()


@contextlib.contextmanager
def _renewed(lease: Lease, interval: float) -> Iterator[None]:
    """Show that this process lives: what it does may take longer than the lease's timeout."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(interval):
            try:
                lease.renew()
            except LeaseLost:  # which is looked at before each change of the root
                return
            except (EasyckptError, OSError) as error:
                logger.warning("renewing the lease failed, will try again: %s", error)

    thread = threading.Thread(target=renew, name="easyckpt-renewal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
