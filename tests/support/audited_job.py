"""A training script as users write it, which a test has audited: exact, or with one classic mistake.

python audited_job.py ROOT [MISTAKE]
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import easyckpt

STEPS = 24
root, mistake = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else "")
if mistake == "fails":
    sys.exit("no such data set")
if mistake == "takes hours":
    print(f"started {os.getpid()}", flush=True)
    time.sleep(3600)
if mistake == "uses no easyckpt":
    sys.exit(0)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank = int(os.environ.get("RANK", "0"))


class OwnOrder(Sampler[int]):
    """Shuffles by a generator of Python's that nobody hands over, seeded at the start of each process."""

    def __init__(self, length: int) -> None:
        self._length, self._random = length, random.Random(3)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.sample(range(self._length), self._length))


if mistake != "never seeds":
    torch.manual_seed(rank)
if mistake != "never seeds Python":
    random.seed(rank)
    np.random.seed(rank)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
if "RANK" in os.environ:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
noise = torch.Generator().manual_seed(7 + rank)
evaluation = torch.Generator().manual_seed(8)
_FRESH = noise.get_state()
jitter = np.random.default_rng(5 + rank)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "noise": noise}
if mistake == "names with slashes":
    state = {"model": model, "a/b": optimizer, "../..": scheduler, "é": noise}
if mistake == "forgets the generator":
    del state["noise"]
if mistake == "counts the schedule from zero":
    del state["scheduler"]

with easyckpt.Checkpointer(root, state, save_storage_interval=10, log_file_path=f"{root}.log") as checkpointer:
    step = 0 if mistake == "never loads" else checkpointer.load().step
    if mistake == "cannot do without its noise" and step and noise.get_state().equal(_FRESH):
        sys.exit("where is my noise?")
    start = step
    seeds = mistake == "seeds in its loop"
    position = logs = 0  # of a program that counts by itself
    sampler = OwnOrder(len(data)) if mistake == "seeds its sampler anew" else None
    for epoch in range(step // 8, 100):
        loader = DataLoader(data, 8, shuffle=sampler is None, sampler=sampler)
        for batch in checkpointer.batches(loader, epoch):
            x, y = batch
            if seeds:
                torch.manual_seed(rank)
                seeds = False
            if mistake == "forgets NumPy's generator":
                x = x + float(jitter.normal())
            if mistake == "reads by a counter of its own":
                x, y = data[[(8 * position + n) % 64 for n in range(8)]]
                position += 1
            loss = (model(x + 0.01 * torch.randn(x.shape, generator=noise)) - y).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if mistake == "evaluates with a generator of its own" and step % 10 == 0:
                torch.rand(3, generator=evaluation)
            if mistake == "counts its loop from zero" and step - start > 18:
                sys.exit(0)
            if mistake == "ends early" and step > 5:
                sys.exit(0)
            logs += 1
            if mistake != "logs by a counter of its own" or logs % 5 == 0:
                checkpointer.log(loss=loss, seconds=time.time())
            checkpointer.save_if_needed(step)
