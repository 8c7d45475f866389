"""``easyckpt audit`` tells an exact job from those with the classic mistakes, names the culprit, and touches nothing.

Everything is real: each audit starts its command as a user would, from five to twelve times.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from easyckpt.cli import app
from easyckpt.cli.audit import plots
from easyckpt.cli.audit.findings import Findings
from tests.support.jobs import REPOSITORY
from tests.support.tmpfs import TMPFS_BYTES, tmpfs  # noqa: F401 - a fixture

JOB = REPOSITORY / "tests" / "support" / "audited_job.py"
STEPS, AT = 24, 12


@dataclass
class Audited:
    code: int
    printed: str
    said: str
    out: Path

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.out / "report.json").read_text())


@pytest.fixture
def audit(tmp_path, memory_dir, monkeypatch):
    """Audits the job with a mistake; every process finds the package here."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(mistake: str = "", *options: str, launcher: tuple[str, ...] = (sys.executable,)) -> Audited:
        out = tmp_path / "audit"
        command = [*launcher, str(JOB), str(tmp_path / "own"), mistake]
        arguments = ["audit", "--steps", str(STEPS), "--at", str(AT), "--out", str(out), *options, "--", *command]
        result = CliRunner().invoke(app, arguments)
        assert not list(tmp_path.glob("own*")), "the user's own files were touched"
        assert list(memory_dir.iterdir()) == []
        return Audited(result.exit_code, result.stdout, result.stderr, out)

    return run


def test_an_exact_job_passes_from_both_tiers_and_is_told_what_each_part_is_worth(audit):
    found = audit()
    assert found.code == 0, found.printed + found.said
    assert "EXACT" in found.printed
    report = found.report
    assert [(run["tier"], run["restored_step"], run["identical"]) for run in report["resumed"]] == [
        ("storage", AT, True), ("memory", AT, True)
    ]  # fmt: skip
    names = ["model", "optimizer", "scheduler", "noise", "easyckpt.rng", "easyckpt.data"]
    for run in report["resumed"]:
        assert [part["component"] for part in run["components"]] == names
        assert run["compared_steps"] == [14, 16, 18, 20, 22, 24]
        assert {metric["name"]: metric["equal"] for metric in run["metrics"]} == {"loss": True, "seconds": False}
    aside = report["not_compared"]
    assert (aside["unseeded_generators"], aside["metrics"]) == ([], ["seconds"])
    # Of libraries that seed one of Python's for themselves.
    assert all(name.startswith("random.Random") and "__main__" not in name for name in aside["notes"])
    assert report["straight_runs"]["identical"]
    assert "audit: run 1: straight, to step 24" in found.said
    assert "audit: run 11 of 11: memory, to step 24" in found.said
    assert [run["run"] for run in report["without"]] == [f"without-{name}" for name in names]
    for run in report["without"]:
        assert not run["identical"], run["run"]
        (part,) = [part for part in run["components"] if part["component"] == "model"]
        assert part["first_step"] is not None
        assert part["largest_difference"] > 0
        assert len(part["growth"]) == 6
    page = (found.out / "report.md").read_text()
    assert "| model | yes | 0 |  |  |" in page
    assert "metric seconds" not in page
    assert "report.png" in page
    assert (found.out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in found.out.iterdir()) == ["logs", "report.json", "report.md", "report.png"]


MISTAKES = {
    "forgets the generator": (
        "a torch.Generator that is not part of the state (the global noise of __main__)",
        '"generator": generator',
    ),
    "forgets NumPy's generator": (
        "a numpy.Generator that is not part of the state (the global jitter of __main__) is not where it was",
        '"generator": generator',
    ),
    "seeds its sampler anew": (
        "a random.Random that is not part of the state (the attribute _random of a OwnOrder) is not where it was",
        "hand it over",
    ),
    "counts the schedule from zero": (
        "a torch.CosineAnnealingLR that is not part of the state (the global scheduler of __main__)",
        '"scheduler": scheduler',
    ),
    "reads by a counter of its own": (
        "'loss' differs in the first step after the resume",
        "is in no component (a counter",
    ),
    "logs by a counter of its own": ("'loss' differs", ""),
    "evaluates with a generator of its own": (
        "a torch.Generator that is not part of the state (the global evaluation",
        "",
    ),
    "counts its loop from zero": ("it ends after step 24, and the straight run after step 18: ", "end it at the same"),
    "seeds in its loop": ("the global generator of torch is not where it was", "seed before load()"),
}


