"""A program's own ``_save_checkpoint``, and saves that come twice, in between, or to nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from easyckpt import failpoints
from tests.trainers.data import Sequences, Stream
from tests.trainers.semantics.trainings import (
    STEPS,
    At,
    Stopped,
    checkpoints,
    forget_memory,
    make,
    same,
    stop,
    straight,
    weights,
    whole,
)

EXTRA = "ema.bin"


class Own(Trainer):
    """Keeps a file of its own in each checkpoint, and one beside them."""

    content = "first"

    def _save_checkpoint(self, *args, **kwargs):
        super()._save_checkpoint(*args, **kwargs)
        place = Path(self.args.output_dir)
        (place / f"checkpoint-{self.state.global_step}" / EXTRA).write_text(self.content)
        with open(place / "saved.txt", "a") as file:
            file.write(f"{self.state.global_step}\n")


class Tends(Own):
    """Keeps things beside its checkpoints, and has them anew at each save."""

    def _save_checkpoint(self, *args, **kwargs):
        super()._save_checkpoint(*args, **kwargs)
        place, step = Path(self.args.output_dir), self.state.global_step
        self.named = place.name
        for name in ("best", "taken"):
            if (place / name).exists():
                (place / name / "of.txt").rename(place / name / "moved.txt")
                shutil.rmtree(place / name)
            (place / "new" / "sub").mkdir(parents=True)
            (place / "new" / "sub" / f"{step}.txt").write_text("x")
            (place / "new" / "of.txt").write_text(str(step))
            os.replace(place / "new", place / name)
        if (place / "last").exists():
            (place / "last").rename(place / f"before-{step}")
        (place / "last").mkdir()
        (place / "last" / "of.txt").write_text(str(step))
        for name, goal in (("near", f"checkpoint-{step}"), ("far", place / f"checkpoint-{step}")):
            (place / name).unlink(missing_ok=True)
            (place / name).symlink_to(goal)
        (place / "given.txt").unlink(missing_ok=True)


def of_kind(**changed):
    return type("Own", (Own,), changed)


def logged(out: Path, step: int) -> list[dict]:
    return json.loads((out / f"checkpoint-{step}" / "trainer_state.json").read_text())["log_history"]


def asides(out: Path) -> list[str]:
    return [name for name in os.listdir(out) if name.startswith("_easyckpt-")]


def test_a_programs_files_go_to_the_checkpoint_that_is_made_and_to_no_other(out):
    make(out, Own, max_steps=4).train()
    make(out, of_kind(content="second"), max_steps=4, seed=7).train()
    assert [(out / f"checkpoint-{step}" / EXTRA).read_text() for step in (2, 4)] == ["second", "second"]
    before = sorted(out.glob("_easyckpt-stale-*"))
    assert [(path / EXTRA).read_text() for path in before] == ["first", "first"]
    assert all(whole(out, step) for step in (2, 4))
    assert (out / "saved.txt").read_text().split() == ["2", "4", "2", "4"]


def listed(out: Path) -> dict[str, str]:
    """What lies beside the checkpoints, and what is in it."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_symlink():
            found[name] = str(path.resolve().relative_to(out.resolve()))
        elif not name.startswith(("checkpoint-", "_easyckpt")):
            found[name] = path.read_text() if path.is_file() else ""
    return found


def test_a_program_removes_replaces_and_renames_beside_its_checkpoints(tmp_path):
    said = {}
    for wrap in (False, True):
        out = tmp_path / f"wrap-{wrap}" / "out"
        (out / "runs").mkdir(parents=True)
        (out / "given.txt").write_text("to be removed")
        (out / "runs" / "log.txt").write_text("stays")
        (out / "runs" / "own").symlink_to("log.txt")
        trainer = make(out, Tends, wrap=wrap, max_steps=6)
        trainer.train()
        said[wrap] = (trainer.named, listed(out))
    assert said[True] == said[False]
    assert {"before-4/of.txt", "before-6/of.txt", "best/sub/6.txt"} <= said[True][1].keys()


def test_others_write_beside_a_program_that_saves(out):
    class Beside(Own):
        def _save_checkpoint(self, *args, **kwargs):
            super()._save_checkpoint(*args, **kwargs)
            for name in ("log.txt", f"{self.state.global_step}.txt"):
                with open(out / name, "a") as file:
                    file.write("line\n")
            with open(Path(self.args.output_dir) / "log.txt", "a") as file:
                file.write("own\n")

    out.mkdir(exist_ok=True)
    (out / "log.txt").touch()
    make(out, Beside, max_steps=4).train()
    assert (out / "log.txt").read_text().split() == ["line", "own", "line", "own"]
    assert {"2.txt", "4.txt"} <= set(os.listdir(out))


def test_a_program_goes_on_after_a_save_that_it_could_not_make(out):
    class Fails(Own):
        def _save_checkpoint(self, *args, **kwargs):
            if self.state.global_step == 2:
                raise OSError("no room")
            super()._save_checkpoint(*args, **kwargs)

        def _maybe_log_save_evaluate(self, *args, **kwargs):
            with contextlib.suppress(OSError):
                super()._maybe_log_save_evaluate(*args, **kwargs)

    make(out, Fails, max_steps=4).train()
    assert checkpoints(out) == [4]
    assert whole(out, 4)
    assert asides(out) == []


