"""What a wrapped Trainer's arguments, files and callbacks mean; test_transformers_semantics.py runs it.

Every test trains for real, in this process, from the files that are on storage: each run's memory ends with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from easyckpt import ConfigError, DamagedCheckpoint, EasyckptError, SaveFailed, catalog, failpoints
from easyckpt.format.trainer_names import TrainerNaming
from easyckpt.integrations.transformers import TrainerWrapper
from easyckpt.storage.records_apart import open_place
from easyckpt.verification import verify
from tests.trainers.data import Sequences
from tests.trainers.models import gpt2

STEPS = 8
STOCK_FILES = {
    "config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt",
    "trainer_state.json", "training_args.bin",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_memory(tmp_path_factory, monkeypatch):
    memory = Path("/dev/shm") / f"easyckpt-test-{os.getpid()}-semantics"
    memory.mkdir(exist_ok=True)
    monkeypatch.setenv("EASYCKPT_MEMORY_DIR", str(memory))
    monkeypatch.setenv("EASYCKPT_LEASE_TIMEOUT", "2")
    monkeypatch.setenv("EASYCKPT_LEASE_INTERVAL", "0.5")
    yield
    shutil.rmtree(memory, ignore_errors=True)
    failpoints.arm("")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def make(out: Path, kind: type = Trainer, *, callbacks: Any = (), wrap: bool = True, **arguments: Any) -> Trainer:
    options = arguments.pop("options", {})
    more = {key: arguments.pop(key) for key in ("model_init", "eval_dataset", "compute_metrics") if key in arguments}
    settings: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "save_steps": 2, "save_strategy": "steps",
        "logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-2,
    }  # fmt: skip
    trainer = kind(
        None if "model_init" in more else gpt2(),
        TrainingArguments(str(out), **(settings | arguments)),
        train_dataset=Sequences(12),
        callbacks=list(callbacks),
        **more,
    )
    return TrainerWrapper(trainer, **options) if wrap else trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def checkpoints(out: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in out.glob("checkpoint-*"))


class At(TrainerCallback):
    """Does something when a step has begun."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act(control)


class Stopped(Exception):
    pass


def stop(control):
    raise Stopped


def straight(tmp_path: Path, **arguments: Any) -> dict[str, torch.Tensor]:
    trainer = make(tmp_path / "straight", wrap=False, save_strategy="no", **arguments)
    trainer.train()
    return weights(trainer)


def plain_gpt2():
    return gpt2()


# -- the object


def test_the_same_object_and_once(out):
    trainer = make(out, wrap=False)
    wrapped = TrainerWrapper(trainer, slots=3)
    assert wrapped is trainer
    assert isinstance(trainer, Trainer)
    assert type(trainer).__name__ == "Trainer"
    kind, callbacks = type(trainer), list(trainer.callback_handler.callbacks)
    assert TrainerWrapper(trainer) is trainer
    assert (type(trainer), trainer.callback_handler.callbacks) == (kind, callbacks)


@pytest.mark.parametrize(
    "options",
    [{"slotz": 3}, {"slots": 0}, {"on_save": "now"}, {"max_ckpt_num": 3}, {"save_storage_interval": 5}],
)
def test_wrong_options_change_nothing(out, options):
    trainer = make(out, wrap=False)
    kind = type(trainer)
    with pytest.raises((ConfigError, TypeError)):
        TrainerWrapper(trainer, **options)
    assert type(trainer) is kind
    with pytest.raises(ConfigError, match="Trainer"):
        TrainerWrapper(object())


# -- files


def test_the_layout_is_the_frameworks(out, tmp_path):
    trainer = make(out, save_total_limit=2)
    trainer.train()
    assert checkpoints(out) == [6, 8]
    assert {path.name for path in (out / "checkpoint-8").iterdir()} == STOCK_FILES | {"manifest.json"}
    assert [name for name in os.listdir(out) if not name.startswith(("_easyckpt", "checkpoint-"))] == []
    loaded = GPT2LMHeadModel.from_pretrained(out / "checkpoint-8")
    assert same(loaded.state_dict(), weights(trainer))
    assert same(weights(trainer), straight(tmp_path))


