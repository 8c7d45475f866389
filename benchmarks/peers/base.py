"""What `benchmarks/compare.py` asks of every library: one adapter each, used as the library's own documents say."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

EVERY = 5
"""Steps between two saves to storage."""


class Job:
    """A small training whose state is to be saved: weights, AdamW's moments, and the number of the step."""

    def __init__(self, width: int, layers: int, batch: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(layers))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.progress = {"step": 0}
        self._inputs = torch.randn(batch, width)

    @property
    def state_bytes(self) -> int:
        return 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())

    def train(self, peer: Peer) -> float:
        """One step; returns the seconds that `peer` held it up before the optimizer's step."""
        self.model(self._inputs).square().mean().backward()
        begun = time.perf_counter()
        peer.before_step()
        held = time.perf_counter() - begun
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress["step"] += 1
        return held

    def state_dict(self) -> dict[str, Any]:
        """For libraries that take a dict."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.progress["step"],
        }

    def load_state_dict(self, state: dict[str, Any]) -> int:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress["step"] = int(state["step"])
        return self.progress["step"]

    def digest(self) -> str:
        """Of every bit of the state: equal digests, equal states."""
        digest = xxhash.xxh3_128(str(self.progress["step"]).encode())
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state.get(parameter, {})
            for key, tensor in {"": parameter, **dict(sorted(moments.items()))}.items():
                digest.update(f"{name} {key}".encode())
                digest.update(torch.as_tensor(tensor).detach().numpy())
        return digest.hexdigest()


class Peer:
    """One way to save. Libraries are imported in the constructor, where what they raise is recorded."""

    name = ""
    package = ""
    """Its name on PyPI; empty where it comes with torch."""
    about = ""
    """The configuration, in words."""
    syncs = "no"
    """What it calls fsync on by itself."""
    every_step = False
    """It keeps a snapshot of every step in memory, and writes every fifth."""
    memory_survives = False
    """Snapshots in memory outlive the process."""
    late = 0
    """Steps by which what it writes is older than the step that it is asked to save."""

    def __init__(self, root: Path, job: Job) -> None:
        self.root, self.job = root, job

    def path(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def before_step(self) -> None:
        """What the library wants done before the optimizer changes the state."""

    def save(self, step: int, due: bool) -> float:
        """Save after a step; `due`: to storage. Returns the seconds that training was held."""
        if not (due or self.every_step):
            return 0.0
        begun = time.perf_counter()
        self.write(step, due)
        return time.perf_counter() - begun

    def write(self, step: int, due: bool) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        """Until what was asked for is written, as far as the library says."""

    def write_through(self, step: int) -> None:
        """Save `step` to storage and wait for it."""
        self.write(step, due=True)
        self.wait()

    def load(self) -> int | None:
        """Load the newest into the job; its step, None where nothing was found."""
        raise NotImplementedError

    def close(self) -> None:
        """The end of the job."""


class Nothing(Peer):
    """No checkpointing."""

    name = "none"
    about = "trains only"

    def write(self, step: int, due: bool) -> None: ...


def saved(root: Path) -> dict[int, Path]:
    """Checkpoints below `root` by step: whatever is named by its number (``step-10``, ``10``, ``step-10.pt``)."""
    found = {}
    for path in sorted(root.rglob("*")):
        match = re.fullmatch(r"(?:step-)?(\d+)(?:\.pt)?", path.name)
        if match is not None:
            found.setdefault(int(match.group(1)), path)
    return found


def newest(root: Path) -> Path | None:
    """What a script loads that has no more than names to go by: the highest number."""
    steps = saved(root)
    return steps[max(steps)] if steps else None
