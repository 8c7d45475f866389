"""A training that the Trainer itself saves: sharded by FSDP or DeepSpeed, or saved on each node; and plain ones.

What came of it goes to ``--record`` (JSON, one file a rank) when it has come to its end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.trainers.data import Sequences
from tests.trainers.models import gpt2

STEPS, SAVE = 8, 2
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "each_node": {"save_on_each_node": True},
    **{
        f"fsdp_{how}": {
            "fsdp": "full_shard",
            "fsdp_config": {"version": 2, "state_dict_type": f"{how.upper()}_STATE_DICT", "sync_module_states": False},
        }
        for how in ("full", "sharded")
    },
    **{
        f"zero{stage}": {
            "deepspeed": {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            }
        }
        for stage in (1, 2, 3)
    },
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--out", required=True)
    parser.add_argument("--record", required=True)
    parser.add_argument("--resume", type=json.loads, default=None)
    parser.add_argument("--arguments", type=json.loads, default={})
    parser.add_argument("--armed", default="")
    parser.add_argument("--until", type=int)
    parser.add_argument("--moment", choices=["step", "write"], default="step")
    parser.add_argument("--nodes", action="store_true", help="each rank is a node of its own")
    parser.add_argument("--waits", type=Path, help="for this file to be there, in the third step")
    parser.add_argument("--begun", type=Path, help="is made when training begins")
    parser.add_argument("--moves", type=Path, help="starts in this directory, and leaves it after the third step")
    parser.add_argument("--stock", action="store_true")
    given = parser.parse_args()
    logging.basicConfig(level="INFO")
    from easyckpt import failpoints

    if given.nodes:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if given.moves is not None:
        os.chdir(given.moves)
    given.out = given.out.replace("RANK", os.environ.get("RANK", "0"))
    trainer = make(given.kind, given.out, given.arguments)
    if given.until is not None:
        trainer.add_callback(Die(trainer, given.until, given.moment))
    if given.moves is not None:
        trainer.add_callback(Move())
    if given.waits is not None:
        trainer.add_callback(Wait(given.waits))
    if not given.stock:
        from easyckpt.integrations.transformers import TrainerWrapper

        failpoints.arm(given.armed)
        trainer = TrainerWrapper(trainer)
    notes = Notes(given.begun)
    trainer.add_callback(notes)
    trainer.train(resume_from_checkpoint=given.resume)
    assert ("fsdp" in given.kind) == trainer.is_fsdp_enabled
    said = {
        "began": notes.began,
        "steps": trainer.state.global_step,
        "weights": weights(trainer),
        "logs": logs(trainer),
    }
    Path(f"{given.record}.{trainer.args.process_index}").write_text(json.dumps(said))


def make(kind: str, out: str, more: dict[str, Any]) -> Trainer:
    settings = {
        "max_steps": STEPS, "save_steps": SAVE, "logging_steps": 1, "per_device_train_batch_size": 2, "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-2, "seed": 7,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
    }  # fmt: skip
    if "fsdp" in kind:  # 4.x leaves the version to accelerate, which looks there
        os.environ["FSDP_VERSION"] = "2"
    asked = TrainingArguments(out, **settings | KINDS[kind] | more)
    if "fsdp" in kind:
        shard_on_a_cpu()
    return Trainer(gpt2(), asked, train_dataset=Sequences(64))


def shard_on_a_cpu() -> None:
    """Without an accelerator, accelerate trains by DDP instead, and says nothing. FSDP 1 is refused by torch itself."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


class Notes(TrainerCallback):
    began = -1

    def __init__(self, begun: Path | None) -> None:
        self.begun = begun

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = state.global_step
        if self.begun is not None:
            self.begun.touch()


class Die(TrainerCallback):
    """Every rank by SIGKILL, in the middle of a step or of the Trainer's save."""

    def __init__(self, trainer: Trainer, step: int, moment: str) -> None:
        self.trainer, self.step = trainer, step
        if moment == "write":
            self.save = trainer._save_rng_state
            trainer._save_rng_state = lambda directory: self.die() or self.save(directory)
        else:
            self.on_pre_optimizer_step = lambda *_, **__: self.die()

    def die(self) -> None:
        if self.trainer.state.global_step != self.step:
            return
        if dist.is_initialized():
            dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


class Move(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            os.chdir("/")


class Wait(TrainerCallback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        while state.global_step == 3 and not self.path.exists():
            time.sleep(0.01)


def weights(trainer: Trainer) -> str:
    """A digest of the whole model's."""
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped, unwrap=False)
    sha = hashlib.sha256()
    for name, value in sorted((state or {}).items()):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        sha.update(name.encode() + content.numpy().tobytes())
    return sha.hexdigest()[:16]


def logs(trainer: Trainer) -> list[list[float]]:
    return [[entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