def test_files_hold_what_the_trainer_itself_would_have_written(out, tmp_path):
    make(out).train()
    make(tmp_path / "stock", wrap=False).train()
    ours, theirs = out / "checkpoint-8", tmp_path / "stock" / "checkpoint-8"
    for name in ("optimizer.pt", "scheduler.pt"):
        assert equal(torch.load(ours / name, weights_only=True), torch.load(theirs / name, weights_only=True)), name
    one, other = (torch.load(path / "rng_state.pth", weights_only=False) for path in (ours, theirs))
    assert equal(one, other)
    one, other = (json.loads((path / "trainer_state.json").read_text()) for path in (ours, theirs))
    for state in (one, other):
        for entry in state["log_history"]:
            entry.pop("step_time", None)
    assert one == other


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "tolist"):
        return one.tolist() == other.tolist()
    return one == other


def test_the_stock_trainer_resumes_from_ours(out, tmp_path):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(6, stop)]).train()
    trainer = make(out, wrap=False)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path))


def test_we_resume_from_the_stock_trainers(out, tmp_path, caplog):
    with pytest.raises(Stopped):
        make(out, wrap=False, callbacks=[At(5, stop)]).train()
    trainer = make(out)
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer.train(resume_from_checkpoint=True)
    assert "written by the Trainer itself" in caplog.text
    assert same(weights(trainer), straight(tmp_path))
    assert checkpoints(out) == [2, 4, 6, 8]
    assert not (out / "checkpoint-4" / "manifest.json").exists()
    assert (out / "checkpoint-6" / "manifest.json").exists()


def test_files_added_to_a_checkpoint_do_not_spoil_it(out):
    make(out).train()
    (out / "checkpoint-8" / "README.md").write_text("the best one")
    assert whole(out, 8)


def whole(out: Path, step: int) -> bool:
    storage, naming = open_place(out)
    entry = catalog.inspect(storage, f"checkpoint-{step}", naming)
    return entry.valid and verify(storage, entry) == []


# -- which checkpoints stay


def test_every_save_that_is_asked_for_is_made(out):
    make(out, save_steps=1).train()
    assert checkpoints(out) == list(range(1, STEPS + 1))


@pytest.mark.parametrize(("limit", "kept"), [(1, [2, 8]), (2, [2, 8]), (3, [2, 6, 8])])
def test_the_best_checkpoint_stays_and_counts(out, limit, kept):
    trainer = make(
        out,
        save_total_limit=limit,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="worth",
        greater_is_better=True,
        eval_dataset=Sequences(4, seed=1),
        compute_metrics=lambda prediction: {"worth": 1.0 / trainer.state.global_step},
    )
    seen = {}
    trainer.add_callback(At(2, lambda control: seen.update(weights(trainer))))
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(out / "checkpoint-2")
    assert same(weights(trainer), seen)
    left = checkpoints(out)
    assert left == ([2] if limit == 1 else kept)  # the Trainer itself removes the last one then


def judged(worths: dict[int, float]) -> tuple[dict[str, Any], list[Trainer]]:
    """Arguments of a Trainer (the first of the list) whose model is worth so much at these steps."""
    trainers: list[Trainer] = []
    arguments = {
        "eval_strategy": "steps", "load_best_model_at_end": True, "metric_for_best_model": "worth",
        "greater_is_better": True, "save_total_limit": 2, "eval_dataset": Sequences(4, seed=1),
        "compute_metrics": lambda prediction: {"worth": worths.get(trainers[0].state.global_step, 0.0)},
    }  # fmt: skip
    return arguments, trainers


def test_the_best_stays_also_where_a_resumed_run_is_preempted_at_once(out):
    arguments, trainers = judged({2: 9.0})
    trainers.append(make(out, eval_steps=2, callbacks=[At(7, stop)], **arguments))
    with pytest.raises(Stopped):
        trainers[0].train()
    assert checkpoints(out) == [2, 6]
    forget_memory()
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        trainers[0] = make(out, eval_steps=2, callbacks=[At(6, lambda control: signal.raise_signal(15))], **arguments)
        trainers[0].train(resume_from_checkpoint=True)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert trainers[0].state.global_step < STEPS
    assert checkpoints(out)[0] == 2


def test_the_best_is_the_one_that_was_saved(out):
    arguments, trainers = judged({2: 5.0, 3: 6.0, 5: 7.0})
    trainers.append(make(out, eval_steps=1, **arguments))
    trainers[0].train()
    assert checkpoints(out) == [2, 8]


