"""One training of `benchmarks/hf_trainer.py`, in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

STEPS, EVERY = 12, 3
"""Steps of a training that saves, steps between saves."""
STEADY, WARM = 32, 12
"""Steps of a training that does not, steps before the part of it that counts: by then all memory was touched once."""
WRAPPED = ("easyckpt", "memory", "turns")
ONLY_MEMORY = ("memmove", "memory", "turns")
DRAIN_SECONDS = 120
FIGURES = "figures.json"
"""What came out, in the directory that the training gets; others write into its standard output."""


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    vocabulary: int
    batch: int
    length: int = 64


SIZES = {"full": Size(12, 768, 50257, 2), "small": Size(4, 256, 4000, 8)}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random ones: what is learned does not matter."""

    def __init__(self, size: Size) -> None:
        shape = (STEADY * size.batch, size.length)
        self.tokens = torch.randint(size.vocabulary, shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def copies(variant: str, step: int) -> bool:
    """Whether a bare memmove follows this step; in "turns" it does where no snapshot follows."""
    return variant == "memmove" or (variant == "turns" and step % 2 == 1)


def clock_of(variant: str, nbytes: int) -> Any:
    """A callback that notes times, the same for every variant; after steps that `copies` tells, `nbytes` are copied."""
    from transformers import TrainerCallback

    from benchmarks.training import Memmove

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.began: dict[int, float] = {}
            self.ended: dict[int, float] = {}
            self.in_hooks: dict[int, float] = {}
            """Seconds that others have taken right before and right after the optimizer's own step."""
            self._inner = (0.0, 0.0)
            self._before = 0.0
            self._memmove = Memmove(nbytes) if copies(variant, 1) else None

        def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            # The optimizer's own hooks are called nearest to its step, those of all optimizers around them.
            optimizer = getattr(objects["optimizer"], "optimizer", objects["optimizer"])
            optimizer.register_step_pre_hook(lambda *_: self._note(0))
            optimizer.register_step_post_hook(lambda *_: self._note(1))

        def _note(self, which: int) -> None:
            now = time.perf_counter()
            self._inner = (now, now) if which == 0 else (self._inner[0], now)

        def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            self.began[int(state.global_step) + 1] = time.perf_counter()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            self._before = time.perf_counter()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            begun, done = self._inner
            self.in_hooks[int(state.global_step) + 1] = begun - self._before + time.perf_counter() - done

        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            self.ended[int(state.global_step)] = time.perf_counter()
            if self._memmove is not None and copies(variant, int(state.global_step)):
                self._memmove.save(due=False)

        def held(self, step: int) -> float:
            """From the end of `step` to the begin of the next, and in hooks of the next: snapshot, save, next batch."""
            return self.began[step + 1] - self.ended[step] + self.in_hooks[step + 1]

    return Clock()


def trainer_of(variant: str, saves: dict[int, float], *positional: Any, **named: Any) -> Any:
    """The variant's Trainer. `saves` gets the seconds of each ``_save_checkpoint`` but ours, where it is not all."""
    from transformers import Trainer

    if variant in WRAPPED:
        from easyckpt.integrations.transformers import TrainerWrapper

        return TrainerWrapper(Trainer(*positional, **named), save_mem_interval=2 if variant == "turns" else 1)
    if variant == "DLRover":
        from dlrover.trainer.torch.flash_checkpoint.hf_trainer import FlashCkptTrainer as Trainer

    class Timed(Trainer):  # type: ignore[misc, valid-type]
        def _save_checkpoint(self, *arguments: Any, **more: Any) -> None:
            begun = time.perf_counter()
            super()._save_checkpoint(*arguments, **more)
            saves[int(self.state.global_step)] = time.perf_counter() - begun

    return Timed(*positional, **named)


def drain_dlrover(output_dir: str) -> None:
    """Until it says that the last step is written. Its own wait looks every few seconds, which would be measured."""
    tracker, begun = Path(output_dir, "dlrover_latest.txt"), time.perf_counter()
    while not (tracker.exists() and tracker.read_text() == str(STEPS)):
        if time.perf_counter() - begun > DRAIN_SECONDS:
            raise TimeoutError(f"DLRover has not written step {STEPS} after {DRAIN_SECONDS} s")
        time.sleep(0.005)


def train(variant: str, size: Size, output_dir: str) -> dict[str, Any]:
    """Train, and tell when what happened."""
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

    set_seed(0)
    heads = size.width // 64
    config = GPT2Config(
        n_layer=size.layers, n_embd=size.width, n_head=heads, vocab_size=size.vocabulary, bos_token_id=None,
        eos_token_id=None, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    steps = STEADY if variant in ONLY_MEMORY else STEPS
    nbytes = 3 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    args = TrainingArguments(
        output_dir, max_steps=steps, per_device_train_batch_size=size.batch, save_steps=EVERY, save_total_limit=2,
        save_strategy="no" if variant in ONLY_MEMORY else "steps", logging_strategy="no", report_to="none",
        use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    clock, saves = clock_of(variant, nbytes), dict[int, float]()
    trainer = trainer_of(variant, saves, model=model, args=args, train_dataset=Tokens(size), callbacks=[clock])
    called = time.perf_counter()
    trainer.train()
    if variant == "DLRover":
        drain_dlrover(output_dir)
    returned = time.perf_counter()
    due = [step for step in range(1, STEPS) if step % EVERY == 0]
    wrapped, before = variant in WRAPPED, 0 if variant not in ONLY_MEMORY else WARM
    lasted = {step: clock.ended[step + 1] - clock.ended[step] for step in range(before + 1, steps)}
    return {
        "parameters": parameters,
        "state_bytes": nbytes,
        "until_last": clock.ended[steps] - called,
        "whole": returned - called,
        # After each step that a snapshot follows, and after those that a memmove follows.
        "steady": [seconds for step, seconds in lasted.items() if not copies(variant, step) or variant == "memmove"],
        "beside": [seconds for step, seconds in lasted.items() if copies(variant, step)],
        "blocked": [] if args.save_strategy == "no" else [clock.held(s) if wrapped else saves[s] for s in due],
        "between": [clock.held(step) for step in range(before + 1, steps) if step not in due],
        "first": clock.held(1),
        "steps": [clock.began[step + 1] - clock.began[step] for step in range(1, steps)],
        "kept": sorted(path.name for path in Path(output_dir).glob("checkpoint-*")),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("variant")
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    # DLRover's shared memory and sockets carry this name: one of our own leaves other jobs of the machine alone.
    os.environ["TORCHELASTIC_RUN_ID"] = f"compare-{os.getpid()}"
    figures = train(arguments.variant, SIZES[arguments.size], str(arguments.directory / "output"))
    (arguments.directory / FIGURES).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
