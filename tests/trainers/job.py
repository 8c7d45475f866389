"""One training of the table, in a process of its own: straight through, killed at a step, stopped there, or resumed.

What came of it goes to ``--record`` (JSON, one file a rank) with the tensors beside it: it is written when the training
has come to its end or to an orderly stop, so a killed job leaves none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator
from transformers import __version__ as transformers_version
from transformers.trainer_callback import ExportableState

from tests.trainers import models
from tests.trainers.data import Sequences
from tests.trainers.scenarios import BATCH, LONG, SAVE, STEPS, TABLE, Scenario, Setup

#: Of a run, not of the training: these differ between any two.
OF_THE_CLOCK = ("_runtime", "_per_second", "step_time")
#: The mean over the steps of this call of train(), by definition.
OF_THIS_CALL = ("train_loss",)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=sorted(TABLE))
    parser.add_argument("--out", required=True, help="the Trainer's output_dir")
    parser.add_argument("--record", required=True, help="path; the rank is appended")
    parser.add_argument("--mode", choices=["stock", "wrapped"], required=True)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON of the wrapper's options")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--moment", help="where in that step; the scenario's own by default")
    parser.add_argument("--armed", default="", metavar="FAILPOINTS", help="as EASYCKPT_FAILPOINTS takes them")
    parser.add_argument("--until", type=int, help="end when this step has ended")
    parser.add_argument("--how", choices=["kill", "stop", "signal"], default="kill")
    parser.add_argument("--committed", type=int, help="be killed only when this step is in storage")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    scenario = TABLE[given.scenario]
    path = Path(f"{given.record}.{os.environ.get('RANK', '0')}")
    # As in a new process: the generators that nobody has seeded are anywhere.
    random.seed()
    np.random.seed()
    torch.seed()
    trainer = trainer_of(scenario, given.out)
    notes = Notes(trainer.model)
    trainer.add_callback(notes)
    if given.until is not None:
        end = End(given, scenario, path)
        end.managers = [each.jit_manager for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager")]
        for manager in end.managers:
            manager.kill_wait = 0
        trainer.add_callback(end)
    if given.mode == "wrapped":
        from easyckpt import failpoints
        from easyckpt.integrations.transformers import TrainerWrapper

        failpoints.arm(given.armed)
        trainer = TrainerWrapper(trainer, **given.options)
    output = trainer.train(resume_from_checkpoint=True if given.resume else None)
    path.write_text(json.dumps(record(trainer, notes) | {"train_loss": output.training_loss}, indent=1))
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    torch.save(weights, f"{path}.pt")


# -- the Trainer -------------------------------------------------------------------------------------------------------


def trainer_of(scenario: Scenario, out: str) -> Trainer:
    setup = scenario.build()
    more = setup.more if setup.trainer else {"data_collator": default_data_collator} | setup.more
    if setup.model is None and "model_init" not in more:
        setup.model = models.gpt2()
    train = Sequences(LONG) if setup.train is None else setup.train
    asked = (setup.asked or TrainingArguments)(output_dir=out, **training_arguments(setup))
    return (setup.trainer or Trainer)(
        model=setup.model, args=asked, train_dataset=train, eval_dataset=setup.evaluation, **more
    )


def training_arguments(setup: Setup) -> dict[str, Any]:
    """Those of all scenarios, and the scenario's own, under the names of this version."""
    common = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_steps": SAVE,
        "seed": 7,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
    }
    own = dict(setup.arguments)
    if own.pop("group_by_length", False):
        is_new = hasattr(TrainingArguments, "train_sampling_strategy")
        own |= {"train_sampling_strategy": "group_by_length"} if is_new else {"group_by_length": True}
    return common | own


# -- its end -----------------------------------------------------------------------------------------------------------