def test_a_kill_while_the_program_writes_leaves_nothing_that_looks_like_a_checkpoint(out, tmp_path):
    class Dies(Own):
        def _save_checkpoint(self, *args, **kwargs):
            super()._save_checkpoint(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        make(out, Dies).train()
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert get_last_checkpoint(str(out)) is None
    trainer = make(out, Own)
    trainer.train(resume_from_checkpoint=True)
    assert checkpoints(out) == [2, 4, 6, 8]
    assert (out / "checkpoint-2" / EXTRA).read_text() == "first"
    assert asides(out) == []
    assert same(weights(trainer), straight(tmp_path))


class Limit(TrainerCallback):
    """Ends training in the middle of an epoch; the first save of that step is the step's, the second its epoch's."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_save = control.should_evaluate = True


@pytest.mark.parametrize("options", [{}, {"on_save": "wait"}, {"overlap": False}], ids=str)
@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_of_two_saves_of_a_step_the_later_one_counts(out, options, strategy):
    class Counts(Own):
        saves = 0

        def _save_checkpoint(self, *args, **kwargs):
            self.saves += 1
            self.content = str(self.saves)
            super()._save_checkpoint(*args, **kwargs)

    evaluated = {"eval_dataset": Sequences(4, seed=1), "save_strategy": strategy}
    trainer = make(out, Counts, callbacks=[Limit()], options=options, **evaluated)
    trainer.train()
    assert any("eval_loss" in entry for entry in logged(out, 4))
    assert (out / "checkpoint-4" / EXTRA).read_text() == str(trainer.saves)
    assert whole(out, 4)
    assert asides(out) == []


@pytest.mark.parametrize("point", ["commit.rename.before", "storage.rename.before", "commit.rename.after"])
def test_there_is_a_whole_checkpoint_at_each_moment_of_a_step_that_is_saved_twice(out, tmp_path, point):
    class Armed(Limit):
        def on_epoch_end(self, args, state, control, **kwargs):
            control.should_save = True
            trainer._easyckpt.run.taking.drain()
            failpoints.arm(f"{point}=kill")

    child = os.fork()
    if child == 0:
        trainer = make(out, callbacks=[Armed()], save_steps=4)
        trainer.train()
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert whole(out, 4)
    forget_memory()
    trainer = make(out, save_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert min(entry["step"] for entry in trainer.state.log_history[-4:]) >= 4
    assert same(weights(trainer), straight(tmp_path))


class Calls(TrainerCallback):
    def __init__(self, event: str, step: int) -> None:
        self.step, self.trainer = step, None
        setattr(self, event, self.call)

    def call(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.trainer._save_checkpoint(self.trainer.model, None)


@pytest.mark.parametrize(
    ("event", "step"),
    [("on_train_begin", 0), ("on_step_begin", 3), ("on_step_end", 3), ("on_epoch_begin", 6), ("on_train_end", STEPS)],
)
def test_a_save_between_two_steps_is_of_the_step_before(out, tmp_path, event, step):
    call, ends = Calls(event, step), [At(min(step + 2, 7), stop)] if step < STEPS else []
    call.trainer = make(out, callbacks=[call, *ends], save_strategy="no", options={"slots": 4})
    if step < STEPS:
        with pytest.raises(Stopped):
            call.trainer.train()
    else:
        call.trainer.train()
    assert checkpoints(out) == [step]
    forget_memory()
    trainer = make(out, save_strategy="no")
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path))
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == list(range(1, STEPS + 1))


class Killed(Calls):
    """When the snapshot is nearly whole."""

    def call(self, args, state, control, **kwargs):
        failpoints.arm("slot.seal.before=kill")
        super().call(args, state, control, **kwargs)


def test_a_step_without_a_snapshot_is_saved_at_the_cost_of_none_before(out, tmp_path):
    child, call = os.fork(), Killed("on_train_end", STEPS)
    if child == 0:
        try:
            options = {"save_mem_interval": 3, "slots": 2}
            call.trainer = make(out, callbacks=[call], save_strategy="no", options=options)
            call.trainer.train()
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    begun: list[int] = []
    trainer = make(out, save_strategy="no", callbacks=[At(6, lambda control: begun.append(6)), At(5, stop)])
    trainer.train(resume_from_checkpoint=True)
    assert begun == [6]
    assert same(weights(trainer), straight(tmp_path))


def test_what_lies_past_a_step_that_was_named_stays_though_that_step_is_saved_again(out):
    make(out).train()
    forget_memory()
    call = Calls("on_train_end", 4)
    call.trainer = make(out, callbacks=[call], max_steps=4)
    call.trainer.train(resume_from_checkpoint=str(out / "checkpoint-4"))
    assert checkpoints(out) == [2, 4]
    assert sorted(path.name.partition(".")[0] for path in out.glob("_easyckpt-stale-*")) == [
        "_easyckpt-stale-checkpoint-6",
        "_easyckpt-stale-checkpoint-8",
    ]


def test_a_step_of_another_directory_that_is_saved_again_leaves_what_is_there(out, tmp_path):
    make(out, save_steps=3, max_steps=3).train()
    make(tmp_path / "other", max_steps=4).train()
    forget_memory()
    call = Calls("on_train_end", 4)
    call.trainer = make(out, callbacks=[call], max_steps=4)
    call.trainer.train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-4"))
    assert checkpoints(out) == [3, 4]
    assert whole(out, 3)
    assert whole(out, 4)


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_one_that_was_not_made_is_not_the_best(out, limit):
    worth = {2: 5.0, 4: 9.0}

    class Full(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3:
                trainer._easyckpt.run.taking.drain()
                failpoints.arm("writer.shard.chunk=error:ENOSPC")
            elif state.global_step == 5:
                trainer._easyckpt.run.taking.drain()
                failpoints.arm("")

    trainer = make(
        out, callbacks=[Full()], options={"on_failure": "continue"}, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="worth", greater_is_better=True, save_total_limit=limit,
        eval_dataset=Sequences(4, seed=1),
        compute_metrics=lambda _: {"worth": worth.get(trainer.state.global_step, 0.0)},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(out / "checkpoint-2")
    assert 2 in checkpoints(out)


def test_the_best_one_stays_where_it_cannot_be_saved_once_more(out):
    worth = {2: 5.0, 4: 9.0}

    class Full(Limit):
        def on_epoch_end(self, args, state, control, **kwargs):
            control.should_save = True
            trainer._easyckpt.run.taking.drain()
            failpoints.arm("writer.shard.chunk=error:ENOSPC")

    trainer = make(
        out, callbacks=[Full()], options={"on_failure": "continue"}, eval_strategy="steps", eval_steps=2,
        metric_for_best_model="worth", greater_is_better=True, load_best_model_at_end=True, save_total_limit=1,
        eval_dataset=Sequences(4, seed=1),
        compute_metrics=lambda _: {"worth": worth.get(trainer.state.global_step, 0.0)},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(out / "checkpoint-4")
    assert whole(out, 4)


def test_another_trainings_checkpoint_is_not_the_best_one(out):
    make(out, max_steps=6, save_steps=3).train()
    worth = {6: 9.0}
    trainer = make(
        out, eval_strategy="steps", eval_steps=2, save_steps=4, seed=7, metric_for_best_model="worth",
        greater_is_better=True, eval_dataset=Sequences(4, seed=1),
        compute_metrics=lambda _: {"worth": worth.get(trainer.state.global_step, 0.0)},
    )  # fmt: skip
    trainer.train()
    assert 6 in checkpoints(out)
    assert trainer.state.best_model_checkpoint is None


def test_what_a_kill_has_prevented_is_made_though_another_has_its_name(out, tmp_path):
    child = os.fork()
    if child == 0:
        failpoints.arm("flush.begin=kill")
        make(out, save_steps=4, options={"on_save": "wait"}).train()
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    (out / "checkpoint-4").mkdir()
    with pytest.raises(Stopped):
        make(out, save_steps=4, callbacks=[At(7, stop)]).train(resume_from_checkpoint=True)
    assert whole(out, 4)


def half_a_step(out: Path, kind: type = Trainer, **arguments) -> Trainer:
    """A training whose first pass over its stream ends with half of a fourth step."""
    trainer = make(out, kind, gradient_accumulation_steps=2, **arguments)
    trainer.train_dataset = Stream(14)
    return trainer


def test_files_that_come_with_half_a_step_are_spoken_of(out, caplog):
    half_a_step(out, Own, save_strategy="epoch", max_steps=6).train()
    assert checkpoints(out) == [3, 6]
    lost = [step for step in (3, 6) if not (out / f"checkpoint-{step}" / EXTRA).exists()]
    said = [step for step in (3, 6) if f"step {step}: files that _save_checkpoint adds" in caplog.text]
    assert lost == said != []


class StopsInHalfAStep(TrainerCallback):
    batches = 0

    def on_substep_end(self, args, state, control, **kwargs):
        self.batches += 1
        control.should_save = control.should_training_stop = self.batches == 4

    def on_step_begin(self, args, state, control, **kwargs):
        assert state.global_step < 3 or self.batches < 4


def test_a_stop_within_half_a_step_is_at_the_end_of_its_pass(out):
    trainer = half_a_step(out, save_strategy="no", callbacks=[StopsInHalfAStep()])
    trainer.train()
    assert trainer.state.global_step == 3
    assert checkpoints(out) == [3]


def test_a_program_may_catch_the_error_of_its_saving(out):
    class Caught(Trainer):
        def _save_checkpoint(self, *args, **kwargs):
            if self.state.global_step == 2:
                raise OSError("no room")
            super()._save_checkpoint(*args, **kwargs)

    class Saves(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                with pytest.raises(OSError, match="no room"):
                    trainer._save_checkpoint(trainer.model, None)
                assert not trainer._easyckpt.run.taking._apart

    trainer = make(out, Caught, save_steps=3, max_steps=3, callbacks=[Saves()])
    trainer.train()
    assert whole(out, 3)
