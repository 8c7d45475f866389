"""A training on several ranks, which add to each checkpoint a file each and one that all of them write."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import Trainer, TrainingArguments

from easyckpt.integrations.transformers import TrainerWrapper
from tests.trainers.data import Sequences
from tests.trainers.models import gpt2


class Own(Trainer):
    def _save_checkpoint(self, *args, **kwargs):
        super()._save_checkpoint(*args, **kwargs)
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        for name in (f"own-{self.args.process_index}.txt", "common.txt"):
            (checkpoint / name).write_text(name)


def main() -> None:
    settings = {"per_device_train_batch_size": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(sys.argv[1], max_steps=4, save_steps=2, ddp_backend="gloo", **settings)
    TrainerWrapper(Own(gpt2(), arguments, train_dataset=Sequences(40))).train()


if __name__ == "__main__":
    main()
