"""A training on several ranks that the Trainer saves by itself, where one rank cannot do its part of a save.

``commit``: the manifest's place is taken when the second checkpoint is to be committed. ``write``: one rank cannot
write what is its own of it. What each rank has raised goes to ``RECORD.<rank>``; rank 0 then lives on until the others
have ended as well.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from transformers import Trainer, TrainerCallback, TrainingArguments

from easyckpt.integrations.transformers import TrainerWrapper
from tests.trainers.data import Sequences
from tests.trainers.models import gpt2

STEPS, SAVE = 6, 2


class Hinder(TrainerCallback):
    """A directory where a file is to be."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == SAVE + 1:
            self.place.mkdir(parents=True)


def main() -> None:
    out, record, what, hindered = sys.argv[1:]
    settings = {"per_device_train_batch_size": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(
        out, max_steps=STEPS, save_steps=SAVE, ddp_backend="gloo", save_on_each_node=True, **settings
    )
    trainer, rank = Trainer(gpt2(), arguments, train_dataset=Sequences(12)), os.environ["RANK"]
    if rank == hindered:
        name = "manifest.json" if what == "commit" else f"rng_state_{rank}.pth"
        trainer.add_callback(Hinder(Path(out) / f"checkpoint-{2 * SAVE}" / name))
    raised = "nothing"
    try:
        TrainerWrapper(trainer).train()
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    said = Path(f"{record}.{rank}.part")
    said.write_text(raised)
    said.rename(f"{record}.{rank}")
    if rank == "0":  # its end would end the others, too
        while not Path(f"{record}.1").exists():
            time.sleep(0.01)


if __name__ == "__main__":
    main()
