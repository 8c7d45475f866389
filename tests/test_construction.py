"""Making a Checkpointer: what cannot be is refused before anything has changed, and lets go of what it took."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import types
from pathlib import Path

import pytest
from torch import nn

import easyckpt
from easyckpt import Checkpointer, ending
from tests.support.tmpfs import tmpfs  # noqa: F401 - a fixture
from tests.support.training import Training, committed, start


def test_a_second_job_on_the_same_root_is_refused_and_names_the_owner(root):
    training, _ = start(root)
    with training.checkpointer:
        with pytest.raises(easyckpt.RootInUse, match=f"^{root} is in use: .* another Checkpointer of this process"):
            Training(root)
        training.to(3)
    assert committed(root) == [3]


def test_bad_input_in_the_constructor_leaves_the_root_as_it_was(root):
    for no_path in (None, 3, b"run"):
        with pytest.raises(easyckpt.ConfigError, match=f"root must be the path of a directory .*, not {no_path!r}"):
            Checkpointer(no_path, {"box": {}})
    with pytest.raises(easyckpt.ConfigError, match="slots"):
        Training(root, slots=0)
    with pytest.raises(easyckpt.ConfigError, match="save_memory_interval"):
        Training(root, save_memory_interval=2)
    with pytest.raises(easyckpt.EasyckptError, match="thing"):
        Checkpointer(root, {"thing": object()})
    with pytest.raises(easyckpt.UnsupportedValue, match="progress"):
        Checkpointer(root, {"progress": {"lock": object()}})
    assert not root.exists()


@pytest.mark.parametrize("place", ["wiring.reserve", "wiring.AccumulationWatch", "wiring.watch_signals"])
def test_a_constructor_that_fails_lets_go_of_the_root(root, tmp_path, monkeypatch, place):
    handlers = list(logging.getLogger("easyckpt").handlers)
    with monkeypatch.context() as patch:
        if place == "wiring.reserve":
            settings = {"min_free_bytes": 1 << 60}  # really refused
        else:
            settings = {}
            patch.setattr(f"easyckpt.engine.{place}", _refuse)
        with pytest.raises(easyckpt.EasyckptError, match="free"):
            Training(root, log_file_path=tmp_path / "log", **settings)
    assert not (root / "lease.json").exists()
    assert logging.getLogger("easyckpt").handlers == handlers
    training, _ = start(root)  # at once, by the same process
    with training.checkpointer:
        training.to(3)
    assert committed(root) == [3]


def test_a_constructor_that_is_interrupted_at_its_very_end_lets_go_of_the_signals_too(root, monkeypatch):
    class Interrupted(contextlib.ExitStack):
        def pop_all(self):
            raise KeyboardInterrupt

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with monkeypatch.context() as patch:
        patch.setattr("easyckpt.ground.contextlib", types.SimpleNamespace(ExitStack=Interrupted))
        with pytest.raises(KeyboardInterrupt):
            Training(root, signals=("SIGTERM", "SIGUSR1"))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    assert "easyckpt-signals" not in [thread.name for thread in threading.enumerate()]
    assert not (root / "lease.json").exists()


def _refuse(*arguments, **options):
    raise easyckpt.OutOfSpace("nothing is free")


def test_a_file_in_place_of_the_root_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(easyckpt.EasyckptError, match="file"):
        Training(path)
    assert path.read_text() == "mine"


def test_a_root_without_room_for_one_checkpoint_is_refused_at_the_start(tmpfs):
    model = nn.Linear(5000, 4000)  # 80 MB, and a tmpfs of 64
    with pytest.raises(easyckpt.OutOfSpace, match=r"about 76\.3 MiB, 6[34]\.\d MiB are free\. Free space"):
        Checkpointer(Path(tmpfs) / "run", {"model": model})


def test_room_that_is_to_stay_free_is_named_where_it_lacks(root):
    wanted = r"about [\d.]+ KiB and 1\.0 PiB are to stay free \(min_free_bytes\), [\d.]+ [GT]iB are free"
    with pytest.raises(easyckpt.OutOfSpace, match=wanted):
        Training(root, min_free_bytes=2**50)


def test_the_memory_belongs_to_the_user_whatever_the_environment_says(root, monkeypatch):
    """Two jobs that name their user differently would both own the slots."""
    first, _ = start(root)
    with first.checkpointer:
        for variable in ("USER", "LOGNAME", "USERNAME", "LNAME"):
            monkeypatch.setenv(variable, "somebody-else")
        with pytest.raises(easyckpt.errors.RootInUse, match="memory of rank 0"):
            Training(root)
        first.to(3)
    assert committed(root) == [3]


def test_a_checkpoint_as_the_command_line_names_it_is_no_new_root(tmp_path):
    with easyckpt.Checkpointer(tmp_path / "exp", {"box": {"n": 1}}, signals=()) as checkpointer:
        checkpointer.save(10, wait=True)
    with pytest.raises(easyckpt.UsageError, match=r"load\(step=10\)"):
        easyckpt.Checkpointer(f"{tmp_path}/exp@10", {"box": {"n": 1}}, signals=())
    assert [path.name for path in tmp_path.iterdir()] == ["exp"]
    with easyckpt.Checkpointer(f"{tmp_path}/other@10", {"box": {"n": 1}}, signals=()):  # nothing of ours before the @
        pass


def test_an_end_by_an_exception_that_is_interrupted_is_an_end_all_the_same(root, monkeypatch):
    """Else the end of the process would end it once more, and the Checkpointer would live until then."""
    training, _ = start(root)
    real = training.checkpointer._farewell.abandon

    def interrupted():
        real()
        raise KeyboardInterrupt

    monkeypatch.setattr(training.checkpointer._farewell, "abandon", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.checkpointer.abandon()
    assert training.checkpointer not in ending._open
