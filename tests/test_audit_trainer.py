"""``easyckpt audit`` proves a wrapped Trainer exact, killed in a flush too, and names what a script forgets.

Everything is real: the command line of this environment starts a script in one that has transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from easyckpt.cli import app
from tests.trainers.launch import REPOSITORY, python_of, quiet

SCRIPT = REPOSITORY / "tests" / "trainers" / "audited.py"
STEPS, AT = 12, 6


@pytest.fixture
def audit(tmp_path, memory_dir, monkeypatch):
    """Audits the script with a mistake: (exit code, report, all that was said)."""
    for name, value in {**quiet(), "PYTHONPATH": str(REPOSITORY)}.items():
        monkeypatch.setenv(name, value)

    def run(mistake: str, *options: str) -> tuple[int, dict[str, Any], str]:
        own, out = tmp_path / "own", tmp_path / "audit"
        command = [str(python_of("5")), str(SCRIPT), str(own), mistake]
        numbers = ["--steps", str(STEPS), "--at", str(AT), "--out", str(out)]
        result = CliRunner().invoke(app, ["audit", *numbers, *options, "--", *command])
        said = result.stdout + result.stderr
        assert files_in(own) == [], "the user's own files were touched"
        assert list(memory_dir.iterdir()) == [], "memory was left"
        return result.exit_code, json.loads((out / "report.json").read_text()), said

    return run


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.soak
def test_a_trainer_killed_in_a_flush_goes_on_exactly_from_both_tiers(audit):
    code, report, said = audit("", "--kill", "--every", "2", "--no-parts")
    assert code == 0, said
    assert report["killed"]["step"] == AT
    runs = {run["tier"]: run for run in report["resumed"]}
    assert runs["storage"]["restored_step"] in (AT - 2, AT)
    assert AT - 1 <= runs["memory"]["restored_step"] <= AT
    for run in runs.values():
        assert run["identical"]
        assert set(run["compared_steps"]) >= {8, 10, 12}
        names = {part["component"] for part in run["components"]}
        assert names >= {"model", "optimizer", "scheduler", "trainer", "data", "easyckpt.rng"}
        assert {metric["name"] for metric in run["metrics"]} >= {"loss", "grad_norm", "learning_rate"}
    assert report["not_compared"]["metrics"] == []


MISTAKES = {
    "forgets the generator": (
        "a torch.Generator that is not part of the state (the global own of __main__) is not where it was",
        "draw from the global generators",
    ),
    "counts the schedule from zero": (
        "the learning rate of 'optimizer' is 0.001 where it was 0.000142857",
        "set a rate nowhere else, or make it of trainer.state.global_step",
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_culprit_is_named_in_the_terms_of_a_trainer(audit, mistake):
    code, report, said = audit(mistake, "--tier", "storage", "--no-parts")
    assert code == 1, said
    (run,) = report["resumed"]
    what, advice = MISTAKES[mistake]
    assert what in run["culprit"]["what"]
    assert run["culprit"]["step"] == AT + 1
    assert advice in run["culprit"]["advice"]
