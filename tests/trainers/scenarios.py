"""The trainings that have to be exact: one function each, which says what it proves.

The table can be read without transformers; the functions are called where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from tests.trainers import models
from tests.trainers.data import (
    DrawnStream,
    EpochStream,
    Masking,
    NoisySequences,
    Padding,
    Sequences,
    Stream,
    sequences,
)

STEPS, BATCH, SAVE = 20, 4, 5
#: Items of a data set that lasts longer than the training; for 8 steps an epoch; for 10.
LONG, EIGHT, TEN = 200, 8 * BATCH, 10 * BATCH


@dataclass
class Setup:
    """What a Trainer is made of. `arguments` are those of TrainingArguments, on top of the ones all have."""

    arguments: dict[str, Any] = field(default_factory=dict)
    model: nn.Module | None = None
    train: Dataset[Any] | None = None
    evaluation: Dataset[Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    """Other arguments of the Trainer."""


@dataclass(frozen=True)
class Scenario:
    name: str
    build: Callable[[], Setup]
    until: int
    """It is killed when this step has ended, and the next one's update of the weights is done."""
    saved: int | None
    """The newest step in storage by then."""
    steps: int
    """With which it ends."""
    ranks: int
    moment: str
    """The callback in which it is killed."""
    unlike_stock: str
    """Why wrapped training differs from stock training, where it has to."""

    @property
    def proves(self) -> str:
        return " ".join((self.build.__doc__ or "").split())


TABLE: dict[str, Scenario] = {}


def scenario(
    until: int = 12,
    saved: int | None = -1,
    steps: int = STEPS,
    ranks: int = 1,
    moment: str = "on_optimizer_step",
    unlike_stock: str = "",
) -> Callable[[Callable[[], Setup]], Callable[[], Setup]]:
    """Puts a function into the table. Of the steps before `until` each fifth is saved, unless `saved` says another."""

    def put(build: Callable[[], Setup]) -> Callable[[], Setup]:
        newest = until // SAVE * SAVE if saved == -1 else saved
        TABLE[build.__name__] = Scenario(build.__name__, build, until, newest, steps, ranks, moment, unlike_stock)
        return build

    return put


BOUNDARY = 10
WORKERS = {"dataloader_num_workers": 2}
PERSISTENT = {**WORKERS, "dataloader_persistent_workers": True}
NOT_SEEDABLE = {"accelerator_config": {"use_seedable_sampler": False}}
RANDOM_WORKERS = "workers are seeded for each batch"
REFUSED = "the stock Trainer fails when it saves"


# -- data in order -----------------------------------------------------------------------------------------------------


@scenario()
def base() -> Setup:
    """Dropout goes on where it was, in the middle of the one pass over the data."""
    return Setup()


@scenario()
def llama() -> Setup:
    """Another architecture: rotary embeddings, grouped queries, untied weights."""
    return Setup(model=models.llama())


@scenario()
def ga2() -> Setup:
    """A step of two batches."""
    return Setup({"gradient_accumulation_steps": 2})


@scenario()
def ga2_rem() -> Setup:
    """Each epoch's last step has one batch instead of two."""
    return Setup({"gradient_accumulation_steps": 2}, train=Sequences(7 * BATCH))


@scenario(until=8, saved=5)
def ga2_bound() -> Setup:
    """Stopped between two such epochs."""
    return Setup({"gradient_accumulation_steps": 2}, train=Sequences(7 * BATCH))


@scenario(moment="on_substep_end")
def ga4_killed() -> Setup:
    """Killed between the batches of a step."""
    return Setup({"gradient_accumulation_steps": 4}, train=Sequences(EIGHT))


@scenario()
def epochs() -> Setup:
    """Shuffled epochs, stopped inside the second."""
    return Setup(train=Sequences(EIGHT))


@scenario()
def epochs_rem() -> Setup:
    """Each epoch's last batch is a smaller one."""
    return Setup(train=Sequences(EIGHT - 2))


@scenario()
def epochs_drop() -> Setup:
    """Each epoch's last batch is dropped."""
    return Setup({"dataloader_drop_last": True}, train=Sequences(EIGHT + 2))


@scenario(until=BOUNDARY)
def epochs_bound() -> Setup:
    """Stopped where the first epoch has ended and the second has not begun."""
    return Setup(train=Sequences(TEN))


@scenario(until=BOUNDARY - 1)
def epochs_last() -> Setup:
    """Stopped before the last batch of an epoch."""
    return Setup(train=Sequences(TEN))


@scenario()
def epochs_counted() -> Setup:
    """The length of the training is given in epochs, the last of them half a one."""
    return Setup({"max_steps": -1, "num_train_epochs": 2.5}, train=Sequences(EIGHT))


@scenario()
def data_seed() -> Setup:
    """The order of the data has a seed of its own."""
    return Setup({"data_seed": 5}, train=Sequences(EIGHT))


@scenario()
def seedable_off() -> Setup:
    """The sampler draws from torch's generator."""
    return Setup(NOT_SEEDABLE)


