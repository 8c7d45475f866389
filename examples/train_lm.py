"""Train a small language model on the sources of the Python installation, and survive being killed.

    python examples/train_lm.py --steps 200
    torchrun --standalone --nproc-per-node 2 examples/train_lm.py --steps 200

Kill it whenever you like (kill -9 too) and run the same command again: it goes on from the newest whole state, and the
losses and weights are those of a run that was never stopped, bit for bit. What easyckpt needs is marked with (n).
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import easyckpt

CORPUS_BYTES = 2_000_000
VOCABULARY = 256  # a token is a byte
PEAK_RATE, WARM_UP_STEPS, DROPOUT = 1e-3, 20, 0.1


class SourceText(Dataset[Tensor]):
    """Windows of `length` + 1 bytes of the standard library's sources, which every machine with Python has."""

    def __init__(self, length: int) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
        self.bytes, self.length = torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8), length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.bytes[index * self.length :][: self.length + 1].long()


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        fed: Tensor = self.drop(self.feed(self.norm_2(x)))
        return x + fed


class LanguageModel(nn.Module):
    """Predicts each byte from those before it; forward returns the mean loss over a batch of windows."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(nn.Dropout(DROPOUT), *(Block(width, max(1, width // 32)) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight  # tied

    def forward(self, windows: Tensor) -> Tensor:  # noqa: D102
        inputs, targets = windows[:, :-1], windows[:, 1:]
        x = self.token(inputs) + self.place(torch.arange(inputs.shape[1], device=inputs.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LossLog:
    """A CSV of step and loss, written by rank 0. A resumed run cuts what was logged past the restored step."""

    def __init__(self, path: Path, restored_step: int) -> None:
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        kept = [line for line in lines if int(line.partition(",")[0]) <= restored_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        shortened = path.with_name(path.name + ".new")
        shortened.write_text("".join(line + "\n" for line in ["step,loss", *kept]))
        shortened.replace(path)  # at once: a kill leaves the old log or the new one
        self.file = path.open("a", buffering=1)  # line by line: a kill loses nothing that was written

    def write(self, step: int, loss: float) -> None:
        """Six decimals are enough to tell two runs apart, and few enough to compare by eye."""
        self.file.write(f"{step},{loss:.6f}\n")


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine; of the absolute step, so a resumed run is where it was."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS))))


def digest(model: nn.Module) -> str:
    """SHA-256 over all weights, to compare two runs."""
    sha = hashlib.sha256()
    for name, value in model.state_dict().items():
        sha.update(name.encode() + bytes(value.cpu().contiguous().view(torch.uint8).flatten().tolist()))
    return sha.hexdigest()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs/lm", help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-storage-interval", type=int, default=50, help="steps between checkpoints on storage")
    parser.add_argument("--loss-csv", type=Path, help="log of step and loss")
    parser.add_argument("--final", type=Path, help="file for a digest of the final weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--seq-len", type=int, default=128)
    return parser.parse_args()


def main() -> None:
    """Train, from wherever an earlier run of the same command got to."""
    args = arguments()
    distributed_job = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed_job:
        distributed.init_process_group("gloo")
    rank = distributed.get_rank() if distributed_job else 0

    torch.manual_seed(args.seed)
    model: nn.Module = LanguageModel(args.layers, args.width, args.seq_len)
    if distributed_job:
        model = DistributedDataParallel(model)
    torch.manual_seed(args.seed + 1000 + rank)  # each rank has dropout of its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, args.steps))

    text = SourceText(args.seq_len)
    # (1) a sampler whose order follows from seed and epoch, so that consumed batches can be skipped unread
    sampler = easyckpt.SkipBatchSampler(len(text), args.batch_size, seed=args.seed, drop_last=True)
    loader = DataLoader(text, batch_sampler=sampler)
    if len(sampler) == 0:
        raise SystemExit("--batch-size and --seq-len leave not one batch of the text")

    # (2) DDP adds gradients up in another order in its first step: have that behind us before the state is loaded
    sample = torch.stack([text[0]] * args.batch_size)
    easyckpt.settle_ddp(model, lambda: model(sample).backward())

    # (3) the state; generators and the position in the data are kept without being named
    progress = {"epoch": 0}
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "progress": progress}
    with easyckpt.Checkpointer(args.root, state, save_storage_interval=args.save_storage_interval) as ckpt:
        step = ckpt.load().step  # (4) 0 where nothing was found
        log = LossLog(args.loss_csv, step) if args.loss_csv and rank == 0 else None
        while step < args.steps:
            for windows in ckpt.batches(loader, progress["epoch"]):  # (5) those that were not consumed yet
                optimizer.zero_grad()
                loss = model(windows)
                loss.backward()
                optimizer.step()
                schedule.step()
                step += 1
                if log:
                    log.write(step, loss.item())
                ckpt.save_if_needed(step)  # (6) returns at once
                if step == args.steps:
                    break
            progress["epoch"] += 1  # what belongs to a whole epoch is done here: once, after a resume too
    # (7) leaving the block made the newest state durable

    if args.final and rank == 0:
        args.final.write_text(digest(model) + "\n")
    if distributed_job:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
