"""What users, scripts and other libraries may rely on is there, under these names and with these signatures."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pydoc
import signal
import typing
from collections.abc import Sequence
from pathlib import Path

import pytest
from typing_extensions import Unpack

import easyckpt
from easyckpt import errors
from easyckpt.config_sources import resolve
from easyckpt.settings import Settings

NAMES = {
    "CheckpointConfig",
    "Checkpointer",
    "Restored",
    "SkipBatchSampler",
    "register_codec",
    "restore",
    "settle_ddp",
}
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}

#: callable -> its parameters: name, or name=default; a bare * begins the keyword-only ones. More may follow.
SIGNATURES = {
    "Checkpointer.load": ["*", "step=None", "strict=True", "components=None"],
    "Checkpointer.save_if_needed": ["step"],
    "Checkpointer.save": ["step", "*", "wait=False"],
    "Checkpointer.batches": ["loader", "epoch", "name='train'"],
    "Checkpointer.log": ["**metrics"],
    "Checkpointer.wait": ["timeout=None"],
    "Checkpointer.close": [],
    "Checkpointer.stats": [],
    "SkipBatchSampler": [
        "length", "batch_size", "*", "shuffle=True", "seed=0", "drop_last=False", "rank=None", "world_size=None",
    ],
    "SkipBatchSampler.set_epoch": ["epoch"],
    "restore": ["root", "state", "*", "step=None"],
    "settle_ddp": ["model", "run_once"],
}  # fmt: skip

#: Settings that take more than the field of CheckpointConfig then holds.
WIDER = {
    "log_file_path": str | os.PathLike[str] | None,
    "memory_dir": str | os.PathLike[str] | None,
    "signals": Sequence[str | signal.Signals],
}

CONSTRUCTOR_DEFAULTS = {
    "save_mem_interval": 1,
    "save_storage_interval": 100,
    "max_ckpt_num": 5,
    "overlap": True,
    "slots": 4,
    "log_file_path": None,
    "signals": ("SIGTERM",),
}


def spelled(function) -> list[str]:
    """The parameters of `function` in the spelling of SIGNATURES."""
    result, keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            result.append("*")
            keyword_only = True
        text = parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        result.append({parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "") + text)
    return result


def test_all_is_sorted_and_complete():
    assert list(easyckpt.__all__) == sorted(easyckpt.__all__)
    assert set(easyckpt.__all__) >= NAMES
    assert all(hasattr(easyckpt, name) for name in easyckpt.__all__)


def test_every_error_is_reachable_and_in_one_tree():
    assert all(issubclass(getattr(errors, name), errors.EasyckptError) for name in ERRORS)
    assert all(getattr(easyckpt, name) is getattr(errors, name) for name in ERRORS & set(easyckpt.__all__))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_as_documented(name):
    target = easyckpt
    for part in name.split("."):
        target = getattr(target, part)
    promised = SIGNATURES[name]
    assert spelled(target)[: len(promised)] == promised


def test_the_constructor_shows_every_setting_with_its_default():
    parameters = inspect.signature(easyckpt.Checkpointer).parameters
    fields = {field.name: field.default for field in dataclasses.fields(easyckpt.CheckpointConfig)}
    del fields["audit"]  # EASYCKPT_AUDIT alone sets it
    assert list(parameters) == ["root", "state", *fields, "config", "process_group"]
    assert {name: parameters[name].default for name in fields} == fields
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in [*fields, "config", "process_group"])
    text = pydoc.plain(pydoc.render_doc(easyckpt.Checkpointer))
    assert all(f"{name}: " in text and f" = {default!r}" in text for name, default in fields.items())


def test_type_checkers_know_every_setting_and_its_type():
    accepted = typing.get_type_hints(easyckpt.Checkpointer.__init__)["settings"]
    assert accepted == Unpack[Settings]
    fields = typing.get_type_hints(easyckpt.CheckpointConfig)
    del fields["audit"]
    assert typing.get_type_hints(Settings) == fields | WIDER
    assert not Settings.__required_keys__


def test_wider_settings_arrive_as_the_field_holds_them():
    config = resolve({"log_file_path": Path("a"), "memory_dir": Path("b"), "signals": [signal.SIGTERM, "SIGUSR1"]})
    assert (config.log_file_path, config.memory_dir, config.signals) == ("a", "b", ("SIGTERM", "SIGUSR1"))


def test_a_name_that_is_no_setting_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(easyckpt.ConfigError, match="save_storage_interval"):
        easyckpt.Checkpointer(tmp_path / "run", {}, save_storage_intervall=3)
    assert not (tmp_path / "run").exists()


def test_settings_have_the_documented_defaults_and_are_frozen():
    config = easyckpt.CheckpointConfig()
    assert {name: getattr(config, name) for name in CONSTRUCTOR_DEFAULTS} == CONSTRUCTOR_DEFAULTS
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.slots = 5
    with pytest.raises(TypeError):
        easyckpt.CheckpointConfig(1)


def test_restored_has_the_documented_fields():
    names = [field.name for field in dataclasses.fields(easyckpt.Restored)]
    assert names[:6] == ["step", "tier", "path", "world_size", "timeline", "metrics"]


def test_preempted_is_a_property():
    assert isinstance(inspect.getattr_static(easyckpt.Checkpointer, "preempted"), property)