@scenario()
def seedable_off_epochs() -> Setup:
    """The sampler draws each epoch's order from torch's generator, between the dropout's draws."""
    return Setup(NOT_SEEDABLE, train=Sequences(EIGHT))


@scenario(until=BOUNDARY)
def seedable_off_bound() -> Setup:
    """The order of the next epoch is still to be drawn."""
    return Setup(NOT_SEEDABLE, train=Sequences(TEN))


@scenario()
def group_len() -> Setup:
    """Sequences of like lengths share a batch."""
    return Setup({"group_by_length": True}, train=Sequences(LONG, (4, 16)), more={"data_collator": Padding()})


@scenario(until=14)
def group_len_epochs() -> Setup:
    """They do in the second epoch too."""
    return Setup({"group_by_length": True}, train=Sequences(EIGHT, (4, 16)), more={"data_collator": Padding()})


@scenario(until=BOUNDARY)
def group_len_bound() -> Setup:
    """And where the stop is between two epochs."""
    return Setup({"group_by_length": True}, train=Sequences(TEN, (4, 16)), more={"data_collator": Padding()})


# -- workers -----------------------------------------------------------------------------------------------------------


@scenario()
def workers2() -> Setup:
    """Two processes read ahead."""
    return Setup(WORKERS)


@scenario()
def epochs_w2() -> Setup:
    """New workers in each epoch."""
    return Setup(WORKERS, train=Sequences(EIGHT))


@scenario()
def epochs_w2_pers() -> Setup:
    """The same workers in each epoch."""
    return Setup(PERSISTENT, train=Sequences(EIGHT))


@scenario(until=BOUNDARY)
def bound_w2_pers() -> Setup:
    """The same workers, stopped between two epochs."""
    return Setup(PERSISTENT, train=Sequences(TEN))


# -- random data -------------------------------------------------------------------------------------------------------


@scenario()
def mlm() -> Setup:
    """The collator draws from all three global generators, one batch ahead of the training."""
    return Setup(more={"data_collator": Masking()})


@scenario()
def mlm_ga2() -> Setup:
    """The same with steps of two batches."""
    return Setup({"gradient_accumulation_steps": 2}, more={"data_collator": Masking()})


@scenario(unlike_stock=RANDOM_WORKERS)
def mlm_w2() -> Setup:
    """The same in workers."""
    return Setup(WORKERS, more={"data_collator": Masking()})


@scenario()
def mlm_eval() -> Setup:
    """Evaluation draws as well, and leaves the training's generators where they would be without a stop."""
    return Setup(
        {"eval_strategy": "steps", "eval_steps": 4}, evaluation=Sequences(8), more={"data_collator": Masking()}
    )


@scenario()
def noise_eval() -> Setup:
    """What is evaluated is random, and is read by two workers."""
    evaluation = NoisySequences(10)
    return Setup({"eval_strategy": "steps", "eval_steps": 4, **WORKERS}, evaluation=evaluation)


@scenario()
def noise() -> Setup:
    """An item is another one at each reading."""
    return Setup(train=NoisySequences(LONG))


@scenario()
def noise_epochs() -> Setup:
    """It is in each epoch."""
    return Setup(train=NoisySequences(EIGHT))


@scenario(until=BOUNDARY)
def noise_bound() -> Setup:
    """And where the stop is between two epochs."""
    return Setup(train=NoisySequences(TEN))


@scenario()
def noise_ga2() -> Setup:
    """And with steps of two batches."""
    return Setup({"gradient_accumulation_steps": 2}, train=NoisySequences(7 * BATCH))


@scenario(unlike_stock=RANDOM_WORKERS)
def noise_w2() -> Setup:
    """And in workers."""
    return Setup(WORKERS, train=NoisySequences(LONG))


@scenario(unlike_stock=RANDOM_WORKERS)
def noise_w2_pers() -> Setup:
    """And in workers that live on through epochs."""
    return Setup(PERSISTENT, train=NoisySequences(EIGHT))


# -- streams -----------------------------------------------------------------------------------------------------------


@scenario()
def iter_once() -> Setup:
    """A data set without a length, longer than the training."""
    return Setup(train=Stream(LONG))


@scenario()
def iter_multi() -> Setup:
    """Several passes over a stream, which the Trainer counts as one epoch."""
    return Setup(train=Stream(EIGHT))


@scenario(until=BOUNDARY)
def iter_multi_bound() -> Setup:
    """Stopped between two passes."""
    return Setup(train=Stream(TEN))


@scenario()
def iter_multi_ga2() -> Setup:
    """Each pass ends with half a step."""
    return Setup({"gradient_accumulation_steps": 2}, train=Stream(7 * BATCH))


@scenario()
def iter_multi_epoch() -> Setup:
    """The stream is told its epoch."""
    return Setup(train=EpochStream(EIGHT))


@scenario()
def iter_drawn() -> Setup:
    """The stream draws its order, and noise, from the global generators."""
    return Setup(train=DrawnStream(LONG))


@scenario()
def iter_drawn_multi() -> Setup:
    """It does in each pass."""
    return Setup(train=DrawnStream(EIGHT))


@scenario()
def iter_drawn_w2() -> Setup:
    """Two workers draw, each by itself."""
    return Setup(WORKERS, train=DrawnStream(EIGHT))


