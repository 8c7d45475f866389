"""A training on two ranks, resumed where one of them cannot make what its Trainer is to read. Says what comes."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from transformers import Trainer, TrainingArguments

from easyckpt.integrations.transformers import TrainerWrapper
from tests.trainers.data import Sequences
from tests.trainers.models import gpt2


def trainer(out: str) -> Trainer:
    settings = {"per_device_train_batch_size": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(out, max_steps=4, save_steps=2, ddp_backend="gloo", **settings)
    return TrainerWrapper(Trainer(gpt2(), arguments, train_dataset=Sequences(12)))


def main() -> None:
    out, record = sys.argv[1:]
    trainer(out).train()
    if os.environ["RANK"] == "1":
        tempfile.tempdir = os.path.join(out, "nowhere")
    try:
        trainer(out).train(resume_from_checkpoint=True)
    except Exception as error:
        Path(f"{record}.{os.environ['RANK']}").write_text(f"{type(error).__name__}: {error}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
