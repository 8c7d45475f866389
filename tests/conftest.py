"""What every test gets: one OpenMP thread, its own place for the memory tier, a check that nothing was left running."""

from __future__ import annotations

import os

# Before torch is imported by any test: with two workers on few cores, OpenMP pools would fight each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# torch looks up the name of each end of a store's connection: where no name server answers, that takes 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import gc
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import campaigns
from support.campaigns import campaign_part

__all__ = ["campaign_part"]

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "easyckpt-test-"
JOIN_SECONDS = 10.0


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(campaigns.Results(), "easyckpt-campaigns")
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
            # So it is where the run itself was put into the background, and all that the tests start would inherit it.
            signal.signal(number, default)
    for name in [name for name in os.environ if name.startswith("EASYCKPT_")]:
        del os.environ[name]  # settings of the person who runs the tests are not the tests'
    for path in SHARED_MEMORY.glob(f"{PREFIX}*-*"):  # left by test runs that were killed
        owner = path.name.removeprefix(PREFIX).split("-", maxsplit=1)[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(path, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes a minute begins first: at the end one worker would run it while the other has nothing left."""
    items.sort(key=lambda item: "test_semantics" not in item.name)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as in a pipe, whatever the terminal or the workers of pytest say."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def memory_dir(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory of this test alone for the memory tier, in real shared memory where there is any.

    It is the default memory_dir of this process and its children, so that a test can neither see nor leave arenas
    of others.
    """
    if os.access(SHARED_MEMORY, os.W_OK):
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=SHARED_MEMORY))
    else:
        path = tmp_path_factory.mktemp("memory")
    monkeypatch.setenv("EASYCKPT_MEMORY_DIR", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left_running(memory_dir: Path, tmp_path: Path) -> Iterator[None]:
    """Fails the test when it leaves a thread of ours, or a descriptor in its own directories, behind."""
    before = set(threading.enumerate())
    yield
    threads = [t for t in threading.enumerate() if t not in before and t.name.startswith("easyckpt")]
    for thread in threads:
        thread.join(JOIN_SECONDS)
    alive = [thread.name for thread in threads if thread.is_alive()]
    assert not alive, f"threads left behind: {alive}"
    if open_below(memory_dir, tmp_path):
        gc.collect()  # an exception that pytest holds keeps its frames, and what they hold, alive
    assert not open_below(memory_dir, tmp_path), "descriptors left open"


@pytest.fixture(autouse=True)
def nothing_armed(nothing_left_running: None) -> Iterator[None]:
    """What a test has armed is disarmed at its end, before anybody looks for what it has left running."""
    yield
    from easyckpt import failpoints  # by now the environment has no settings any more that it would read

    failpoints.arm("")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where a test's job keeps its checkpoints; nothing is there yet."""
    return tmp_path / "run"


def open_below(*directories: Path) -> list[str]:
    """Files below `directories` that this process holds open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the descriptor of the listing itself
            continue
        if any(target.startswith(f"{directory}/") for directory in directories):
            found.append(target)
    return found