#: An audit starts its command at least four times; of the others `make soak` has the turn.
SAMPLE = ("forgets the generator", "reads by a counter of its own")


@pytest.mark.parametrize("mistake", [m if m in SAMPLE else pytest.param(m, marks=pytest.mark.soak) for m in MISTAKES])
def test_a_mistake_is_found_and_the_report_says_what_to_hand_over(audit, mistake):
    found = audit(mistake, "--no-parts", "--tier", "storage")
    assert found.code == 1, found.printed + found.said
    what, advice = MISTAKES[mistake]
    for part in (what, advice):
        assert part in found.printed
        assert part in (found.out / "report.md").read_text()
    for run in found.report["resumed"]:
        assert not run["identical"]
        assert run["culprit"]["step"] in (AT + 1, AT + 3, None)


def test_a_job_that_nobody_seeds_is_nondeterministic(audit):
    found = audit("never seeds")
    assert found.code == 3
    assert "NONDETERMINISTIC" in found.printed
    assert "(torch): nobody seeds them: call torch.manual_seed(…)" in found.printed
    assert found.report["resumed"] == []


@pytest.mark.soak
def test_a_generator_that_is_neither_seeded_nor_used_is_left_aside_and_named(audit):
    found = audit("never seeds Python", "--no-parts", "--tier", "memory")
    assert found.code == 0, found.printed + found.said
    assert found.report["not_compared"]["unseeded_generators"] == ["numpy", "python"]
    assert "ended by itself" not in found.printed
    assert "numpy, python, which nobody has seeded" in found.printed


def test_killed_in_the_middle_of_a_flush_it_goes_on_from_both_tiers(audit):
    found = audit("", "--kill", "--no-parts", "--seed", "1")
    assert found.code == 0, found.printed + found.said
    storage, memory = found.report["resumed"]
    assert storage["tier"] == "storage"
    assert storage["restored_step"] in (AT - 2, AT)
    assert memory["tier"] == "memory"
    assert memory["restored_step"] >= AT - 1
    assert found.report["killed"]["step"] == AT
    assert "into the flush of step 12 (SIGKILL, all processes)" in found.printed


@pytest.mark.soak
def test_where_memory_has_no_room_for_its_tier_the_verdict_is_about_storage(audit, tmpfs, monkeypatch):
    monkeypatch.setenv("EASYCKPT_MEMORY_DIR", tmpfs)
    with open(f"{tmpfs}/other", "wb") as file:  # nothing is left of it
        file.write(bytes(TMPFS_BYTES - (16 << 10)))
    found = audit("", "--no-parts")
    assert found.code == 0, found.printed + found.said
    assert "memory was not tried" in found.printed


@pytest.mark.soak
def test_a_group_under_torchrun_is_audited_as_it_is(audit):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    found = audit("", "--kill", "--no-parts", "--json", launcher=torchrun)
    assert found.code == 0, found.printed + found.said
    report = json.loads(found.printed)
    assert report["verdict"] == "exact"
    assert [run["tier"] for run in report["resumed"]] == ["storage", "memory"]


@pytest.mark.soak
def test_components_may_be_called_anything(audit):
    found = audit("names with slashes", "--tier", "storage")
    assert found.code == 0, found.printed + found.said
    names = ["model", "a/b", "../..", "é", "easyckpt.rng", "easyckpt.data"]
    assert [run["run"] for run in found.report["without"]] == [f"without-{name}" for name in names]


