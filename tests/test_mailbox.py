"""Mailbox: overwritten state over a real store, bounded calls, a store that does not grow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from easyckpt.distributed.mailbox import LocalMailbox, StoreMailbox
from easyckpt.distributed.store import StoreClient, base_store
from easyckpt.errors import PeerError, UsageError

SERVER = """
import datetime, sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=60), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
LONG = timedelta(seconds=3)


def tcp_store(port=0, *, server=True):
    limit = timedelta(seconds=60)
    return dist.TCPStore("127.0.0.1", port, None, server, limit, wait_for_workers=False)


def stores(kind, path):
    if kind == "tcp":
        return tcp_store()
    return dist.HashStore() if kind == "hash" else dist.FileStore(str(path / "store"), 2)


def mailboxes(store, timeout=60.0):
    boxes = [StoreMailbox(StoreClient(store, timeout, 2), "easyckpt/x/", rank, 2) for rank in range(2)]
    for box in boxes:
        box.prepare()
    return boxes


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_posts_and_board(kind, tmp_path):
    store = dist.PrefixStore("a", dist.PrefixStore("b", stores(kind, tmp_path)))
    zero, one = mailboxes(store)
    assert zero.posts() == [None, None]
    assert one.board() is None
    zero.post({"step": 1})
    one.post([1.5, "ä", None, float("inf")])
    assert zero.posts() == one.posts() == [{"step": 1}, [1.5, "ä", None, float("inf")]]
    zero.publish({"floor": 1})
    assert zero.board() == one.board() == {"floor": 1}
    zero.publish({"floor": 2})
    assert one.board() == {"floor": 2}
    with pytest.raises(AssertionError):
        one.publish({})


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_a_thousand_posts_leave_no_more_keys_than_one(kind, tmp_path):
    store = stores(kind, tmp_path)
    zero, one = mailboxes(store)
    zero.post(0)
    before = base_store(store).num_keys()
    for number in range(1000):
        one.post({"step": number})
        zero.publish({"floor": number})
    assert zero.posts() == [0, {"step": 999}]
    assert base_store(store).num_keys() == before


def test_local_mailbox_gives_what_json_gives():
    box = LocalMailbox()
    assert box.posts() == [None]
    assert box.board() is None
    box.post({"a": (1, 2)})
    box.publish((3,))
    assert box.posts() == [{"a": [1, 2]}]
    assert box.board() == [3]


def test_a_wait_on_one_connection_holds_up_no_other():
    store = tcp_store()
    box = StoreMailbox(StoreClient(store, 60.0, 1), "easyckpt/x/", 0, 1)
    box.prepare()

    def wait_in_vain():
        with pytest.raises(dist.DistStoreError):
            store.wait(["never"], LONG)

    waiting = threading.Thread(target=wait_in_vain)
    waiting.start()
    start = time.monotonic()
    for number in range(100):
        box.post(number)
    assert box.posts() == [99]
    assert waiting.is_alive()
    assert time.monotonic() - start < LONG.total_seconds()
    waiting.join()


@pytest.fixture
def server():
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=-1, stdout=-1, text=True)
    try:
        yield process, tcp_store(int(process.stdout.readline()), server=False)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_dead_store_is_a_clear_error_and_stays_one(server):
    process, store = server
    zero, one = mailboxes(store)
    process.kill()
    process.wait()
    for call in (zero.posts, zero.board, lambda: one.post(1), lambda: zero.publish(1), zero.posts):
        with pytest.raises(PeerError, match=r"c10d store at 127\.0\.0\.1:\d+.* is gone or does not answer"):
            call()


def test_a_hanging_store_is_an_error_in_bounded_time(server):
    process, store = server
    zero, one = mailboxes(store, timeout=1.0)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # returns when all of its threads have stopped
    start = time.monotonic()
    for call in (zero.posts, lambda: one.post(1)):
        with pytest.raises(PeerError, match="does not answer"):
            call()
    with pytest.raises(PeerError):
        zero.board()
    assert time.monotonic() - start < 20


def test_a_closed_mailbox_says_so():
    zero, _one = mailboxes(dist.HashStore())
    zero.close()
    with pytest.raises(PeerError, match="closed"):
        zero.posts()


def test_an_unknown_store_is_refused():
    class Foreign(dist.Store):
        pass

    with pytest.raises(UsageError, match=r"Foreign.*env://"):
        StoreClient(Foreign(), 1.0, 2)


def test_the_server_lives_as_long_as_a_client_of_its_process():
    store = tcp_store()
    port = store.port
    zero, one = mailboxes(store)
    del store
    zero.post(7)
    assert one.posts() == [7, None]
    assert tcp_store(port, server=False).check(["easyckpt/alive"])
    zero.close()
    one.close()
    again = tcp_store(port)  # nothing holds the port any more
    assert again.port == port