def test_a_better_one_takes_the_place_of_the_best(out):
    arguments, trainers = judged({2: 5.0, 4: 6.0})
    trainers.append(make(out, eval_steps=2, **arguments))
    trainers[0].train()
    assert checkpoints(out) == [4, 8]


def test_what_the_options_keep_stays_beside_the_best(out):
    arguments, trainers = judged({2: 5.0})
    trainers.append(make(out, eval_steps=2, options={"keep_every": 4}, **arguments))
    trainers[0].train()
    assert checkpoints(out) == [2, 4, 8]


def test_a_strategy_of_none_leaves_nothing(out):
    make(out, save_strategy="no").train()
    assert checkpoints(out) == []


def test_a_strategy_of_epochs(out):
    make(out, save_strategy="epoch", max_steps=-1, num_train_epochs=2).train()
    assert checkpoints(out) == [6, 12]


def test_a_model_only_is_no_state_to_go_on_from(out):
    with pytest.raises(Stopped):
        make(out, save_only_model=True, callbacks=[At(5, stop)]).train()
    assert {path.name for path in (out / "checkpoint-4").iterdir()} == STOCK_FILES - {
        "optimizer.pt", "scheduler.pt", "rng_state.pth",
    } | {"manifest.json"}  # fmt: skip
    forget_memory()
    with pytest.raises(DamagedCheckpoint, match="save_only_model"):
        make(out).train(resume_from_checkpoint=True)


def forget_memory() -> None:
    for path in Path(os.environ["EASYCKPT_MEMORY_DIR"]).iterdir():
        path.unlink()


# -- callbacks


class Listener(TrainerCallback):
    def __init__(self) -> None:
        self.heard: list[tuple[int, int, bool]] = []
        self.live = lambda: -1

    def on_save(self, args, state, control, **kwargs):
        out = Path(args.output_dir)
        self.heard.append((state.global_step, self.live(), whole(out, state.global_step)))


@pytest.mark.parametrize("on_save", ["later", "wait"])
def test_callbacks_see_complete_directories(out, on_save):
    listener = Listener()
    trainer = make(out, callbacks=[listener], options={"on_save": on_save})
    listener.live = lambda: trainer.model_wrapped is not None and current[0]
    current = [0]
    trainer.add_callback(Counting(current))
    trainer.train()
    assert [(step, good) for step, _, good in listener.heard] == [(2, True), (4, True), (6, True), (8, True)]
    if on_save == "wait":
        assert [live for _, live, _ in listener.heard] == [2, 4, 6, 8]


class Counting(TrainerCallback):
    def __init__(self, current: list[int]) -> None:
        self.current = current

    def on_step_end(self, args, state, control, **kwargs):
        self.current[0] = state.global_step