@pytest.mark.soak
def test_a_part_without_which_the_command_fails_is_said_and_the_verdict_is_given_all_the_same(audit):
    found = audit("cannot do without its noise", "--tier", "storage")
    assert found.code == 0, found.printed + found.said
    assert found.report["verdict"] == "exact"
    assert "where is my noise?" in found.report["failed_without"]["noise"]
    assert "| noise | the command fails then |  |" in (found.out / "report.md").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_audit_that_is_ended_leaves_no_process_and_no_memory(tmp_path, memory_dir, number):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "EASYCKPT_MEMORY_DIR": str(memory_dir)}
    out, job = tmp_path / "audit", [sys.executable, str(JOB), str(tmp_path / "own"), "takes hours"]
    command = [sys.executable, "-m", "easyckpt", "audit", "--out", str(out), "--", *job]
    audit = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    log = out / "logs" / "straight.txt"
    while not (log.exists() and log.read_text().endswith("\n")):
        assert audit.poll() is None
        time.sleep(0.02)
    assert list(memory_dir.iterdir())
    audit.send_signal(number)
    assert audit.wait() == 130
    assert not psutil.pid_exists(int(log.read_text().split()[1]))
    assert list(memory_dir.iterdir()) == []
    assert not (out / "runs").exists()


def test_a_command_that_fails_is_said_with_its_last_lines(audit):
    assert audit("fails").code == 4
    found = audit("fails")  # what the first one has printed is in nobody's way
    assert found.code == 4
    assert "no such data set" in found.printed.splitlines()  # a line of its own, as the command has printed it
    assert "exit code 1" in found.printed


@pytest.mark.soak
def test_a_command_that_never_loads_is_told_to(audit):
    found = audit("never loads", "--no-parts", "--tier", "storage")
    assert found.code == 4
    assert "storage: it has called no load(), which a job that resumes needs" in found.printed


def test_a_command_without_a_checkpointer_is_bad_input(audit):
    found = audit("uses no easyckpt")
    assert found.code == 2
    assert "has made no Checkpointer" in found.said


def test_a_command_that_ends_before_it_is_to_be_stopped_is_bad_input(audit):
    found = audit("ends early")
    assert found.code == 2
    assert "ends after 5 saved steps by itself" in found.said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--steps", "12", "--at", "12"), "--at 12: must be below --steps 12"),
        (("--kill", "--every", "5"), "--every 5: must divide --at 12"),
        (("--kill", "--every", "12"), "at most half of it"),
    ],
)
def test_bad_options_start_nothing(audit, options, said):
    found = audit("", *options)
    assert found.code == 2
    assert said in found.said
    assert not found.out.exists()


def test_a_report_is_never_written_over(audit, tmp_path):
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "report.md").write_text("mine")
    found = audit()
    assert found.code == 2
    assert "is not empty" in found.said
    assert [path.name for path in found.out.iterdir()] == ["report.md"]


def test_logs_of_somebody_elses_are_left_alone(audit, tmp_path):
    mine = tmp_path / "audit" / "logs" / "train.log"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert audit("fails").code == 2
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", ["loss $\\frac$", "a$b^$", "_hidden", "損失"])
def test_names_are_no_formulas_to_the_picture(name):
    pytest.importorskip("matplotlib", reason="an extra")
    found = Findings(f"without-{name}", 0, "storage", [1], [], (1, 1), {}, {}, [], {1: {name: 2.0}})
    assert plots.picture({1: {name: 1.0}, 2: {name: 10**400}}, [found], name)


def test_a_command_that_does_not_exist_is_bad_input(tmp_path):
    result = CliRunner().invoke(app, ["audit", "--out", str(tmp_path / "audit"), "--", "/no/such/program"])
    assert result.exit_code == 2
    assert "/no/such/program: cannot be run: No such file" in result.stderr
