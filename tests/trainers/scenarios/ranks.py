"""Two ranks."""

from __future__ import annotations

from tests.trainers import models
from tests.trainers.data import Masking, NoisySequences, Padding, Sequences, Stream
from tests.trainers.scenarios.table import (
    BATCH,
    BOUNDARY,
    EIGHT,
    LONG,
    NOT_SEEDABLE,
    RANDOM_WORKERS,
    SAVE,
    TEN,
    WORKERS,
    Setup,
    scenario,
)


@scenario(ranks=2)
def ddp() -> Setup:
    """Two ranks."""
    return Setup(train=Sequences(2 * LONG))


@scenario(ranks=2)
def ddp_lora() -> Setup:
    """Adapters are equal on both ranks, and stored once."""
    return Setup({"learning_rate": 1e-2}, model=models.lora(), train=Sequences(2 * LONG))


@scenario(ranks=2)
def ddp_epochs() -> Setup:
    """Two ranks share each epoch's order."""
    return Setup(train=Sequences(2 * EIGHT))


@scenario(ranks=2, until=BOUNDARY)
def ddp_bound() -> Setup:
    """Stopped between two epochs."""
    return Setup(train=Sequences(2 * TEN))


@scenario(ranks=2)
def ddp_ga2() -> Setup:
    """Gradients are summed over two batches, then over the ranks; each epoch's last step has one batch."""
    return Setup({"gradient_accumulation_steps": 2}, train=Sequences(2 * 7 * BATCH))


@scenario(ranks=2)
def ddp_mlm() -> Setup:
    """Each rank's collator draws from its own generators."""
    return Setup(train=Sequences(2 * EIGHT), more={"data_collator": Masking()})


@scenario(ranks=2, unlike_stock=RANDOM_WORKERS)
def ddp_noise_w2() -> Setup:
    """Each rank has workers of its own."""
    return Setup(WORKERS, train=NoisySequences(2 * EIGHT))


@scenario(ranks=2)
def ddp_group_len() -> Setup:
    """Sequences of like lengths share a batch, on each rank."""
    train = Sequences(2 * EIGHT, (4, 16))
    return Setup({"group_by_length": True}, train=train, more={"data_collator": Padding()})


@scenario(ranks=2)
def ddp_seedable_off() -> Setup:
    """The sampler's generator is the same on all ranks."""
    return Setup(NOT_SEEDABLE, train=Sequences(2 * EIGHT))


@scenario(ranks=2)
def ddp_iter_multi() -> Setup:
    """Several passes over a stream that one rank reads for both."""
    return Setup(train=Stream(2 * EIGHT))


@scenario(ranks=2)
def ddp_iter_shard() -> Setup:
    """Each rank reads all of it, and takes its part."""
    return Setup({"accelerator_config": {"dispatch_batches": False}}, train=Stream(2 * EIGHT))


@scenario(ranks=2)
def ddp_eval() -> Setup:
    """Both ranks evaluate, and end with the best model."""
    judged = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    arguments = {"eval_strategy": "steps", "eval_steps": SAVE, "learning_rate": 1e-3, **judged}
    return Setup(arguments, train=Sequences(2 * EIGHT), evaluation=Sequences(EIGHT))
