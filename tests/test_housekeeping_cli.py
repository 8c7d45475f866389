"""prune, pin and unpin: what goes and what never does, also beside jobs, kills and pins that come meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

import easyckpt
from easyckpt import catalog, failpoints
from easyckpt.format import layout
from easyckpt.storage.local import LocalStorage
from easyckpt.verification import verify
from tests.support.commands import everything_in, hits_of, run  # noqa: F401 - a fixture
from tests.support.jobs import committed
from tests.support.staged import until
from tests.support.zygote import fork_program

NATIVE = layout.NativeNaming()


def train(root: Path, to: int, *, step: int | None = None, **settings) -> None:
    """Go on to step `to`, each step committed, with a loss that is lowest at step 3."""
    model = torch.nn.Linear(2, 2)
    settings = {"save_storage_interval": 1, "max_ckpt_num": None, "back_pressure": "wait"} | settings
    with easyckpt.Checkpointer(root, {"model": model}, **settings) as checkpointer:
        for number in range(checkpointer.load(step=step).step + 1, to + 1):
            checkpointer.log(loss=abs(number - 3) + 0.5)
            checkpointer.save_if_needed(number)
            checkpointer.wait()


@pytest.fixture
def root(tmp_path):
    train(tmp_path / "run", 8)
    return tmp_path / "run"


def leftovers(root: Path) -> list[str]:
    """What is in the root beside checkpoints and the run's own files."""
    own = {layout.ROOT_FILE, layout.LATEST, layout.EVENTS, layout.METRICS, layout.PINS}
    return [name for name in os.listdir(root) if name not in own and NATIVE.parse_committed(name) is None]


# -- prune


def test_prune_leaves_the_newest_every_kth_the_best_and_the_pinned_and_says_why(root, run, memory_dir):
    run("pin", f"{root}@5")
    memory = list(memory_dir.iterdir())
    ran = run("prune", root, "--keep", 2, "--keep-every", 4, "--keep-best", 1, "--metric", "loss", "--json")
    assert ran.code == 0
    rows = {row["step"]: row for row in ran.document["checkpoints"]}
    assert {step for step, row in rows.items() if row["removed"]} == {1, 2, 6}
    assert {step: row["reasons"] for step, row in rows.items() if not row["removed"]} == {
        3: ["best"], 4: ["every"], 5: ["pinned"], 7: ["newest"], 8: ["newest", "every"],
    }  # fmt: skip
    assert ran.document["freed_bytes"] == sum(rows[step]["bytes"] for step in (1, 2, 6))
    assert committed(root) == [3, 4, 5, 7, 8]
    assert leftovers(root) == []
    assert list(memory_dir.iterdir()) == memory


def test_prune_shows_a_table_to_people(root, run):
    lines = run("prune", root, "--keep", 1, "--keep-best", 1, "--metric", "loss", "--mode", "max").out.splitlines()
    assert [line.split()[:1] + line.split()[3:] for line in lines[:-2]] == [
        ["step", "why"],
        *[[str(step), "removed", "kept", "by", "no", "rule"] for step in range(1, 8)],
        ["8", "stays", "newest,", "best"],
    ]
    assert lines[-1].startswith(f"{root}: 7 of 8 removed, ")


def test_a_dry_run_says_the_same_and_changes_nothing(root, run):
    before = everything_in(root)
    dry = run("prune", root, "--keep", 2, "--dry-run", "--json")
    assert everything_in(root) == before
    assert dry.document["dry_run"] is True
    real = run("prune", root, "--keep", 2, "--json")
    assert real.document == dry.document | {"dry_run": False}
    assert committed(root) == [7, 8]


def test_the_newest_valid_one_stays_where_newer_ones_are_damaged(root, run):
    for step in (7, 8):
        os.truncate(root / layout.step_dir(step) / layout.shard_file(0), 10)
    assert run("prune", root, "--keep", 1).code == 0
    assert committed(root) == [6]
    assert (root / layout.step_dir(8)).exists()


def test_what_a_load_set_aside_goes_only_with_stale_and_never_counts(root, run):
    train(root, 4, step=2)  # 3 to 8 are set aside
    rows = run("prune", root, "--keep", 4, "--json").document["checkpoints"]
    assert Counter(tuple(row["reasons"]) for row in rows if row["kind"] == "stale") == {("set aside",): 6}
    assert committed(root) == [1, 2, 3, 4]
    run("pin", f"{root}@4")
    assert run("prune", root, "--stale").code == 0
    assert committed(root) == [1, 2, 3, 4]  # no --keep: all of them stay
    assert [entry.step for entry in catalog.scan(LocalStorage(root), NATIVE).of_kind("stale")] == [4]


