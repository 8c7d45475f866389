"""Extending a Trainer: its class gets a class of ours before it and one behind it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import Trainer

from easyckpt.errors import ConfigError
from easyckpt.integrations.transformers import foreign, synchronous, versions
from easyckpt.integrations.transformers.hearing import listen, track
from easyckpt.integrations.transformers.options import Options
from easyckpt.integrations.transformers.run import TrainingRun
from easyckpt.integrations.transformers.synchronous import SynchronousRun

T = TypeVar("T", bound=Trainer)
_log = logging.getLogger("easyckpt")


@dataclass(slots=True)
class Wrapping:
    """What a wrapped Trainer carries: ``trainer._easyckpt``."""

    options: Options
    run: TrainingRun | None = None
    synchronous: SynchronousRun | None = None


class Outside:
    """Stands before the user's class: sees each call first."""

    _easyckpt: Wrapping

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; see TrainerWrapper for what `resume_from_checkpoint` means."""
        trial = kwargs.get("trial", args[0] if args else None)
        reason = synchronous.why(self, trial)
        if reason is not None:
            with SynchronousRun(self, reason, self._easyckpt.options, resume_from_checkpoint) as stock:
                self._easyckpt.synchronous = stock
                try:
                    return super().train(stock.path, *args, **kwargs)  # type: ignore[misc]
                finally:
                    self._easyckpt.synchronous = None
        listen(self)
        if versions.drop_signal_callback(self):
            _log.warning("enable_jit_checkpoint: left to easyckpt, which saves at SIGTERM by itself (signals)")
        _warn_of_own_loading(self)
        with TrainingRun(self, self._easyckpt.options, resume_from_checkpoint) as run:
            self._easyckpt.run = run
            try:
                return super().train(run.path, *args, **kwargs)  # type: ignore[misc]
            finally:
                self._easyckpt.run = None

    def get_train_dataloader(self) -> Any:
        """As the Trainer's; its passes are reported."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        return loader if self._easyckpt.run is None else track(loader, self._easyckpt.run.data)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        return loss if self._easyckpt.run is None else self._easyckpt.run.carried.added_to(loss)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        run = self._easyckpt.run
        save = functools.partial(super()._save_checkpoint, *args, **kwargs)  # type: ignore[misc]
        if run is None:
            save()
        else:
            run.save_asked(
                save, own=not versions.is_stock(type(self), "_save_checkpoint", (Outside, Inside, type(self)))
            )

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self._easyckpt.run is not None:
            self._easyckpt.run.begin_loop()
        return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        run = self._easyckpt.run
        if run is None or not run.restores:
            super()._load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        self._load("_load_optimizer_and_scheduler", checkpoint, foreign.load_optimizer_and_scheduler)

    def _load_scaler(self, checkpoint: Any) -> None:
        self._load("_load_scaler", checkpoint, foreign.load_scaler)

    def _load_rng_state(self, checkpoint: Any) -> None:
        self._load("_load_rng_state", checkpoint, foreign.load_generators)

    def _load(self, method: str, checkpoint: Any, load: Callable[[Any, str], None]) -> None:
        """What a run puts back itself is left to it; of the Trainer's own checkpoints nothing is run."""
        run = self._easyckpt.run
        if run is None or checkpoint is None:
            getattr(super(), method)(checkpoint)
        elif not run.restores:
            load(self, checkpoint)

    def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)  # type: ignore[misc]
        if self._easyckpt.run is not None:
            self._easyckpt.run.end_step(tr_loss)
        return result


class Inside(Trainer):  # type: ignore[misc]
    """Stands behind the user's class: takes the place of what the Trainer itself does."""

    _easyckpt: Wrapping

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        run, stock = self._easyckpt.run, self._easyckpt.synchronous
        if run is not None:
            run.request_save(kwargs.get("metrics", args[0] if args else None))
        elif stock is not None:
            write = super()._save_checkpoint
            stock.save(lambda: write(model, trial, *args, **kwargs), trial)
        else:
            super()._save_checkpoint(model, trial, *args, **kwargs)

    def _load_best_model(self) -> None:
        if self._easyckpt.run is not None:
            self._easyckpt.run.drain()
        super()._load_best_model()

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        run = self._easyckpt.run
        if (
            run is not None and run.restores and run.same_batches(self.state.train_batch_size)
        ):  # the loops up to 5.0 divide the step inline; see versions.ResumedAt
            epoch, updates = run.data.next_update()
            self.state.global_step = versions.ResumedAt(self.state.global_step)
            self.state.global_step.epoch = epoch
            self.state.global_step.updates = updates
            self.state.global_step.asked = (self.args.max_steps, self.args.num_train_epochs)


#: What the Trainer restores a checkpoint by. All of it is put back at once, so a class of the user's is not asked.
_LOADING = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state")


def _warn_of_own_loading(trainer: Any) -> None:
    ours = (Outside, Inside, type(trainer))
    own = [method for method in _LOADING if not versions.is_stock(type(trainer), method, ours)]
    if own:
        _log.warning(
            "%s overrides %s, which is not called when easyckpt restores: what it loads beside the Trainer's own state "
            "has to be loaded in a callback's on_train_begin",
            type(trainer).__name__,
            ", ".join(own),
        )


def TrainerWrapper(trainer: T, **options: Any) -> T:  # noqa: N802 - it is used like a class
    """Have `trainer` save without holding training up, and resume as if it had never stopped.

    Returns the same object, whose class is extended; calling it again changes nothing more. The Trainer's arguments
    stay what they are: ``save_strategy``, ``save_steps``, ``save_total_limit`` and so on.

    Args:
        trainer: any ``transformers.Trainer``, of a subclass too.
        options: ``on_save``: ``"later"`` (callbacks hear of a checkpoint at the end of a later step, when it is
            complete) or ``"wait"``. And the settings of ``easyckpt.CheckpointConfig``, such as ``save_mem_interval``,
            ``slots``, ``signals``.

    Raises ConfigError for what cannot be wrapped, and for a wrong option.
    """
    versions.check()
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"TrainerWrapper takes a transformers.Trainer, not a {type(trainer).__name__}")
    if isinstance(trainer, Inside):
        return trainer
    kind = type(trainer)
    checked = Options.of(options)
    made = type(kind.__name__, (Outside, Inside) if kind is Trainer else (Outside, kind, Inside), {})
    made.__module__, made.__qualname__, made.__doc__ = kind.__module__, kind.__qualname__, kind.__doc__
    trainer.__class__ = made
    trainer._easyckpt = Wrapping(checked)
    listen(trainer)
    return trainer
