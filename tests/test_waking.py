"""Bells and latches: nobody sleeps through one, and none grows with the times that it is used."""

from __future__ import annotations

import threading

from easyckpt.saving.waking import Bell, Latch


def test_a_latch_wakes_all_who_wait_and_stays_as_it_is():
    latch, woken = Latch(), []
    assert not latch.wait(0.01)
    assert not latch.is_set()
    threads = [threading.Thread(target=lambda: woken.append(latch.wait())) for _ in range(5)]
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join()
    assert woken == [True] * 5
    for _ in range(100):
        latch.set()
        assert latch.wait()
        assert latch.wait(0.0)
    assert latch._told.qsize() == 1


def test_a_bell_is_heard_once_however_often_it_was_rung():
    bell = Bell()
    assert not bell.wait(0.01)
    for _ in range(100):
        bell.ring()
    assert bell.wait(0.0)
    assert not bell.wait(0.0)
    waiting = threading.Thread(target=bell.wait, args=(100,))
    waiting.start()
    bell.ring()
    waiting.join()
    assert not bell.wait(0.0)
