"""What a step computes: numbers, optimizers, schedules, and models."""

from __future__ import annotations

from torch import nn

from tests.trainers import models
from tests.trainers.data import Sequences
from tests.trainers.scenarios.table import Setup, scenario

REFUSED = "the stock Trainer fails when it saves"


# -- numbers, optimizers, schedulers -----------------------------------------------------------------------------------


@scenario()
def bf16() -> Setup:
    """Forward and backward in bfloat16 by autocast."""
    return Setup({"bf16": True})


@scenario()
def bf16_model() -> Setup:
    """Weights and optimizer state in bfloat16."""
    import torch

    return Setup(model=models.gpt2().to(torch.bfloat16))


@scenario()
def cosine() -> Setup:
    """A cosine after a warm-up that ends between the checkpoint and the kill."""
    return Setup({"lr_scheduler_type": "cosine", "warmup_steps": 11})


@scenario()
def restarts() -> Setup:
    """A cosine with restarts."""
    return Setup({"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}})


@scenario()
def plateau() -> Setup:
    """The learning rate falls where the evaluation gets no better: patience is state."""
    rate = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 3, "threshold": 10.0}}
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
    return Setup({**rate, **evaluation, "greater_is_better": False}, evaluation=Sequences(8, seed=1))


@scenario()
def adamw() -> Setup:
    """AdamW that is not fused."""
    return Setup({"optim": "adamw_torch"})


@scenario()
def adafactor() -> Setup:
    """An optimizer that factors its state, and decides the rate by itself."""
    return Setup({"optim": "adafactor"})


@scenario()
def sgd() -> Setup:
    """An optimizer with momentum alone."""
    return Setup({"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.1})


@scenario()
def own_optimizer() -> Setup:
    """Optimizer and scheduler that the user made."""
    import torch

    model = models.gpt2()
    optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 5e-3, step_size_up=3, cycle_momentum=False)
    return Setup(model=model, more={"optimizers": (optimizer, schedule)})


@scenario()
def smoothing() -> Setup:
    """The loss is the Trainer's own."""
    return Setup({"label_smoothing_factor": 0.1})


@scenario()
def neftune() -> Setup:
    """Noise on the embeddings, from torch's generator, by a hook on the model."""
    return Setup({"neftune_noise_alpha": 5.0})


@scenario()
def recomputed() -> Setup:
    """Activations are computed again in the backward pass, with the same dropout."""
    return Setup({"gradient_checkpointing": True})


# -- models ------------------------------------------------------------------------------------------------------------


@scenario()
def lora() -> Setup:
    """Adapters are trained and saved, the model below them is not."""
    return Setup({"learning_rate": 1e-2}, model=models.lora())


@scenario()
def model_init() -> Setup:
    """The Trainer makes the model."""

    def make() -> nn.Module:
        return models.gpt2()

    return Setup(more={"model_init": make})


@scenario()
def untied() -> Setup:
    """Embedding and head are two tensors."""
    return Setup(model=models.gpt2(tie_word_embeddings=False))


@scenario()
def plain() -> Setup:
    """A module that is no model of the framework's, with buffers."""
    return Setup(model=models.Plain(tied=False))


@scenario(unlike_stock=REFUSED)
def plain_tied() -> Setup:
    """Such a module with shared weights."""
    return Setup(model=models.Plain(tied=True))