def test_callbacks_hear_of_the_last_checkpoint_where_the_last_epoch_is_cut(out):
    heard: list[Any] = []

    class Cut(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 3 == 0

        def on_save(self, args, state, control, **kwargs):
            heard.append(state.global_step)

        def on_train_end(self, args, state, control, **kwargs):
            heard.append("end")

    make(out, save_strategy="epoch", max_steps=-1, num_train_epochs=2, callbacks=[Cut()]).train()
    assert heard == [3, 6, "end"]


@pytest.mark.parametrize("limit", [1, 2])
def test_what_callbacks_are_still_to_hear_of_is_not_rotated(out, limit):
    listener = Listener()
    make(out, callbacks=[listener], save_total_limit=limit).train()
    assert [(step, good) for step, _, good in listener.heard] == [(2, True), (4, True), (6, True), (8, True)]
    assert checkpoints(out) == [2, 4, 6, 8][-limit:]


def test_callbacks_that_were_replaced(out, tmp_path):
    trainer = make(out)
    trainer.callback_handler.callbacks = [
        callback for callback in trainer.callback_handler.callbacks if type(callback).__name__ != "RunCallback"
    ]
    trainer.train()
    assert checkpoints(out) == [2, 4, 6, 8]
    assert same(weights(trainer), straight(tmp_path))


def test_uploads_see_complete_directories(out):
    pushed: list[tuple[int, int, bool]] = []

    class Uploading(Trainer):
        def _push_from_checkpoint(self, checkpoint_folder):
            step = int(Path(checkpoint_folder).name.partition("-")[2])
            pushed.append((step, self.state.global_step, whole(out, step)))

    trainer = make(out, Uploading)
    trainer.args.push_to_hub = True
    trainer.push_in_progress = None
    with contextlib.suppress(AttributeError):
        trainer._finish_current_push = lambda: None
    trainer.train()
    assert pushed == [(2, 2, True), (4, 4, True), (6, 6, True), (8, 8, True)]


# -- resuming


def test_nothing_there_is_a_beginning_and_said(out, caplog):
    trainer = make(out)
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer.train(resume_from_checkpoint=True)
    assert "nothing to resume from" in caplog.text
    assert trainer.state.global_step == STEPS


@pytest.mark.parametrize("how", ["flag", "newest path"])
def test_the_newest(out, tmp_path, how):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    forget_memory()
    trainer = make(out)
    trainer.train(resume_from_checkpoint=True if how == "flag" else str(out / "checkpoint-4"))
    assert same(weights(trainer), straight(tmp_path))
    assert checkpoints(out) == [2, 4, 6, 8]


def test_the_newest_path_means_memory_too(out, tmp_path):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    begun = []
    trainer = make(out)
    trainer.add_callback(At(5, lambda control: begun.append(5)))
    trainer.add_callback(At(4, lambda control: begun.append(4)))
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-4"))
    assert begun == [5]
    assert same(weights(trainer), straight(tmp_path))


def test_an_older_path_is_taken_as_meant(out, tmp_path):
    make(out).train()
    trainer = make(out)
    begun = []
    trainer.add_callback(At(2, lambda control: begun.append(2)))
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert begun == [2]
    assert same(weights(trainer), straight(tmp_path))
    stale = [name for name in os.listdir(out) if TrainerNaming().parse_stale(name)]
    assert {TrainerNaming().parse_stale(name)[0] for name in stale} == {4, 6, 8}  # named, so they stay


def test_a_path_in_another_root(out, tmp_path):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    trainer = make(tmp_path / "another")
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-4"))
    assert same(weights(trainer), straight(tmp_path))
    assert checkpoints(tmp_path / "another") == [6, 8]
    assert checkpoints(out) == [2, 4]


def test_a_path_that_is_nothing(out, tmp_path):
    with pytest.raises(ConfigError, match="no such directory"):
        make(out).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_new_line_without_ancestors(out):
    make(out, max_steps=4).train()
    before = (out / "checkpoint-4" / "model.safetensors").read_bytes()
    with pytest.raises(Stopped):
        make(out, seed=7, save_steps=3, callbacks=[At(4, stop)]).train()
    assert checkpoints(out) == [2, 3, 4]
    assert (out / "checkpoint-4" / "model.safetensors").read_bytes() == before
    forget_memory()
    trainer = make(out, seed=7, save_steps=3)
    begun = []
    trainer.add_callback(At(3, lambda control: begun.append(3)))
    trainer.train(resume_from_checkpoint=True)
    assert begun == [3]


@pytest.mark.parametrize(("every", "how", "begins"), [(8, "True", 4), (8, "path", 4), (3, "True", 3), (3, "path", 4)])
def test_a_new_line_hides_older_ones_once_it_has_something(out, every, how, begins):
    make(out, max_steps=4).train()
    with pytest.raises(Stopped):
        make(out, seed=7, save_steps=every, callbacks=[At(4 if every == 3 else 1, stop)]).train()
    forget_memory()
    begun: list[int] = []
    trainer = make(out)
    for step in range(STEPS):
        trainer.add_callback(At(step, lambda control: begun.append(trainer.state.global_step)))
    trainer.train(resume_from_checkpoint=True if how == "True" else str(out / "checkpoint-4"))
    assert begun[0] == begins
    assert trainer.state.global_step == STEPS


def test_a_number_that_is_needed_again_is_moved_aside(out):
    make(out, max_steps=4).train()
    first = (out / "checkpoint-4" / "model.safetensors").read_bytes()
    make(out, max_steps=4, seed=7, learning_rate=1e-3).train()
    assert checkpoints(out) == [2, 4]
    assert (out / "checkpoint-4" / "model.safetensors").read_bytes() != first
    aside = [name for name in os.listdir(out) if (TrainerNaming().parse_stale(name) or (0,))[0] == 4]
    assert [(out / name / "model.safetensors").read_bytes() for name in aside] == [first]


def test_what_is_in_the_way_stays_until_the_new_one_is_whole(out):
    make(out, max_steps=4, save_steps=4).train()
    failpoints.arm("commit.rename.before=error:EIO")
    with pytest.raises(SaveFailed):
        make(out, max_steps=4, save_steps=4, seed=7).train()
    assert checkpoints(out) == [4]


def test_a_whole_attempt_takes_no_place_of_the_trainers_own(out):
    make(out, max_steps=4, save_steps=4).train()
    attempt = json.loads((out / "checkpoint-4" / "manifest.json").read_text())["attempt"]
    shutil.copytree(out / "checkpoint-4", out / TrainerNaming().temporary(4, attempt))  # killed before its rename
    (out / "checkpoint-4" / "manifest.json").unlink()  # and the number was taken by the unwrapped Trainer then
    (out / "checkpoint-4" / "mine.txt").write_text("mine")
    make(out, save_steps=4).train(resume_from_checkpoint=True)
    assert whole(out, 4)
    assert len(list(out.glob("_easyckpt-stale-checkpoint-4*/mine.txt"))) == 1


def test_a_directory_of_the_users_in_the_way(out):
    def make_one(control):
        (out / "checkpoint-6").mkdir()
        (out / "checkpoint-6" / "mine.txt").write_text("mine")

    make(out, callbacks=[At(5, make_one)]).train()
    assert checkpoints(out) == [2, 4, 6, 8]
    assert whole(out, 6)
    assert len(list(out.glob("_easyckpt-stale-checkpoint-6*/mine.txt"))) == 1


def test_trained_twice(out, tmp_path):
    trainer = make(out)
    trainer.train()
    trainer.train()
    other = make(tmp_path / "stock", wrap=False, save_strategy="no")
    other.train()
    other.train()
    assert same(weights(trainer), weights(other))


def test_a_batch_size_that_is_found(out):
    failed = []

    class Hungry(Trainer):
        def training_step(self, *args, **kwargs):
            if not failed:
                failed.append(self._train_batch_size)
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    trainer = make(out, Hungry, auto_find_batch_size=True)
    trainer.train()
    assert failed
    assert trainer.state.global_step == STEPS
    assert checkpoints(out) == [2, 4, 6, 8]


def test_a_batch_size_that_is_found_after_a_resume(out):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(7, stop)]).train()
    failed = []

    class Hungry(Trainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == 7 and not failed:
                failed.append(self._train_batch_size)
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    forget_memory()
    trainer = make(out, Hungry, auto_find_batch_size=True)
    begun = []
    trainer.add_callback(At(6, lambda control: begun.append(6)))
    trainer.train(resume_from_checkpoint=True)
    assert failed
    assert trainer.state.global_step == STEPS
    assert begun == [6, 6]


def test_a_checkpoint_that_a_kill_prevented_is_made_by_the_resume(out):
    def spoil(control):
        shutil.rmtree(out / "checkpoint-4")
        raise Stopped

    with pytest.raises(Stopped):
        make(out, options={"on_save": "wait"}, callbacks=[At(4, spoil)]).train()
    trainer = make(out, max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    assert whole(out, 4)


def test_methods_that_load_by_themselves_are_named(out, caplog):
    class Own(Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
            raise AssertionError("it is given what only the Trainer's own loading reads")

    with pytest.raises(Stopped):
        make(out, Own, callbacks=[At(5, stop)]).train()
    with caplog.at_level(logging.WARNING, "easyckpt"):
        make(out, Own).train(resume_from_checkpoint=True)
    assert "Own overrides _load_from_checkpoint" in caplog.text


def test_a_model_that_is_made_anew(out, tmp_path):
    with pytest.raises(Stopped):
        make(out, model_init=plain_gpt2, callbacks=[At(5, stop)]).train()
    forget_memory()
    trainer = make(out, model_init=plain_gpt2)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path, model_init=plain_gpt2))


# -- damage


@pytest.mark.parametrize("name", sorted(STOCK_FILES | {"manifest.json"}))
@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "missing"])
def test_damage_in_any_file_falls_back_or_is_an_error(out, tmp_path, name, how, caplog):
    if not (tmp_path.parent / "damaged").exists():
        with pytest.raises(Stopped):
            make(tmp_path.parent / "damaged", callbacks=[At(7, stop)]).train()
    shutil.copytree(tmp_path.parent / "damaged", out)
    forget_memory()
    damage(out / "checkpoint-6" / name, how)
    trainer = make(out)
    begun = []
    for step in (4, 6):
        trainer.add_callback(At(step, lambda control, step=step: begun.append(step)))
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path))
    if name == "manifest.json" and how == "missing":
        assert begun == [6]  # what is left is whole, and such as the Trainer itself writes
        assert "written by the Trainer itself" in caplog.text
    else:
        assert begun == [4, 6]
        assert "checkpoint-6" in caplog.text


