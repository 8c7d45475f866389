"""The commands stream: what they need at most does not grow with the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import easyckpt
from tests.support.zygote import fork_program

MB = 1 << 20
SMALL, LARGE = 75 * MB, 300 * MB
#: What is between the peaks of two equal runs: where the allocator and the garbage collector happen to stand.
NOISE = 8 * MB

#: Prints by how many bytes the peak of a command is above what had been imported before it.
MEASURES = """
import re, sys
from easyckpt.cli import app
def peak():
    return int(re.search(r"VmHWM:\\s+([0-9]+) kB", open("/proc/self/status").read())[1]) * 1024
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew at what is used now
before = peak()
try:
    app(sys.argv[1:])
except SystemExit as ended:
    assert ended.code == 0, ended.code
print("peak", peak() - before)
"""


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[int, Path]:
    """A root with one checkpoint of each size."""
    made = {}
    for size in (SMALL, LARGE):
        made[size] = tmp_path_factory.mktemp("memory") / "run"
        state = {"weights": {str(number): torch.full((size // 12,), float(number)) for number in range(3)}}
        with easyckpt.Checkpointer(made[size], state, slots=1) as checkpointer:
            checkpointer.save(1, wait=True)
    return made


COMMANDS = {
    "cp": ("cp", "{root}@1", "{place}"),
    "verify": ("verify", "{root}@1"),
    "show": ("show", "{root}@1", "--tensors"),
    "ls": ("ls", "{root}"),
    "prune": ("prune", "{root}", "--keep", "1"),
    "pin": ("pin", "{root}@1"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_peak_of_a_command_does_not_grow_with_the_checkpoint(roots, tmp_path, command):
    peaks = {}
    for size, root in roots.items():
        words = [word.format(root=root, place=tmp_path / f"copy-{size}") for word in COMMANDS[command]]
        child = fork_program(MEASURES, *words, directory=tmp_path)
        out, err = child.communicate(120)
        assert child.returncode == 0, err
        peaks[size] = int(out.split("peak ")[-1])
    assert peaks[LARGE] <= 1.1 * peaks[SMALL] + NOISE
    assert peaks[LARGE] < 100 * MB