@scenario(until=BOUNDARY)
def iter_drawn_bound() -> Setup:
    """The order of the next pass is still to be drawn."""
    return Setup(train=DrawnStream(TEN))


@scenario()
def iter_w2() -> Setup:
    """Two workers share the stream."""
    return Setup(WORKERS, train=Stream(LONG))


@scenario()
def iter_multi_w2() -> Setup:
    """They do in several passes."""
    return Setup(WORKERS, train=Stream(EIGHT))


def table_of(count: int) -> Any:
    from datasets import Dataset as Table

    items = [tokens.tolist() for tokens in sequences(count)]
    return Table.from_dict({"input_ids": items, "labels": items})


@scenario()
def hf_map() -> Setup:
    """A table of the datasets library."""
    return Setup(train=table_of(EIGHT))


@scenario()
def hf_iter() -> Setup:
    """The same as a stream with a shuffling buffer."""
    return Setup(train=table_of(LONG).to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=16))


@scenario()
def hf_iter_multi() -> Setup:
    """In each pass the buffer is shuffled otherwise."""
    return Setup(train=table_of(EIGHT).to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=16))


@scenario()
def hf_iter_multi_w2() -> Setup:
    """Two workers have a buffer each."""
    return Setup(WORKERS, train=table_of(EIGHT).to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=16))


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


# -- logging, evaluating, saving ---------------------------------------------------------------------------------------


@scenario()
def log4() -> Setup:
    """The loss logged at step 16 is the mean since step 12, the one at 12 since 8: it counts steps before the stop."""
    return Setup({"logging_steps": 4})


@scenario()
def log7() -> Setup:
    """The loss is logged more rarely than checkpoints are saved."""
    return Setup({"logging_steps": 7})


@scenario()
def tokens_seen() -> Setup:
    """Counted tokens go on."""
    return Setup({"include_num_input_tokens_seen": True})


@scenario()
def eval3() -> Setup:
    """Evaluation between the saves, and at the step after which the job is killed."""
    return Setup({"eval_strategy": "steps", "eval_steps": 3}, evaluation=Sequences(10, seed=1))


@scenario(until=11, moment="on_prediction_step")
def eval_killed() -> Setup:
    """Killed in the middle of an evaluation."""
    return Setup({"eval_strategy": "steps", "eval_steps": 11}, evaluation=Sequences(10, seed=1))


@scenario(until=BOUNDARY)
def eval_epoch() -> Setup:
    """Evaluated, logged and saved where an epoch ends, and killed there."""
    strategies = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
    return Setup(strategies, train=Sequences(TEN), evaluation=Sequences(10, seed=1))


@scenario(until=BOUNDARY, moment="on_prediction_step", saved=None)
def eval_epoch_killed() -> Setup:
    """Killed in the middle of the evaluation at an epoch's end: it is not left out afterwards."""
    strategies = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    return Setup(strategies, train=Sequences(TEN), evaluation=Sequences(10, seed=1))


@scenario(steps=14)
def early() -> Setup:
    """Stops early, at the step at which it would have without a kill: the count of vain evaluations is state."""
    from transformers import EarlyStoppingCallback

    judged = {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    stop = EarlyStoppingCallback(early_stopping_patience=6, early_stopping_threshold=10.0)
    arguments = {"eval_strategy": "steps", "eval_steps": 2, **judged}
    return Setup(arguments, evaluation=Sequences(8, seed=1), more={"callbacks": [stop]})


@scenario()
def best() -> Setup:
    """Ends with the best model, which was best before the kill: its checkpoint is kept."""
    judged = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 2}
    arguments = {"eval_strategy": "steps", "eval_steps": SAVE, "learning_rate": 3e-2, **judged}
    return Setup(arguments, evaluation=Sequences(8, seed=1))


@scenario()
def best_last() -> Setup:
    """Ends with the best model, which comes after the kill; one checkpoint is kept."""
    judged = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 1}
    arguments = {"eval_strategy": "steps", "eval_steps": SAVE, "learning_rate": 1e-3, **judged}
    return Setup(arguments, train=Sequences(EIGHT), evaluation=Sequences(EIGHT))


@scenario(saved=12)
def best_saved() -> Setup:
    """Only what is best is saved."""
    judged = {"save_strategy": "best", "metric_for_best_model": "eval_loss", "greater_is_better": False}
    arguments = {"eval_strategy": "steps", "eval_steps": 4, "learning_rate": 1e-3, **judged}
    return Setup(arguments, train=Sequences(EIGHT), evaluation=Sequences(EIGHT))


@scenario()
def limit1() -> Setup:
    """One checkpoint is kept."""
    return Setup({"save_total_limit": 1})


@scenario(saved=None)
def never_saved() -> Setup:
    """Nothing goes to storage on the way: memory alone brings the job back."""
    return Setup({"save_strategy": "no"})


# -- ranks -------------------------------------------------------------------------------------------------------------


@scenario(ranks=2)
def ddp() -> Setup:
    """Two ranks."""
    return Setup(train=Sequences(2 * LONG))


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