@pytest.mark.parametrize("how", ["another order", "pickles"])
def test_weights_of_another_step_are_in_no_checkpoint(out, tmp_path, how):
    """Files with copies of weights are made when the Trainer saves; the end of a job commits other steps too."""
    if how == "pickles" and "save_safetensors" not in TrainingArguments.__dataclass_fields__:
        pytest.skip("this version writes no pickles")

    def leave(control):
        raise SystemExit(0)

    def begun(**arguments):
        trainer = make(out, save_steps=4, **arguments, **({"save_safetensors": False} if how == "pickles" else {}))
        if how == "another order":
            weight = trainer.model.transformer.h[0].mlp.c_fc.weight
            weight.data = weight.data.t().contiguous().t()
        return trainer

    with pytest.raises(SystemExit):
        begun(callbacks=[At(6, leave)]).train()
    names = {path.name for path in (out / "checkpoint-4").iterdir()}
    left_out = names - {path.name for path in (out / "checkpoint-6").iterdir()}
    assert left_out == {"model.safetensors" if how == "another order" else "pytorch_model.bin"}
    assert whole(out, 6)
    forget_memory()
    trainer = begun()
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.log_history[0]["step"] == 1
    assert len(trainer.state.log_history) == STEPS + 1
    assert same(weights(trainer), straight(tmp_path))


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "flipped":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
    else:
        path.write_bytes(data[: len(data) // 2] if how == "truncated" else b"")


def test_all_damaged_is_an_error_and_no_new_beginning(out):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    forget_memory()
    for path in out.glob("checkpoint-*/optimizer.pt"):
        damage(path, "flipped")
    with pytest.raises(DamagedCheckpoint):
        make(out).train(resume_from_checkpoint=True)


# -- errors


def test_an_error_of_the_writer_is_raised_at_a_next_step(out):
    failpoints.arm("writer.shard.chunk=error:ENOSPC")
    reached = []
    trainer = make(out, max_steps=500)
    trainer.add_callback(At(499, lambda control: reached.append(499)))
    with pytest.raises(SaveFailed, match="No space left"):
        trainer.train()
    assert not reached
    assert 2 not in checkpoints(out)


def test_an_interrupt_leaves_what_was_committed(out):
    def interrupt(control):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(out, callbacks=[At(5, interrupt)]).train()
    assert checkpoints(out) == [2, 4]
    assert [name for name in os.listdir(out) if name.startswith("_easyckpt-tmp")] == []


# -- subclasses


def test_overridden_methods_are_called(out):
    called: list[str] = []

    class Own(Trainer):
        def compute_loss(self, *args, **kwargs):
            called.append("compute_loss")
            return super().compute_loss(*args, **kwargs)

        def get_train_dataloader(self):
            called.append("get_train_dataloader")
            return super().get_train_dataloader()

        def _save_checkpoint(self, *args, **kwargs):
            called.append("_save_checkpoint")
            super()._save_checkpoint(*args, **kwargs)
            beside = out / f"checkpoint-{self.state.global_step}"
            (beside / "more").mkdir()
            (beside / "more" / "own.bin").write_bytes(b"%d" % self.state.global_step)

        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            (Path(output_dir) / "note.txt").write_text(str(self.state.global_step))

    trainer = make(out, Own)
    trainer.train()
    assert set(called) == {"compute_loss", "get_train_dataloader", "_save_checkpoint"}
    assert called.count("_save_checkpoint") == 4
    notes = {step: (out / f"checkpoint-{step}" / "note.txt").read_text() for step in checkpoints(out)}
    assert notes == {2: "2", 4: "4", 6: "6", 8: "8"}
    assert all(whole(out, step) for step in notes)
    assert all((out / f"checkpoint-{step}" / "more" / "own.bin").read_text() == str(step) for step in notes)


def test_an_error_of_the_trainers_own_is_not_replaced(out):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(3, stop)]).train()
    assert issubclass(SaveFailed, EasyckptError)


