"""The example with the Hugging Face Trainer: killed and started again, it ends as a run that was never stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.trainers.launch import REPOSITORY, VERSIONS, python_of, quiet

STEPS = 12
SMALL = {
    "max_steps": STEPS, "save_steps": 4, "logging_steps": 1, "eval_steps": 6, "layers": 2, "width": 32, "heads": 2,
    "block_size": 32, "corpus_bytes": 20_000, "eval_blocks": 8, "disable_tqdm": True,
}  # fmt: skip


LOSS, OVER = "{'loss'", "{'train_runtime'"


def example(version: str, output_dir: Path, *, kill_at: tuple[str, int] | None = None) -> list[str]:
    """Run it, or kill it when it has printed so many lines that begin like that; what it has printed."""
    words = [f"--{name}={value}" for name, value in {**SMALL, "output_dir": output_dir}.items()]
    command = [python_of(version), "-u", REPOSITORY / "examples" / "hf_trainer.py", *words]
    environment = {**os.environ, **quiet(), "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = []
    with process:
        for line in process.stdout:
            printed.append(line.strip())
            if kill_at is not None and len(lines(printed, kill_at[0])) == kill_at[1]:
                process.kill()
                break
        said = process.communicate()[1]
    assert process.returncode == (0 if kill_at is None else -signal.SIGKILL), said
    return printed


def lines(printed: list[str], beginning: str) -> list[str]:
    return [line for line in printed if line.startswith(beginning)]


def outcome(output_dir: Path, printed: list[str]) -> tuple[str, list[dict[str, float]]]:
    """The digest of the weights, and all that was logged but times."""
    state = json.loads((output_dir / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    log = [
        {k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k}
        for entry in state["log_history"]
    ]
    return lines(printed, "weights ")[0], log


@pytest.mark.parametrize("version", [pytest.param("4", marks=pytest.mark.soak), "5"])
def test_killed_again_and_again_it_ends_as_if_never_stopped(version, tmp_path):
    straight = outcome(tmp_path / "straight", example(version, tmp_path / "straight"))
    stopped = tmp_path / "stopped"
    runs = [example(version, stopped, kill_at=(LOSS, 3))]  # nothing is on storage yet
    runs.append(example(version, stopped, kill_at=(LOSS, 4)))
    runs.append(example(version, stopped, kill_at=(OVER, 1)))  # after the last step
    runs.append(example(version, stopped))
    assert outcome(stopped, runs[-1]) == straight
    losses = sum(len(lines(printed, LOSS)) for printed in runs)
    assert STEPS <= losses <= STEPS + 2 * (len(runs) - 1)  # it went on, and did not begin again


@pytest.mark.soak
def test_a_training_that_is_over_stays_so(tmp_path):
    version = VERSIONS[-1]
    first = outcome(tmp_path, example(version, tmp_path))
    again = example(version, tmp_path)
    assert not lines(again, LOSS)
    assert outcome(tmp_path, again) == first
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-12",
        "checkpoint-4",
        "checkpoint-8",
    ]
