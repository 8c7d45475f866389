"""A small job that finishes some steps, says so, and waits to be killed or told to end: `python livejob.py ROOT …`."""

from __future__ import annotations

import argparse
import sys

import torch

import easyckpt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with easyckpt.Checkpointer(options.root, state, save_storage_interval=options.every) as ckpt:
        start = ckpt.load()
        for step in range(start.step, options.steps):
            loss = model(torch.ones(1, 64)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.log(loss=loss)
            ckpt.save_if_needed(step + 1)
            ckpt.wait()
        print(f"ready {start.step} {start.tier}", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
