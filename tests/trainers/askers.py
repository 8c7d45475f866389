"""A training on two ranks, of which one alone, or each, asks for a checkpoint in the middle. Says how it has ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from transformers import Trainer, TrainerCallback, TrainingArguments

from easyckpt.integrations.transformers import TrainerWrapper
from tests.trainers.data import Sequences
from tests.trainers.models import gpt2

STEPS, SAVE, ASKED = 12, 4, 6


class Asker(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == ASKED:
            control.should_save = True


def main() -> None:
    out, record, who = sys.argv[1:]
    settings = {"per_device_train_batch_size": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(out, max_steps=STEPS, save_steps=SAVE, ddp_backend="gloo", **settings)
    assert arguments.device  # the process group is there, with the longer timeout
    arguments.ddp_timeout = 3
    trainer = Trainer(gpt2(), arguments, train_dataset=Sequences(12))
    if who in ("all", os.environ["RANK"]):
        trainer.add_callback(Asker())
    error = ""
    try:
        TrainerWrapper(trainer, peer_timeout=3).train()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    Path(f"{record}.{os.environ['RANK']}").write_text(error)


if __name__ == "__main__":
    main()
