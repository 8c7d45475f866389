"""A training on two ranks, of which one alone, or each, asks for a checkpoint in the middle. Says how it has ended.

With ``own`` the program has its own ``_save_checkpoint``; with ``before``, ``after`` or ``interrupted`` one rank fails
in it, and with ``unreadable`` when what it has written there is read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from transformers import Trainer, TrainerCallback, TrainingArguments

from easyckpt.integrations.transformers import TrainerWrapper
from tests.trainers.data import Sequences
from tests.trainers.models import gpt2

STEPS, SAVE, ASKED = 12, 4, 6
RANK = os.environ.get("RANK")


class Asker(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == ASKED:
            control.should_save = True


class Own(Trainer):
    fails = ("", "")

    def _save_checkpoint(self, *args, **kwargs):
        here = self.state.global_step == ASKED and self.fails[1] == RANK
        how = self.fails[0] if here else ""
        if how == "before":
            raise OSError("no room")
        super()._save_checkpoint(*args, **kwargs)
        if how == "after":
            raise OSError("no room")
        if how == "interrupted":
            raise KeyboardInterrupt
        if how == "unreadable":
            own = Path(self.args.output_dir) / f"checkpoint-{ASKED}" / "own.txt"
            os.symlink("/proc/self/mem", own)  # that is there, and of which nobody can read the beginning


def main() -> None:
    out, record, who, how = sys.argv[1:]
    settings = {"per_device_train_batch_size": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(out, max_steps=STEPS, save_steps=SAVE, ddp_backend="gloo", **settings)
    assert arguments.device  # the process group is there, with the longer timeout
    fails = how not in ("stock", "own")
    arguments.ddp_timeout = 60 if fails else 3  # so long nobody is to wait
    trainer = (Trainer if how == "stock" else type("Own", (Own,), {"fails": (how, who)}))(
        gpt2(), arguments, train_dataset=Sequences(12)
    )
    if fails or who in ("all", RANK):
        trainer.add_callback(Asker())
    error = ""
    try:
        TrainerWrapper(trainer, peer_timeout=3).train()
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    Path(f"{record}.{RANK}").write_text(error)


if __name__ == "__main__":
    main()
