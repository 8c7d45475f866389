"""A training on several ranks, of which only the first listens to what is saved. Says what it has heard."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from transformers import Trainer, TrainerCallback, TrainingArguments

from easyckpt.integrations.transformers import TrainerWrapper
from tests.trainers.data import Sequences
from tests.trainers.models import gpt2

STEPS, SAVE = 24, 2


class Listener(TrainerCallback):
    def __init__(self) -> None:
        self.heard: list[int] = []

    def on_save(self, args, state, control, **kwargs):
        assert (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "trainer_state.json").exists()
        self.heard.append(state.global_step)


def main() -> None:
    out, record = sys.argv[1:]
    settings = {"per_device_train_batch_size": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(out, max_steps=STEPS, save_steps=SAVE, ddp_backend="gloo", **settings)
    trainer, listener = Trainer(gpt2(), arguments, train_dataset=Sequences(12)), Listener()
    if trainer.is_world_process_zero():
        trainer.add_callback(listener)
    TrainerWrapper(trainer).train()
    Path(f"{record}.{os.environ['RANK']}").write_text(json.dumps(listener.heard))


if __name__ == "__main__":
    main()