def test_trash_that_a_crash_left_goes_too(root, run):
    (root / layout.step_dir(1)).rename(root / layout.trash_dir(layout.step_dir(1), "dead"))
    assert run("prune", root, "--keep", 7).code == 0
    assert committed(root) == [2, 3, 4, 5, 6, 7, 8]
    assert leftovers(root) == []


def test_copies_without_a_record_are_pruned_as_a_job_would_count_them(root, run, tmp_path):
    copies = tmp_path / "copies"
    copies.mkdir()
    for step in (2, 4, 6):
        (root / layout.step_dir(step)).rename(copies / layout.step_dir(step))
    assert run("prune", copies, "--keep", 1).code == 0
    assert os.listdir(copies) == [layout.step_dir(6)]


def test_a_pin_that_comes_while_prune_works_is_kept_and_told(root, run, monkeypatch):
    real = LocalStorage.rename

    def rename(self, src, dst):
        monkeypatch.setattr(LocalStorage, "rename", real)
        assert run("pin", f"{root}@2").code == 0
        real(self, src, dst)

    monkeypatch.setattr(LocalStorage, "rename", rename)
    rows = {row["step"]: row for row in run("prune", root, "--keep", 1, "--json").document["checkpoints"]}
    assert (rows[2]["removed"], rows[2]["reasons"]) == (False, ["pinned"])
    assert committed(root) == [2, 8]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--keep is missing"),
        (("--keep-every", 2), "--keep is missing"),
        (("--stale", "--keep-best", 2, "--metric", "loss"), "--keep is missing"),
        (("--keep", 1, "--keep-best", 2), "belong together"),
        (("--keep", 1, "--metric", "loss"), "belong together"),
        (("--keep", 1, "--keep-best", 2, "--metric", "lss"), "no checkpoint has a number under --metric lss; there is"),
        (("--keep", 0), "--keep"),
        (("--keep", 1, "--mode", "best"), "--mode"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_bad_input_to_prune_is_code_2_and_removes_nothing(root, run, arguments, says, dry):
    before = everything_in(root)
    ran = run("prune", root, *arguments, *dry)
    assert ran.code == 2
    assert says in ran.err
    assert everything_in(root) == before


def test_prune_takes_no_single_step_and_no_foreign_directory(root, run, tmp_path):
    before = everything_in(root)
    assert run("prune", f"{root}@3", "--keep", 1).code == 2
    assert run("prune", root / layout.step_dir(3), "--keep", 1).code == 2
    (tmp_path / "other").mkdir()
    assert run("prune", tmp_path / "other", "--keep", 1).code == 2
    (root / layout.ROOT_FILE).write_bytes(b"{}")
    assert run("prune", root, "--keep", 1).code in (1, 2)
    (root / layout.ROOT_FILE).write_bytes(before[str(root / layout.ROOT_FILE)][1])
    assert committed(root) == [1, 2, 3, 4, 5, 6, 7, 8]


# Beside a job.

LIVES = """
import os, sys, time, torch, easyckpt
root, seen, go = sys.argv[1:]
settings = {"lease_interval": 0.05, "lease_timeout": 30.0}
with easyckpt.Checkpointer(root, {"model": torch.nn.Linear(2, 2)}, **settings) as checkpointer:
    checkpointer.load()
    open(seen, "w").close()
    while not os.path.exists(go):
        time.sleep(0.001)
"""


@pytest.mark.parametrize("same_node", [True, False])
def test_prune_refuses_while_a_job_uses_the_root_and_names_it(root, run, tmp_path, same_node):
    """On another node the job's lock cannot be seen: its lease is watched until it is renewed."""
    seen, go = tmp_path / "seen", tmp_path / "go"
    (tmp_path / "elsewhere").mkdir()
    child = fork_program(LIVES, root, seen, go, directory=tmp_path)
    until(seen.exists)
    elsewhere = () if same_node else ("--memory-dir", tmp_path / "elsewhere")
    ran = run("prune", root, "--keep", 1, *elsewhere)
    assert (ran.code, committed(root)) == (2, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (f"the live process {child.pid}" if same_node else f"process {child.pid} on host") in ran.err
    assert run("prune", root, "--keep", 1, "--dry-run", *elsewhere).code == 0
    go.touch()
    child.communicate(60)
    assert child.returncode == 0
    assert run("prune", root, "--keep", 1).code == 0
    assert committed(root) == [8]


PRUNES = """
import sys
from easyckpt.cli import app
app(["prune", sys.argv[1], "--keep", "2", "--stale"])
"""


def test_a_prune_that_is_killed_anywhere_leaves_whole_checkpoints_and_the_next_one_finishes(root, run, tmp_path):
    train(root, 4, step=2)
    kept = [3, 4]
    before = shutil.copytree(root, tmp_path / "before")
    hits = hits_of(PRUNES, root, directory=tmp_path)
    assert committed(root) == kept
    assert hits["retention.rename.before"] == 2 + 6
    for name, count in sorted(hits.items()):
        for number in {1, (count + 1) // 2, count}:
            place = shutil.copytree(before, tmp_path / f"{name}-{number}")
            child = fork_program(
                PRUNES, place, directory=tmp_path, **{failpoints.ENVIRONMENT_VARIABLE: f"{name}@{number}=kill"}
            )
            child.communicate(60)
            assert child.returncode == -signal.SIGKILL, (name, number)
            storage = LocalStorage(place)
            found = catalog.scan(storage, NATIVE)
            assert set(kept) <= set(committed(place)), (name, number)
            for entry in found.entries:
                if entry.kind != "trash":
                    assert verify(storage, entry) == [], (name, number, entry.name)
            assert run("prune", place, "--keep", 2, "--stale").code == 0
            assert committed(place) == kept
            assert leftovers(place) == []


# -- pin, unpin


def test_a_pinned_step_outlives_prune_and_the_rotation_of_a_job(root, run):
    assert run("pin", f"{root}@3").code == 0
    train(root, 10, max_ckpt_num=1)
    assert committed(root) == [3, 10]
    assert run("prune", root, "--keep", 1).code == 0
    assert committed(root) == [3, 10]
    assert run("unpin", f"{root}@3").code == 0
    assert run("prune", root, "--keep", 1).code == 0
    assert committed(root) == [10]


def test_a_pin_that_is_set_beside_a_running_job_holds(tmp_path, run):
    root = tmp_path / "run"
    settings = {"save_storage_interval": 1, "max_ckpt_num": 1, "back_pressure": "wait"}
    with easyckpt.Checkpointer(root, {"model": torch.nn.Linear(2, 2)}, **settings) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, wait=True)
            if step == 2:
                assert run("pin", f"{root}@2").code == 0
    assert committed(root) == [2, 5]


def test_pin_and_unpin_can_be_repeated(root, run):
    codes = [run(command, f"{root}@3", "--json").document for command in ("unpin", "pin", "pin", "unpin", "unpin")]
    assert [code["changed"] for code in codes] == [False, True, False, True, False]
    assert [code["pinned"] for code in codes] == [False, True, True, False, False]
    assert os.listdir(root / layout.PINS) == []


def test_a_step_directory_names_a_step_as_well_and_ls_shows_pins(root, run):
    assert run("pin", root / layout.step_dir(3)).code == 0
    rows = run("ls", root, "--json").document["checkpoints"]
    assert [row["step"] for row in rows if row["pinned"]] == [3]
    assert "committed, pinned" in run("ls", root).out


@pytest.mark.parametrize("step", [12_345_678, 123_456_789_012])
def test_steps_of_any_size_can_be_pinned(tmp_path, run, step):
    with easyckpt.Checkpointer(tmp_path, {"model": torch.nn.Linear(2, 2)}) as checkpointer:
        checkpointer.save(step, wait=True)
    assert run("pin", f"{tmp_path}@{step}").code == 0
    assert catalog.pinned_steps(LocalStorage(tmp_path)) == {step}
    assert run("unpin", f"{tmp_path}@{step}").code == 0
    assert catalog.pinned_steps(LocalStorage(tmp_path)) == set()


@pytest.mark.parametrize("which", ["{root}@9", "{root}", "{root}/nothing@3", "{other}@3"])
@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_what_is_no_committed_step_cannot_be_pinned_and_changes_nothing(root, run, tmp_path, command, which):
    (tmp_path / "other").mkdir()
    before = everything_in(tmp_path)
    ran = run(command, which.format(root=root, other=tmp_path / "other"), "--json")
    if command == "unpin" and which == "{root}@9":  # its checkpoint may have been removed by hand
        assert (ran.code, ran.document["changed"]) == (0, False)
    else:
        assert (ran.code, ran.document["error"]["kind"]) in ((2, "UsageError"), (2, "ForeignFormat"))
    assert everything_in(tmp_path) == before


def test_a_damaged_checkpoint_cannot_be_pinned(root, run):
    os.truncate(root / layout.step_dir(3) / layout.shard_file(0), 10)
    ran = run("pin", f"{root}@3")
    assert ran.code == 1
    assert "is not valid" in ran.err
    assert not (root / layout.PINS).exists()


def test_documents_are_json_and_nothing_else_is_on_stdout(root, run):
    for arguments in (("pin", f"{root}@3"), ("unpin", f"{root}@3"), ("prune", root, "--keep", "3")):
        assert isinstance(json.loads(run(*arguments, "--json").out), dict)
