"""Trainers of the user's own: classes that override what the Trainer does, and that count by themselves."""

from __future__ import annotations

from typing import Any

from tests.trainers import models
from tests.trainers.data import Masking, Sequences
from tests.trainers.scenarios.table import EIGHT, NOT_SEEDABLE, WORKERS, Setup, scenario


@scenario()
def counting() -> Setup:
    """The loss depends on what the class has counted, and on a mean that it keeps; it logs both."""
    from tests.trainers.classes import Counting

    return Setup(trainer=Counting, more={"data_collator": Masking()})


@scenario()
def counting_ga2() -> Setup:
    """The same with steps of two batches, and rare logs."""
    from tests.trainers.classes import Counting

    arguments = {"gradient_accumulation_steps": 2, "logging_steps": 4}
    return Setup(arguments, trainer=Counting, more={"data_collator": Masking()})


@scenario()
def averaging() -> Setup:
    """It trains a mean of the weights and a second model with a second optimizer, and has generators of its own."""
    from tests.trainers.classes import Averaging

    return Setup(trainer=Averaging, more={"data_collator": Masking()})


@scenario()
def own_parts() -> Setup:
    """Optimizer, schedule, loader and sampler are the class's own; the sampler has a generator."""
    from tests.trainers.classes import OwnParts

    return Setup(train=Sequences(EIGHT), trainer=OwnParts)


@scenario()
def own_parts_w2() -> Setup:
    """The same with workers."""
    from tests.trainers.classes import OwnParts

    return Setup(WORKERS, train=Sequences(EIGHT), trainer=OwnParts)


@scenario()
def bare_loader() -> Setup:
    """The loader is torch's own, which nobody has prepared."""
    from tests.trainers.classes import BareLoader

    return Setup(train=Sequences(EIGHT), trainer=BareLoader)


@scenario()
def copied_loop() -> Setup:
    """The loop is a copy in the program's own module: what it calls, it has imported by itself."""
    from tests.trainers.classes import CopiedLoop

    return Setup(train=Sequences(EIGHT), trainer=CopiedLoop, more={"data_collator": Masking()})


@scenario()
def copied_loop_ga2() -> Setup:
    """The same with steps of two batches, and a sampler that draws from torch's generator."""
    from tests.trainers.classes import CopiedLoop

    arguments: dict[str, Any] = {"gradient_accumulation_steps": 2, **NOT_SEEDABLE}
    return Setup(arguments, train=Sequences(7 * 4), trainer=CopiedLoop, more={"data_collator": Masking()})


@scenario()
def own_callback() -> Setup:
    """A callback with a state of its own sets the learning rate."""
    from tests.trainers.classes import Decay

    return Setup(more={"callbacks": [Decay()]})


@scenario()
def measured() -> Setup:
    """Metrics that are computed decide which checkpoint is best; optimizer and schedule were made from a model."""
    import torch

    from tests.trainers.classes import accuracy

    model = models.gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, amsgrad=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=30)
    judged = {"metric_for_best_model": "accuracy", "load_best_model_at_end": True, "save_total_limit": 2}
    arguments = {"eval_strategy": "steps", "eval_steps": 5, "eval_on_start": True, **judged}
    more = {"compute_metrics": accuracy, "optimizers": (optimizer, schedule)}
    return Setup(arguments, model, evaluation=Sequences(10, seed=1), more=more)


@scenario()
def generating() -> Setup:
    """A sequence-to-sequence model, which generates where it is evaluated."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, default_data_collator

    arguments: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 8}
    arguments |= {"eval_strategy": "steps", "eval_steps": 3}
    more = {"data_collator": default_data_collator}
    evaluation = Sequences(6, seed=1)
    return Setup(arguments, models.t5(), None, evaluation, more, Seq2SeqTrainer, Seq2SeqTrainingArguments)


@scenario()
def sampled_generating() -> Setup:
    """The same, sampled: evaluation draws, and rescales the schedule of draws for training."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    arguments: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 8}
    arguments |= {"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True}
    model = models.t5()
    model.generation_config.do_sample = True
    more = {"data_collator": Masking()}
    evaluation = Sequences(6, seed=1)
    return Setup(arguments, model, None, evaluation, more, Seq2SeqTrainer, Seq2SeqTrainingArguments)
