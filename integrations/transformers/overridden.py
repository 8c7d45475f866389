"""What a program's own subclass has in the place of the Trainer's methods, and what follows from it.

Most of its methods are called as by the Trainer itself. Said is what is not called, and what does another thing than
easyckpt could build upon.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from transformers import Trainer

from easyckpt.integrations.transformers import versions

_log = logging.getLogger("easyckpt")

#: What the Trainer restores a checkpoint by. All of it is put back at once, so a class of the user's is not asked.
LOADING = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state")
#: What the Trainer writes the parts of a checkpoint by, and removes old ones by. The files are made of a snapshot.
SAVING = (
    "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state", "_save_tpu", "_rotate_checkpoints",
    "_sorted_checkpoints", "_get_output_dir",
)  # fmt: skip
#: What easyckpt extends: set on the object itself, it hides what was put before it.
EXTENDED = (
    "train", "get_train_dataloader", "training_step", "_save_checkpoint", "_inner_training_loop", "_run_epoch",
    "_maybe_log_save_evaluate", "_load_best_model", "_load_callback_state", *LOADING,
)  # fmt: skip


def warn(trainer: Any, ours: tuple[type, ...]) -> None:
    """Say which methods of the trainer's class or object are not called, or hide ours."""
    name = type(trainer).__name__

    def theirs(methods: tuple[str, ...]) -> list[str]:
        return [each for each in methods if each in vars(trainer) or not versions.is_stock(type(trainer), each, ours)]

    if loading := theirs(LOADING):
        _log.warning(
            "%s overrides %s, which is not called when easyckpt restores: what it loads beside the Trainer's own state "
            "has to be loaded in a callback's on_train_begin",
            name,
            ", ".join(loading),
        )
    if saving := theirs(SAVING):
        _log.warning(
            "%s overrides %s, which is not called for a checkpoint: its files are made of a snapshot, in output_dir, "
            "and old ones go by save_total_limit. Files of your own are added in _save_checkpoint, after "
            "super()._save_checkpoint()",
            name,
            ", ".join(saving),
        )


def warn_of_own_training(trainer: Any, ours: tuple[type, ...]) -> None:
    """Of a resumed run: what the trainer's class is handed to resume from holds the Trainer's state alone."""
    own = [one for one in ("train", "_inner_training_loop") if not versions.is_stock(type(trainer), one, ours)]
    if own:
        _log.warning(
            "%s overrides %s, which is handed a directory that holds the Trainer's state alone, since easyckpt "
            "restores the rest: what it would load from the checkpoint beside that is not there",
            type(trainer).__name__,
            ", ".join(own),
        )


def warn_of_hidden(trainer: Any) -> None:
    """Methods that were set on the object come before all classes."""
    for method in EXTENDED:
        if method in vars(trainer):
            trainer._easyckpt.warn_once(f"hidden {method}", functools.partial(_warn_of_hidden, trainer, method))


def _warn_of_hidden(trainer: Any, method: str) -> None:
    _log.warning(
        "%s is set on the %s object itself, which hides what easyckpt does there: snapshots, or what they hold, may be "
        "missing. Give the Trainer a subclass that has it",
        method,
        type(trainer).__name__,
    )


def warn_of_own_saving(trainer: Any) -> None:
    """Its ``_save_checkpoint`` has not come to the Trainer's."""
    _log.warning(
        "%s._save_checkpoint has not called super()._save_checkpoint() at step %d: what it writes is all that is saved "
        "then, and easyckpt neither commits nor verifies it. Snapshots in memory go on. This is said once",
        type(trainer).__name__,
        int(trainer.state.global_step),
    )


def warn_of_own_loop(trainer: Any, *, in_epoch: bool) -> None:
    """Say so where the training loop, which has come to its beginning or to a step, is not the Trainer's."""
    loops = ["train", "_inner_training_loop"]
    if in_epoch and hasattr(Trainer, "_run_epoch"):  # from 5.8 on
        loops.append("_run_epoch")
    method = next((each for each in loops if each not in trainer._easyckpt.reached), None)
    if method is not None:
        trainer._easyckpt.warn_once("loop", lambda: _warn_of_own_loop(trainer, method))


def _warn_of_own_loop(trainer: Any, method: str) -> None:
    _log.warning(
        "%s.%s does not call super().%s(): the training loop is one of its own. Steps are snapshotted where it calls "
        "_maybe_log_save_evaluate; that a resumed run equals an uninterrupted one is known of the Trainer's own loop "
        "only: `easyckpt audit` tells",
        type(trainer).__name__,
        method,
        method,
    )


def warn_of_what_was_not_told(trainer: Any, counted: int | None) -> None:
    """Say so where more was trained than up to step `counted`; None: the Trainer's training has not begun."""
    name, step = type(trainer).__name__, int(trainer.state.global_step)
    if counted is None:
        text = "%s.train() has ended without the Trainer's own training (no on_train_begin was heard): easyckpt has "
        trainer._easyckpt.warn_once("train", lambda: _log.warning(text + "saved and restored nothing", name))
    elif step > counted >= 0:
        text = "%s has trained step %d without calling _maybe_log_save_evaluate: nothing is saved of such steps"
        trainer._easyckpt.warn_once("steps", lambda: _log.warning(text, name, step))
