"""A script with a Trainer as users write it, which a test has audited: exact, or with a mistake.

python audited.py OUTPUT_DIR [MISTAKE]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed

from easyckpt.integrations.transformers import TrainerWrapper
from tests.trainers import models

STEPS, LENGTH, TOKENS = 40, 16, 64
output_dir, mistake = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else "")


class Noisy(Dataset[dict[str, Tensor]]):
    """Random tokens, some of which are replaced at each look: by the global generator, or by one of its own."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.tokens = torch.randint(1, TOKENS, (128, LENGTH), generator=torch.Generator().manual_seed(3))
        self.noise = generator

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        replaced = torch.rand(LENGTH, generator=self.noise) < 0.2
        tokens = torch.where(replaced, 0, self.tokens[index])
        return {"input_ids": tokens, "labels": tokens}


class OwnSchedule(TrainerCallback):
    """Sets the learning rate by a counter that begins at nothing in each process."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / self.steps


set_seed(7)
own = torch.Generator().manual_seed(5) if mistake == "forgets the generator" else None
arguments = TrainingArguments(
    output_dir=output_dir,
    max_steps=STEPS,
    per_device_train_batch_size=4,
    logging_steps=1,
    save_steps=10,
    save_total_limit=1,
    learning_rate=1e-3,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(
    model=models.gpt2(),
    args=arguments,
    train_dataset=Noisy(own),
    data_collator=default_data_collator,
    callbacks=[OwnSchedule()] if mistake == "counts the schedule from zero" else [],
)
trainer = TrainerWrapper(trainer)
trainer.train(resume_from_checkpoint=True)
