"""What a wrapped Trainer's arguments, files and callbacks mean, on each supported major version of transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from easyckpt import catalog
from easyckpt.contents import Opened
from easyckpt.contents.held import Held
from easyckpt.storage.records_apart import open_place
from tests.trainers.launch import REPOSITORY, VERSIONS, python_of, quiet, run
from tests.trainers.matrix import Trial
from tests.trainers.scenarios import TABLE

#: Damage in each kind of file is the same with both versions, and so is what the older one is not asked here. Names of
#: modules count as those of tests do: none has one of these words.
DAMAGE = "damage_in_any_file"
#: What waits for ranks; and of methods that a subclass overrides, all but what is asked each time.
RARE = "of_asking_alone or other_ranks or of_overridden and not (left_alone or known_here or never_called)"
#: And of directories in which another kind of training has saved.
TAKEN = "of_taking_over and not (flipped_byte or is_verified)"
#: And of states that are none.
NONSENSE = "of_nonsense and not (put_back or alone or utf-8 or log)"
#: And of best checkpoints that a kill has taken.
KILLED = "of_what_a_kill_took and not (snapshot and 7)"
#: And of steps that are saved once more, by the Trainer itself, or from where training went on.
TWICE = f"once_more and rename or once_more and remove or named_stays or another_directory_that or {KILLED}"
#: And of what a class keeps by itself.
OWN = "of_own_attributes and (inference_mode or device or too_large)"
SAMPLE = "layout or hold or best or callbacks or stock or line or twice or newest or added or writer or interrupt"
#: The modules are not called as tests are: here, without transformers, nobody is to import them.
NAMED = ("-o", "python_files=of_*.py")


@pytest.mark.parametrize(
    ("version", "chosen"),
    [
        (
            "5",
            f"not {DAMAGE} and not ({RARE}) and not ({TAKEN}) and not ({NONSENSE}) and not ({TWICE}) and not ({OWN})",
        ),
        ("4", f"({SAMPLE}) and not (of_taking_over or of_nonsense or of_asking_alone)"),
        ("5", f"{DAMAGE} and flipped"),
    ],
)
def test_semantics(version, chosen):
    all_pass(version, chosen)


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
def test_all_semantics(version):
    all_pass(version, "test")


def all_pass(version: str, chosen: str) -> None:
    python = REPOSITORY / f".venv-transformers{version}" / "bin" / "python"
    ran = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *NAMED, "tests/trainers/semantics"],
        cwd=REPOSITORY,
        env={**os.environ, **quiet(), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_listener_on_one_rank_alone_holds_up_nobody(version, tmp_path):
    record = tmp_path / "heard"
    words = [tmp_path / "out", record]
    ended = run(version, words, ranks=2, beside=tmp_path / "said", job="tests.trainers.listening")
    assert ended.codes == [0, 0], ended.said
    assert json.loads(Path(f"{record}.0").read_text()) == list(range(2, 25, 2))
    assert json.loads(Path(f"{record}.1").read_text()) == []


def test_what_ddp_keeps_equal_of_adapters_is_stored_once(tmp_path):
    Trial(TABLE["ddp_lora"], VERSIONS[-1], tmp_path).straight()
    storage, naming = open_place(tmp_path / "straight-wrapped")
    with Opened(storage, catalog.inspect(storage, "checkpoint-20", naming)) as checkpoint:
        first, second = (written_in(checkpoint.held(rank)) for rank in (0, 1))
    assert {"model", "optimizer"} <= first
    assert second.isdisjoint({"model", "optimizer"})


def written_in(held: Held) -> set[str]:
    """Components of which this rank has written a tensor."""
    return {leaf.path[0] for leaf, mine in zip(held.layout.leaves, held.written, strict=True) if mine}


def test_files_of_all_ranks_are_in_the_checkpoint(tmp_path):
    out = tmp_path / "out"
    ended = run(VERSIONS[-1], [out], ranks=2, beside=tmp_path / "said", job="tests.trainers.adding")
    assert ended.codes == [0, 0], ended.said
    for step in (2, 4):
        checkpoint = out / f"checkpoint-{step}"
        assert {path.name for path in checkpoint.glob("*.txt")} == {"own-0.txt", "own-1.txt", "common.txt"}
        assert set(json.loads((checkpoint / "manifest.json").read_text())["files"]) >= {"own-0.txt", "own-1.txt"}
    assert list(out.glob("_easyckpt-*")) == []


OLD = """
import sys
import transformers.trainer_callback
transformers = sys.modules["transformers"]
transformers.__version__ = "4.38.0"
del transformers.trainer_callback.ExportableState  # which came with 4.42
try:
    from easyckpt.integrations.transformers import TrainerWrapper
except Exception as error:
    print(type(error).__name__, error)
"""


def test_an_old_version_is_named_before_what_it_lacks():
    program = [python_of(VERSIONS[-1]), "-c", OLD]
    environment = {**os.environ, **quiet(), "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("ConfigError transformers 4.38.0 is installed")


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
def test_what_one_rank_cannot_prepare_is_told_to_all(version, tmp_path):
    record = tmp_path / "came"
    words = [tmp_path / "out", record]
    ended = run(version, words, ranks=2, beside=tmp_path / "said", job="tests.trainers.unprepared")
    assert ended.codes == [0, 0], ended.said
    told = Path(f"{record}.0").read_text()
    assert told.startswith("PeerFailed")
    assert "rank 1" in told
    assert "FileNotFoundError" in told
    assert Path(f"{record}.1").read_text().startswith("FileNotFoundError")
