"""Train the language model of train_lm.py with accelerate, and survive being killed.

    python examples/accelerate_loop.py --epochs 3
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --epochs 3

Needs ``pip install accelerate``. Kill it whenever you like (kill -9 too) and run the same command again: it goes on
from the newest whole state, and losses and weights are those of a run that was never stopped, bit for bit, on the same
batches in the same order. What easyckpt needs is marked with (n).
"""

from __future__ import annotations

import argparse
import logging

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from train_lm import LanguageModel, SourceText, digest

from easyckpt.integrations.accelerate import AccelerateCheckpointer


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs/accelerate", help="directory of the checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="windows a batch, on each rank")
    parser.add_argument("--accumulate", type=int, default=2, help="batches an optimizer step")
    parser.add_argument("--length", type=int, default=128, help="bytes a window")
    parser.add_argument("--windows", type=int, default=4000, help="windows an epoch, of all ranks together")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--workers", type=int, default=0, help="processes that read data")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train to the last epoch."""
    given = arguments()
    logging.basicConfig(level="INFO", format="%(message)s")
    set_seed(given.seed)
    accelerator = Accelerator(gradient_accumulation_steps=given.accumulate)
    model: torch.nn.Module = LanguageModel(given.layers, given.width, given.length)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)  # once an epoch
    text = SourceText(given.length)
    data = torch.utils.data.Subset(text, range(min(given.windows, len(text))))
    loader = DataLoader(data, batch_size=given.batch, shuffle=True, num_workers=given.workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = {"epoch": 0}

    # (1) model and optimizer are taken from the Accelerator; what it does not know is handed over
    state = {"schedule": schedule, "progress": progress}
    with AccelerateCheckpointer(given.root, accelerator, state, save_storage_interval=50) as checkpointer:
        step = checkpointer.load().step  # (2)
        for epoch in range(progress["epoch"], given.epochs):
            progress["epoch"] = epoch
            for windows in checkpointer.batches(loader, epoch):  # (3) those that were not trained on yet
                with accelerator.accumulate(model):
                    loss = model(windows)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    step += 1
                    checkpointer.log(loss=loss)  # goes to ROOT/metrics.jsonl
                    checkpointer.save_if_needed(step)  # (4) returns at once
                    if step % 10 == 0:
                        accelerator.print(f"epoch {epoch}  step {step}  loss {loss.item():.6f}", flush=True)
            schedule.step()
    accelerator.print(f"weights {digest(accelerator.unwrap_model(model))}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