def test_a_training_that_is_over_trains_no_more(out, tmp_path):
    make(out).train()
    for limit in ({}, {"max_steps": -1, "num_train_epochs": 1}):
        trainer = make(out, **limit)
        begun = []
        trainer.add_callback(At(STEPS, lambda control, begun=begun: begun.append(STEPS)))
        trainer.train(resume_from_checkpoint=True)
        assert (begun, trainer.state.global_step) == ([], STEPS)
        assert same(weights(trainer), straight(tmp_path))
        assert checkpoints(out) == [2, 4, 6, 8]


class Transposed:
    """A model one of whose weights lies transposed in memory, so that saving it makes a copy."""

    def __new__(cls):
        model = gpt2()
        weight = model.transformer.h[0].mlp.c_fc.weight
        weight.data = weight.data.t().contiguous().t()
        return model


class Ends(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise SystemExit(
                0
            )  # a clean end in the middle: the newest snapshot is committed, of a step that was not due


def test_weights_of_another_step_are_left_out_rather_than_stored(out, tmp_path):
    with pytest.raises(SystemExit):
        make(out, model_init=Transposed, callbacks=[Ends()]).train()
    assert checkpoints(out) == [2, 4, 5]
    assert (out / "checkpoint-4" / "model.safetensors").exists()
    assert not (out / "checkpoint-5" / "model.safetensors").exists()
    assert (out / "checkpoint-5" / "training_args.bin").exists()
    assert whole(out, 5)
    forget_memory()
    trainer = make(out, model_init=Transposed)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path, model_init=Transposed))
    assert same(GPT2LMHeadModel.from_pretrained(out / "checkpoint-8").state_dict(), weights(trainer))


