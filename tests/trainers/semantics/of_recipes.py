"""What is learnt of how a Trainer saves its model, and when."""

from __future__ import annotations

import json
import logging
import os
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from easyckpt.format.codec import path_text
from easyckpt.integrations.transformers import recipe
from tests.trainers.models import lora
from tests.trainers.semantics.of_files import Transposed
from tests.trainers.semantics.trainings import STEPS, At, checkpoints, make, same

#: What nobody has imported before the model is saved.
LATE_MODULE = """
import torch
from safetensors.torch import save_file
from torch import save

def write(tensors, path):
    save_file(tensors, path)
    save(tensors, str(path) + ".pt")
"""


@pytest.fixture
def late_module(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text(LATE_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("imported_late", None)


class ImportsLate(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        import imported_late

        os.makedirs(output_dir, exist_ok=True)
        imported_late.write(dict(self.model.transformer.state_dict()), os.path.join(output_dir, "model.safetensors"))


def test_a_module_that_is_first_imported_for_a_save_writes_as_ever(out, tmp_path, late_module):
    trainer = make(out, ImportsLate, max_steps=4)
    trainer.train()
    for step in (2, 4):
        names = {path.name for path in (out / f"checkpoint-{step}").iterdir()}
        assert {"model.safetensors", "model.safetensors.pt"} <= names, step
    trainer.save_model(str(tmp_path / "final"))
    stored = load_file(tmp_path / "final" / "model.safetensors")
    assert same(stored, load_file(out / "checkpoint-4" / "model.safetensors"))
    assert same(stored, torch.load(tmp_path / "final" / "model.safetensors.pt", weights_only=True))


class SavesNothing(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        """Saves elsewhere, as it were."""


def test_a_model_that_is_saved_without_weights_is_told_of_once(out, caplog):
    with caplog.at_level(logging.WARNING, "easyckpt"):
        make(out, SavesNothing, max_steps=4).train()
    assert checkpoints(out) == [2, 4]
    assert caplog.text.count("SavesNothing.save_model() writes no file of weights") == 1


class Tokenized(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        with open(os.path.join(output_dir, "tokenizer.json"), "wb") as file:
            file.write(b"x" * (1 << 20))


def test_files_that_stay_and_the_log_are_copied_while_training_goes_on(out):
    late: set[str] = set()

    def look(control):
        parts = trainer._easyckpt.run._checkpointer._parts
        capture = parts.capture.capture()
        late.update(path_text(capture.layout.leaves[number].path) for number in parts.stager.late(capture))

    trainer = make(out, Tokenized, callbacks=[At(6, look)])
    trainer.train()
    ends = [name for name in late if name.startswith(("files", "trainer"))]
    assert any(name.endswith("tokenizer.json") for name in ends)
    assert any(name.endswith("log.text") for name in ends)


class CannotSave(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        raise ValueError("this model is not serializable")


def test_a_model_that_cannot_be_saved_is_trained(out, caplog):
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer = make(out, CannotSave, save_strategy="no")
        trainer.train()
    assert trainer.state.global_step == STEPS
    assert caplog.text.count("CannotSave.save_model() has failed before training began") == 1
    with pytest.raises(ValueError, match="not serializable"):
        make(out, CannotSave).train()


def test_copies_of_weights_are_in_the_snapshot_of_their_step_alone(out):
    seen: dict[int, int] = {}

    def look(step):
        def count(control):
            leaves = trainer._easyckpt.run._checkpointer._parts.capture.capture().layout.leaves
            seen[step] = sum(
                path_text(leaf.path).startswith("files") and ".tensors." in path_text(leaf.path) for leaf in leaves
            )

        return At(step, count)

    trainer = make(out, model_init=Transposed, save_steps=4, callbacks=[look(step) for step in (1, 5, 6)])
    trainer.train()
    assert seen == {1: 0, 5: 0, 6: 0}
    for step in (4, 8):
        assert (out / f"checkpoint-{step}" / "model.safetensors").exists()


def learnings(monkeypatch) -> list[int]:
    """The steps at which a recipe is learnt."""
    steps: list[int] = []

    def counted(trainer, *arguments):
        steps.append(int(trainer.state.global_step))
        return learn(trainer, *arguments)

    learn = recipe.learn
    monkeypatch.setattr(recipe, "learn", counted)
    return steps


def test_small_files_are_made_anew_where_what_they_are_made_of_has_changed(out, monkeypatch):
    def change(control):
        trainer.model.generation_config.max_new_tokens = 77

    def change_arguments(control):
        trainer.args.run_name = "another"

    steps = learnings(monkeypatch)
    trainer = make(out, callbacks=[At(3, change), At(6, change_arguments)])
    trainer.train()
    folders = [out / f"checkpoint-{step}" for step in (2, 4, 6, 8)]
    found = [json.loads((folder / "generation_config.json").read_text()) for folder in folders]
    assert [config.get("max_new_tokens") for config in found] == [None, 77, 77, 77]
    names = [torch.load(folder / "training_args.bin", weights_only=False).run_name for folder in folders]
    assert [name == "another" for name in names] == [False, False, False, True]
    assert steps == [0, 4, 8]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft's own
def test_adapters_are_learnt_once(out, monkeypatch):
    steps = learnings(monkeypatch)
    make(out, model_init=lora).train()
    assert steps == [0]
    assert (out / "checkpoint-8" / "adapter_model.safetensors").exists()
