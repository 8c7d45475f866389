"""Extending a Trainer: its class gets a class of ours before it and one behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transformers import Trainer

from easyckpt.errors import ConfigError
from easyckpt.integrations.transformers import foreign, overridden, supported, synchronous, versions
from easyckpt.integrations.transformers.hearing import listen, track
from easyckpt.integrations.transformers.options import Options
from easyckpt.integrations.transformers.run import TrainingRun
from easyckpt.integrations.transformers.synchronous import SynchronousRun
from easyckpt.integrations.transformers.unsaved import Buffers

T = TypeVar("T", bound=Trainer)


@dataclass(slots=True)
class Wrapping:
    """What a wrapped Trainer carries: ``trainer._easyckpt``."""

    options: Options
    run: TrainingRun | None = None
    synchronous: SynchronousRun | None = None
    buffers: Buffers | None = None
    reached: set[str] = field(default_factory=set)
    """Methods of the Trainer's own that were come to, past what a subclass has in their place."""
    said: set[str] = field(default_factory=set)

    def warn_once(self, what: str, say: Callable[[], None]) -> None:
        """Once for each trainer."""
        if what not in self.said:
            self.said.add(what)
            say()


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
        overridden.warn(self, (Outside, Inside, type(self)))
        overridden.warn_of_hidden(self)
        self._easyckpt.reached.clear()
        with TrainingRun(self, self._easyckpt.options, resume_from_checkpoint) as run:
            self._easyckpt.run = run
            if run.restores:
                overridden.warn_of_own_training(self, (Outside, Inside, type(self)))
            try:
                result = super().train(run.path, *args, **kwargs)  # type: ignore[misc]
                run.check_told()
                return result
            finally:
                self._easyckpt.run = None

    def get_train_dataloader(self) -> Any:
        """As the Trainer's; the passes over that of the training loop are reported."""
        loader, run = super().get_train_dataloader(), self._easyckpt.run  # type: ignore[misc]
        return loader if run is None or run.started else track(loader, run.data)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        return loss if self._easyckpt.run is None else self._easyckpt.run.trained(loss)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        wrapping, run, name = self._easyckpt, self._easyckpt.run, "_save_checkpoint"
        wrapping.reached.discard(name)
        write = functools.partial(super()._save_checkpoint, *args, **kwargs)  # type: ignore[misc]
        taking = None if run is None else run.taking
        if taking is not None:
            taking.make_way()
        if wrapping.synchronous is not None:  # with all that the program itself adds
            trial = kwargs.get("trial", args[1] if len(args) > 1 else None)
            wrapping.synchronous.save(write, trial)
        elif taking is None:
            write()
        else:
            taking.asked(write, own=not versions.is_stock(type(self), name, (Outside, Inside, type(self))))
        if name not in wrapping.reached and (run is not None or wrapping.synchronous is not None):
            wrapping.warn_once(name, lambda: overridden.warn_of_own_saving(self))

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._easyckpt.reached.add("train")
        if self._easyckpt.run is not None:
            self._easyckpt.run.begin_loop()
        return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        run = self._easyckpt.run
        state = self.state  # type: ignore[attr-defined]
        if skip_scheduler and run is not None and run.restores and (state.global_step or state.log_history):
            return None  # for eval_on_start alone, which was done when the training did start
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        if self._easyckpt.run is not None and self._easyckpt.run.taking is not None:
            self._easyckpt.run.taking.drain()
        super()._load_best_model()  # type: ignore[misc]

    def _load_callback_state(self) -> None:
        super()._load_callback_state()  # type: ignore[misc]
        run, state = self._easyckpt.run, self.state  # type: ignore[attr-defined]
        if (
            run is not None and run.restores and run.same_batches(state.train_batch_size)
        ):  # the loops up to 5.0 divide the step inline; see versions.ResumedAt
            epoch, updates = run.data.next_update()
            state.global_step = versions.ResumedAt(state.global_step)
            state.global_step.epoch = epoch
            state.global_step.updates = updates
            args = self.args  # type: ignore[attr-defined]
            state.global_step.asked = (args.max_steps, args.num_train_epochs)

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
        self._easyckpt.reached.add("_save_checkpoint")
        run = self._easyckpt.run
        if run is not None and run.taking is not None:
            run.taking.request(kwargs.get("metrics", args[0] if args else None))
        else:
            super()._save_checkpoint(model, trial, *args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._easyckpt.reached.add("_inner_training_loop")
        return super()._inner_training_loop(*args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:  # from 5.8 on
        self._easyckpt.reached.add("_run_epoch")
        return super()._run_epoch(*args, **kwargs)


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
    supported.check()
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"TrainerWrapper takes a transformers.Trainer, not a {type(trainer).__name__}")
    if isinstance(trainer, Inside):
        return trainer
    kind = type(trainer)
    checked = Options.of(options)
    made = type(kind.__name__, (Outside, Inside) if kind is Trainer else (Outside, kind, Inside), {})
    made.__module__, made.__qualname__, made.__doc__ = kind.__module__, kind.__qualname__, kind.__doc__
    trainer.__class__ = made
    trainer._easyckpt = Wrapping(checked, buffers=Buffers(trainer.model) if trainer.model is not None else None)
    listen(trainer)
    overridden.warn_of_hidden(trainer)
    return trainer