def test_weights_that_torch_save_writes(out, tmp_path):
    """As the Trainer itself does with save_safetensors=False, up to 4.57."""

    class Old(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            torch.save(self.model.state_dict(), os.path.join(output_dir, "pytorch_model.bin"))

    with pytest.raises(SystemExit):
        make(out, Old, callbacks=[Ends()]).train()
    forget_memory()
    trainer = make(out, Old, max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    for name in ("checkpoint-5", "checkpoint-4"):
        stored = torch.load(out / name / "pytorch_model.bin", weights_only=True)
        assert same(stored, GPT2LMHeadModel.from_pretrained(out / name).state_dict()), name
    assert same(stored, weights(trainer)) is False
    assert same(torch.load(out / "checkpoint-5" / "pytorch_model.bin", weights_only=True), weights(trainer))


def test_a_training_that_was_begun_by_mistake_hides_nothing(out, tmp_path):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    with pytest.raises(Stopped):
        make(out, callbacks=[At(1, stop)]).train()
    forget_memory()
    trainer = make(out)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path))
    assert checkpoints(out) == [2, 4, 6, 8]


# -- trainings that the Trainer saves by itself


@pytest.fixture
def sharded(monkeypatch):
    """As if the state were sharded: what the Trainer itself writes is committed."""
    monkeypatch.setattr("easyckpt.integrations.transformers.synchronous.why", lambda trainer, trial: "a test")


def test_what_the_trainer_saves_is_committed_and_rotated(out, sharded, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "easyckpt"), pytest.raises(Stopped):
        make(out, save_total_limit=2, callbacks=[At(7, stop)]).train()
    assert caplog.text.count("saved by the Trainer itself") == 1
    assert checkpoints(out) == [4, 6]
    assert all(whole(out, step) for step in (4, 6))
    damage(out / "checkpoint-6" / "model.safetensors", "flipped")
    trainer = make(out)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-6 cannot be resumed from" in caplog.text
    assert same(weights(trainer), straight(tmp_path))


def test_a_save_of_the_trainers_that_was_cut_short_counts_for_nothing(out, sharded, tmp_path):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(7, stop)]).train()
    (out / "checkpoint-6" / "manifest.json").unlink()
    (out / "checkpoint-6" / "optimizer.pt").unlink()
    trainer = make(out)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path))
    for path in out.glob("checkpoint-*/optimizer.pt"):
        damage(path, "flipped")
    with pytest.raises(DamagedCheckpoint):
        make(out).train(resume_from_checkpoint=True)


def test_from_a_training_that_the_trainer_saved_to_one_of_ours(out, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("easyckpt.integrations.transformers.synchronous.why", lambda trainer, trial: "a test")
        make(out, callbacks=[At(5, stop)]).train()
    trainer = make(out)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), straight(tmp_path))
    assert checkpoints(out) == [2, 4, 6, 8]
