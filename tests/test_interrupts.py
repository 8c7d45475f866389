"""Ctrl-C at any line of a save, of the hook before a step, or of the end: the job ends, and goes on to the bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.zygote import fork_program

PROGRAM = """
import hashlib, sys
import torch
from torch import nn
import easyckpt, easyckpt.farewell

easyckpt.farewell.FAREWELL_SECONDS = 2.0
root, where, place = sys.argv[1], sys.argv[2], int(sys.argv[3])
training = where == "training" and place
places = 0


def interrupt(frame, event, argument):
    global places
    ours = "/torch/" not in frame.f_code.co_filename  # (what is raised in a generator that torch drops is ignored)
    if ours and event in ("line", "return"):
        places += 1
        if places == place:
            sys.settrace(None)
            raise KeyboardInterrupt
    return interrupt


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(96, 96), nn.BatchNorm1d(96), nn.Dropout(0.1))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
settings = dict(save_storage_interval=7, exception_drain_timeout=2.0)
with easyckpt.Checkpointer(root, state, **settings) as checkpointer:
    restored = checkpointer.load()
    print("restored", restored.step, flush=True)
    for step in range(restored.step + 1, 13):
        model(torch.randn(4, 96)).square().sum().backward()
        sys.settrace(interrupt if step == 8 and training else None)  # its hook ends the window of step 7
        optimizer.step()
        sys.settrace(None)
        optimizer.zero_grad()
        sys.settrace(interrupt if step == 7 and training else None)
        checkpointer.save_if_needed(step)
        sys.settrace(None)
    sys.settrace(interrupt if where == "end" and place else None)
    checkpointer.close()
    sys.settrace(None)
digest = hashlib.sha256()
for tensor in [*model.state_dict().values(), torch.get_rng_state()]:
    digest.update(tensor.numpy().tobytes())
print("digest", digest.hexdigest(), "places", places, flush=True)
"""


def run(root: Path, where: str, place: int) -> tuple[int, list[str], str]:
    """(exit code, words that were printed, standard error)"""
    child = fork_program(PROGRAM, root, where, place, directory=root.parent)
    printed, stderr = child.communicate(100)
    return int(child.returncode or 0), printed.split(), stderr


@pytest.mark.parametrize("where", ["training", "end"])
@pytest.mark.parametrize("share", [8, pytest.param(100, marks=pytest.mark.soak)])
def test_an_interrupt_at_any_line_ends_the_job_which_goes_on_to_the_bit(tmp_path, where, share):
    code, words, stderr = run(tmp_path / "straight", where, 1_000_000)
    assert code == 0, stderr
    digest, count = words[3], int(words[5])
    assert count > 500
    for place in sorted(random.Random(share).sample(range(1, count + 1), share)):
        root = tmp_path / str(place)
        code, words, stderr = run(root, where, place)
        if code == 0:
            # How often it looks for the end of a thread differs, so there may be no such place; and what is raised in a
            # finalizer Python ignores.
            assert where == "end" or "Exception ignored" in stderr, (place, stderr)
            assert words[3] == digest, (place, words)
            continue
        assert "UsageError" not in stderr, (place, stderr)
        code, words, stderr = run(root, where, 0)
        assert code == 0, (place, stderr)
        assert int(words[1]) >= (6 if where == "training" else 11), (place, words)
        assert words[3] == digest, (place, words)