class End(TrainerCallback):
    """Ends the training after a step: by SIGKILL, in order, or by SIGTERM, upon which it is to end in order."""

    def __init__(self, given: argparse.Namespace, scenario: Scenario, path: Path) -> None:
        self.given, self.path = given, path
        self.signalled, self.managers = False, []
        if given.how != "stop":
            setattr(self, given.moment or scenario.moment, self.die if given.how == "kill" else self.signal)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.given.how == "stop" and state.global_step == self.given.until:
            control.should_training_stop = True

    def signal(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.given.until and not self.signalled:
            self.signalled = True
            os.kill(os.getpid(), signal.SIGTERM)
            for manager in self.managers:  # the Trainer's own: it asks for a checkpoint on a thread, after a wait
                until(lambda manager=manager: manager.is_checkpoint_requested)

    def die(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step != self.given.until:
            return
        if self.given.committed is not None:
            # The stock Trainer writes this file last; the wrapper makes all of them appear at once.
            last = Path(self.given.out, f"checkpoint-{self.given.committed}", "trainer_state.json")
            until(last.exists)
        mark = Path(f"{self.path}.here")
        mark.touch()
        until(lambda: len(list(mark.parent.glob(f"{mark.stem.rpartition('.')[0]}.*.here"))) == args.world_size)
        os.kill(os.getpid(), signal.SIGKILL)


def until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.002)


# -- what came of it ---------------------------------------------------------------------------------------------------


class Notes(TrainerCallback):
    """Where the training has begun, and what each forward pass of it was given."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self.began = -1
        self.batches: list[list[Any]] = []
        self.step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.began = state.global_step
        self.step = state.global_step + 1
        model.register_forward_pre_hook(self.see, with_kwargs=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step + 1

    def see(self, module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module.training:
            self.batches.append([self.step, digest([given, named])])


def record(trainer: Trainer, notes: Notes) -> dict[str, Any]:
    """Everything that must be as in a straight run, and `began`."""
    state = trainer.state
    return {
        "transformers": transformers_version,
        "began": notes.began,
        "steps": state.global_step,
        "weights": digest(trainer.model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "scheduler": digest(trainer.lr_scheduler.state_dict()),
        "generators": {
            "python": digest(random.getstate()),
            "numpy": digest(np.random.get_state()),
            "torch": digest(torch.get_rng_state()),
        },
        "epoch": state.epoch,
        "total_flos": state.total_flos,
        "tokens_seen": state.num_input_tokens_seen,
        "best": [state.best_metric, getattr(state, "best_global_step", None)],
        "callbacks": digest([part.state() for part in stateful_callbacks(trainer)]),
        "logs": [{key: value for key, value in entry.items() if is_of_training(key)} for entry in state.log_history],
        "batches": notes.batches,
    }


def stateful_callbacks(trainer: Trainer) -> list[ExportableState]:
    """The user's and the framework's, not the wrapper's."""
    callbacks = [part for part in trainer.callback_handler.callbacks if isinstance(part, ExportableState)]
    return [part for part in callbacks if not type(part).__module__.startswith("easyckpt.")]


def is_of_training(key: str) -> bool:
    return not key.endswith(OF_THE_CLOCK) and key not in OF_THIS_CALL


def digest(value: Any) -> str:
    """Of every bit of a structure of tensors and plain values."""
    sha = hashlib.sha256()
    for piece in pieces(value):
        sha.update(piece)
    return sha.hexdigest()[:16]


def pieces(value: Any) -> Iterable[bytes]:
    if isinstance(value, torch.Tensor):
        dense = value.detach().cpu().contiguous()
        yield f"{dense.dtype}{tuple(dense.shape)}".encode()
        yield dense.flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + value.tobytes()
    elif isinstance(value, dict):
        for key in value:
            yield f"{key!r}:".encode()
            yield from pieces(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}".encode()
        for element in value:
            yield from pieces(element)
    else:
        assert not callable(value), f"a digest of {value!r} says nothing"
        yield repr(value).encode()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
