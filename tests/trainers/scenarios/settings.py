"""Arguments of the Trainer that few set."""

from __future__ import annotations

from typing import Any

from tests.trainers import models
from tests.trainers.data import NoisySequences, Padding, Sequences
from tests.trainers.scenarios.table import BATCH, EIGHT, LONG, Setup, scenario


def known(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that this version of transformers has."""
    from transformers import TrainingArguments

    return {name: value for name, value in arguments.items() if hasattr(TrainingArguments, name)}


@scenario()
def compiled() -> Setup:
    """The model is compiled: what is trained is inside of it."""
    return Setup({"torch_compile": True, "torch_compile_backend": "eager"}, train=Sequences(EIGHT))


@scenario()
def pickled() -> Setup:
    """Weights are pickled (up to 4.x)."""
    return Setup(known({"save_safetensors": False}), train=NoisySequences(EIGHT))


@scenario()
def judged_by_batches() -> Setup:
    """Metrics are gathered batch by batch, late, from losses too; gradients are not clipped."""
    from tests.trainers.classes import Judge

    arguments = {"eval_strategy": "steps", "eval_steps": 3, "eval_delay": 5, "batch_eval_metrics": True}
    arguments |= {"include_for_metrics": ["loss"], "eval_accumulation_steps": 2, "max_grad_norm": 0.0}
    return Setup(arguments, evaluation=Sequences(10, seed=1), more={"compute_metrics": Judge()})


@scenario(until=13)
def many_at_once() -> Setup:
    """Smoothed labels, lengths grouped, bfloat16, recomputed activations, a dropped last batch, accumulation."""
    arguments = {"label_smoothing_factor": 0.1, "group_by_length": True, "bf16": True, "gradient_checkpointing": True}
    arguments |= {"dataloader_drop_last": True, "gradient_accumulation_steps": 3, "eval_on_start": True}
    arguments |= {"eval_strategy": "steps", "eval_steps": 4, "dataloader_num_workers": 2, "logging_steps": 4}
    arguments |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}}
    train = Sequences(9 * BATCH + 2, (4, 16))
    return Setup(arguments, models.llama(), train, Sequences(8, (4, 16), seed=1), {"data_collator": Padding()})


@scenario(ranks=2)
def tokens_averaged() -> Setup:
    """Losses are weighed by the tokens of all ranks, whose sequences differ in length."""
    arguments = {"average_tokens_across_devices": True, "gradient_accumulation_steps": 2}
    return Setup(arguments, models.llama(), Sequences(LONG, (4, 16)), more={"data_collator": Padding()})


@scenario()
def just_in_time() -> Setup:
    """The Trainer saves by itself when SIGTERM comes (from 5.0 on)."""
    return Setup(known({"enable_jit_checkpoint": True}), train=NoisySequences(EIGHT))


@scenario()
def just_in_time_ga2() -> Setup:
    """The same between the batches of a step."""
    arguments = {"gradient_accumulation_steps": 2, **known({"enable_jit_checkpoint": True})}
    return Setup(arguments, train=NoisySequences(LONG))
