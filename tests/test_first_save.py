"""The first save of a line of training: refused beside what nobody has loaded, and waited for, but not for ever."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading

import pytest

import easyckpt
from easyckpt.distributed.ranks import Ranks
from tests.support.staged import stands_in, until
from tests.support.training import Training, committed, start


def test_a_first_save_beside_checkpoints_nobody_loaded_is_refused(root):
    training, _ = start(root)
    with training.checkpointer:
        training.to(10)
    careless = Training(root)
    careless.step()
    with pytest.raises(easyckpt.NotLoaded, match=r"load\(\)"):
        careless.checkpointer.save_if_needed(1)
    careless.checkpointer.close()
    assert committed(root) == [10]


def test_a_first_save_beside_snapshots_nobody_loaded_is_refused(root):
    training, _ = start(root)
    with pytest.raises(ZeroDivisionError), training.checkpointer:
        training.to(7)
        raise ZeroDivisionError
    careless = Training(root)
    careless.step()
    with pytest.raises(easyckpt.NotLoaded, match="shared memory"):
        careless.checkpointer.save_if_needed(1)
    careless.checkpointer.abandon()
    again, restored = start(root)
    with again.checkpointer:
        assert restored.step == 7


def test_a_first_save_behind_a_flush_keeps_the_others_waiting_but_not_for_ever(root, monkeypatch):
    """A signal may have begun a flush before it. Ranks that wait for rank 0 in the channel hear that it gets on."""
    training, _ = start(root)
    held, signs = threading.Event(), []
    with training.checkpointer as checkpointer:
        monkeypatch.setattr(checkpointer._channel, "busy", lambda: signs.append(1), raising=False)
        checkpointer._parts.flusher.submit(held.wait)
        with impatient(checkpointer), pytest.raises(easyckpt.StorageError, match=r"has not ended for 0\.5 s"):
            training.to(1)
        held.set()
        assert signs
        training.to(3, 1)
        record = json.loads((root / "easyckpt.json").read_text())
        assert len(record["timelines"]) == 1, "what was given up is not done later"
    assert committed(root) == [3]


def test_a_first_save_that_is_interrupted_behind_a_flush_opens_no_line_later(root):
    training, _ = start(root)
    held = threading.Event()
    with training.checkpointer as checkpointer:
        begun = checkpointer._parts.flusher.submit(held.wait)
        until(begun.running)

        def interrupt():
            main = threading.main_thread()
            until(lambda: stands_in(main, "_opened_line"))
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            training.to(1)
        thread.join()
        held.set()
        training.to(3, 1)
        record = json.loads((root / "easyckpt.json").read_text())
        assert len(record["timelines"]) == 1
    assert committed(root) == [3]


def test_ranks_do_not_wait_for_ever_for_a_line_that_storage_does_not_open(root, monkeypatch):
    training, _ = start(root)
    held = threading.Event()
    with training.checkpointer as checkpointer:
        flusher, saver = checkpointer._parts.flusher, checkpointer._saver
        with impatient(checkpointer), monkeypatch.context() as patched:
            patched.setattr(saver, "_parts", dataclasses.replace(saver._parts, ranks=Ranks(0, 2, 0, 2)))
            patched.setattr(flusher, "open_line", lambda *arguments, **options: flusher.submit(held.wait))
            with pytest.raises(easyckpt.StorageError, match=r"no answer for 0\.1 s"):
                training.to(1)
        held.set()
        training.to(3, 1)
    assert committed(root) == [3]


@contextlib.contextmanager
def impatient(checkpointer):
    """Short timeouts for the training thread alone."""
    saver, parts = checkpointer._saver, checkpointer._saver._parts
    short = dataclasses.replace(parts.config, commit_timeout=0.3, peer_timeout=0.1)
    saver._parts = dataclasses.replace(parts, config=short)
    yield
    saver._parts = parts
