"""What to do about a culprit, in the terms of whoever trains: a loop of the user's own, or a framework's Trainer."""

from __future__ import annotations

from dataclasses import dataclass

from easyckpt.format.layout import NamingScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """By what was found."""

    load: str
    """Nothing was restored."""
    count: str
    """The runs come to other steps."""
    other_data: str
    """The first step differs, and nobody has noted batches."""
    missing: str
    """What nobody sees."""
    log: str
    """How the first step could be told."""
    batches: str
    """An iterator's own generator."""
    generator: str
    """One that is not part of the state."""
    scheduler: str
    """One that is not part of the state."""
    stepped: str
    """A learning rate differs though these schedulers (``{names}``) are in the state."""
    unscheduled: str
    """A learning rate differs, and no scheduler is in the state."""
    order: str
    """Batches are others."""
    drawn: str
    """A generator of the state is not where it was."""


_OWN_BATCHES = (
    "take batches through ckpt.batches(loader, epoch): what a pass over a loader draws by itself is no state else"
)
OWN = Advice(
    load="call load() before the training loop, and start at its step",
    count=(
        "count finished steps in the state, begin the loop at what load() returns, end it at the same number in all "
        "runs, and save by that count"
    ),
    other_data="it has seen other data: take batches through ckpt.batches(loader, epoch)",
    missing=(
        "something that training depends on is in no component (a counter, a list, an iterator's position, an "
        "attribute, a hook): hand it over, in a dict or as an object with state_dict and load_state_dict"
    ),
    log="log the loss (ckpt.log(loss=loss))",
    batches=_OWN_BATCHES,
    generator='hand it over: Checkpointer(root, {…, "generator": generator})',
    scheduler='hand it over: Checkpointer(root, {…, "scheduler": scheduler})',
    stepped=(
        "the scheduler {names} is in the state, and was stepped another number of times after load(): the work "
        "of finished epochs was done again, or skipped. Begin the loop at what the state says "
        '(progress["epoch"], with progress in the state), and set a rate nowhere else'
    ),
    unscheduled=(
        'hand the scheduler over, or what counts the schedule: Checkpointer(root, {…, "scheduler": scheduler}); one '
        "that is made for the steps that are left counts from zero"
    ),
    order=(
        "the order of its data is drawn or counted by something that is not part of the state: hand its sampler over "
        "(easyckpt.SkipBatchSampler, or any object with state_dict and load_state_dict)"
    ),
    drawn=(
        "it was seeded anew, or drawn from another number of times, after load(): seed before load(), and take batches "
        "through ckpt.batches(loader, epoch), which puts the generators back at the first batch"
    ),
)

_LOADER = "have the Trainer iterate the loader that get_train_dataloader() makes"
TRAINER = Advice(
    load="train(resume_from_checkpoint=True) goes on where the last run has come to",
    count="have the Trainer count the steps (trainer.state.global_step), and end all runs at the same one",
    other_data=f"it has seen other data: {_LOADER}",
    missing=(
        "something that training depends on is not part of the Trainer's state (a counter, a list, an attribute, a "
        "hook): make it of trainer.state.global_step, or keep it in a callback that is an ExportableState, with "
        "restore_callback_states_from_checkpoint=True"
    ),
    log="log each step (logging_steps=1)",
    batches=_LOADER,
    generator=(
        "draw from the global generators of torch, NumPy or Python in its place, which are in the state; a sampler's, "
        "loader's or data set's attribute `generator` is kept as well"
    ),
    scheduler="hand it to the Trainer (optimizers=(optimizer, scheduler))",
    stepped=(
        "the scheduler {names} is in the state: set a rate nowhere else, or make it of trainer.state.global_step, "
        "which goes on where it was"
    ),
    unscheduled="hand the scheduler to the Trainer (optimizers=(optimizer, scheduler))",
    order=(
        "the order of its data is drawn or counted by something that is not part of the state: draw it from the global "
        "generators, or from the sampler's attribute `generator`"
    ),
    drawn="it was seeded anew, or drawn from another number of times, after the resume: seed before train()",
)


def advice_for(naming: NamingScheme) -> Advice:
    """For who has made a root with such names."""
    return TRAINER if naming.shared else OWN
