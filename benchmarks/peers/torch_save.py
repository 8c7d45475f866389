"""`torch.save` to a temporary name, then replace: what most scripts do."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks.peers.base import Peer, newest


class TorchSave(Peer):
    name = "torch.save"
    about = "`torch.save` to a temporary name, `os.replace`; the file with the highest number is loaded"

    def path(self, step: int) -> Path:
        return self.root / f"step-{step}.pt"

    def write(self, step: int, due: bool) -> None:
        temporary = self.path(step).with_suffix(".tmp")
        torch.save(self.job.state_dict(), temporary)
        os.replace(temporary, self.path(step))

    def load(self) -> int | None:
        path = newest(self.root)
        return None if path is None else self.job.load_state_dict(torch.load(path, weights_only=True))
