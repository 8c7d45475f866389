"""The Future of a save: it cannot be cancelled, and what waits for it holds no save up."""

from __future__ import annotations

import threading
import time

from easyckpt import failpoints
from tests.support.training import committed, start


def test_a_future_cannot_be_cancelled_and_saving_goes_on(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        for number in range(1, 4):
            training.step()
            future = checkpointer.save(number)
            assert not future.cancel()  # as asyncio does on a timeout
        assert future.result(60) == 3
    assert committed(root) == [1, 2, 3]


def test_what_waits_for_a_future_does_not_hold_the_training_up(root):
    training, _ = start(root)
    release, seen = threading.Event(), []  # a callback is the user's code: it runs without our locks

    def upload(future) -> None:
        release.wait(60)
        seen.append(future.result())

    with training.checkpointer as checkpointer:
        training.step()
        checkpointer.save(1).add_done_callback(upload)
        deadline = time.monotonic() + 60
        while not committed(root) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        training.step()
        begun = time.monotonic()
        checkpointer.save_if_needed(2)
        assert time.monotonic() - begun < 5
        assert seen == []
        release.set()
    assert committed(root) == [1, 2]


def test_a_callback_that_takes_long_holds_up_no_other_save(root):
    training, _ = start(root)
    release, ended_by_release, on = threading.Event(), [], []

    def upload(future) -> None:
        on.append(threading.current_thread().name)
        ended_by_release.append(release.wait(20))

    with training.checkpointer as checkpointer:
        training.step()
        hold = root.with_name("hold")
        failpoints.arm(f"commit.reported=hold:{hold}")
        first = checkpointer.save(1)
        first.add_done_callback(upload)
        hold.with_suffix(".go").touch()
        training.step()
        checkpointer.save(2, wait=True)  # returns although the callback has not
        assert committed(root) == [1, 2]
        first.add_done_callback(lambda _: on.append(threading.current_thread().name))
        release.set()
    assert ended_by_release == [True]  # and the end has waited for it
    assert sorted(on) == ["MainThread", "easyckpt-callbacks"]


def test_a_callback_that_fails_is_logged_and_harms_nothing(root, caplog):
    training, _ = start(root)

    def upload(future) -> None:
        raise ZeroDivisionError("the upload has failed")

    hold = root.with_name("hold")
    failpoints.arm(f"commit.reported=hold:{hold}")
    with training.checkpointer as checkpointer:
        training.step()
        checkpointer.save(1).add_done_callback(upload)
        hold.with_suffix(".go").touch()
        training.step()
        checkpointer.save(2, wait=True)
    assert committed(root) == [1, 2]
    assert "the upload has failed" in caplog.text
