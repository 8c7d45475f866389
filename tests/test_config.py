"""CheckpointConfig: defaults, validation, and which source of a setting wins."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import pydoc
import re
import signal

import pytest

from easyckpt.config import Audit, CheckpointConfig
from easyckpt.config_sources import resolve
from easyckpt.errors import ConfigError


def test_defaults_are_the_interface():
    config = CheckpointConfig()
    assert (config.save_mem_interval, config.save_storage_interval, config.max_ckpt_num) == (1, 100, 5)
    assert (config.overlap, config.slots, config.log_file_path, config.signals) == (True, 4, None, ("SIGTERM",))
    assert (config.signal_deadline, config.lease_timeout) == (20.0, 60.0)
    assert resolve({}, None, {}) == config


def test_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CheckpointConfig().slots = 3
    with pytest.raises(TypeError):
        CheckpointConfig(1)


def test_help_explains_every_field_with_its_default():
    text = pydoc.plain(pydoc.render_doc(CheckpointConfig))
    source = inspect.getsource(CheckpointConfig)
    for field in dataclasses.fields(CheckpointConfig):
        told = re.search(rf"^ \|  {field.name} = (.*)\n \|      (\S.*)$", text, re.MULTILINE)
        assert told, field.name
        assert ast.literal_eval(told[1]) == field.default
        assert source.count(f'"""{told[2]}"""') == 1  # the very text below the field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("save_mem_interval", 0),
        ("save_mem_interval", True),
        ("save_mem_interval", 1.5),
        ("save_mem_interval", "1"),
        ("save_storage_interval", -1),
        ("save_storage_interval", None),
        ("max_ckpt_num", 0),
        ("keep_every", 0),
        ("keep_every", 2.5),
        ("keep_best", -1),
        ("keep_best", None),
        ("keep_best", 2),  # of what?
        ("best_metric", 3),
        ("best_metric", ""),
        ("best_mode", "lowest"),
        ("overlap", 1),
        ("slots", 0),
        ("log_file_path", 3),
        ("signals", "SIGTERM"),
        ("signals", ("SIGKILL",)),
        ("signals", ("TERM",)),
        ("signals", (15,)),
        ("on_failure", "ignore"),
        ("max_failures", 0),
        ("back_pressure", "drop"),
        ("back_pressure", []),
        ("peer_timeout", 0),
        ("peer_timeout", float("inf")),
        ("peer_timeout", float("nan")),
        ("commit_timeout", -1.0),
        ("close_timeout", None),
        ("signal_deadline", True),
        ("lease_interval", 30.0),
        ("optimizer_factor", 0.5),
        ("min_free_bytes", -1),
        ("direct_io", "maybe"),
        ("audit", {}),
    ],
)
def test_a_wrong_value_names_the_field(field, value):
    with pytest.raises(ConfigError, match=field):
        CheckpointConfig(**{field: value})
    if field != "audit" and value != "1":
        with pytest.raises(ConfigError, match=field):
            resolve({field: value}, None, {})


def test_values_are_normalised(tmp_path):
    config = CheckpointConfig(
        signals=[signal.SIGUSR1, "SIGTERM", "SIGUSR1"], peer_timeout=5, log_file_path=tmp_path / "a"
    )
    assert config.signals == ("SIGUSR1", "SIGTERM")
    assert type(config.peer_timeout) is float
    assert config.log_file_path == str(tmp_path / "a")


def test_precedence(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("slots: 5\nmax_ckpt_num: 7\nsave_storage_interval: 50\nsave_mem_interval: 10\n")
    environ = {
        "EASYCKPT_CONFIG": str(file),
        "EASYCKPT_SLOTS": "6",
        "EASYCKPT_MAX_CKPT_NUM": "8",
        "EASYCKPT_SAVE_MEM_INTERVAL": "20",
        "EASYCKPT_AUDIT": json.dumps({"save_mem_interval": 2, "stop_step": 9, "root": "/r", "left_out": ["model"]}),
    }
    config = resolve({"slots": 9, "save_mem_interval": 40}, None, environ)
    assert config.slots == 9  # argument over environment over YAML
    assert config.max_ckpt_num == 8  # environment over YAML
    assert config.save_storage_interval == 50  # YAML over default
    assert config.overlap is True  # not given: default
    assert config.save_mem_interval == 2  # audit over all
    assert config.audit == Audit(root="/r", stop_step=9, left_out=("model",))
    other = tmp_path / "d.yaml"
    other.write_text("")
    assert resolve({}, other, environ).save_storage_interval == 100  # config= instead of EASYCKPT_CONFIG
    assert resolve({}, {"save_storage_interval": 3}, environ).save_storage_interval == 3
    assert resolve({"max_ckpt_num": None}, None, environ).max_ckpt_num is None  # None is a value, not "not given"


def test_text_is_read_by_the_type_of_the_field():
    environ = {
        "EASYCKPT_MAX_CKPT_NUM": "none",
        "EASYCKPT_OVERLAP": "off",
        "EASYCKPT_DIRECT_IO": "TRUE",
        "EASYCKPT_SIGNALS": "SIGTERM, SIGUSR1",
        "EASYCKPT_PEER_TIMEOUT": "1e2",
        "EASYCKPT_OPTIMIZER_FACTOR": "3",
        "EASYCKPT_ON_FAILURE": "continue",
        "EASYCKPT_MEMORY_DIR": "/dev/shm/x",
    }
    config = resolve({}, None, environ)
    assert (config.max_ckpt_num, config.overlap, config.direct_io) == (None, False, True)
    assert config.signals == ("SIGTERM", "SIGUSR1")
    assert (config.peer_timeout, config.optimizer_factor, config.on_failure) == (100.0, 3.0, "continue")
    assert config.memory_dir == "/dev/shm/x"
    assert resolve({}, None, {"EASYCKPT_SIGNALS": ""}).signals == ()
    assert resolve({}, None, {"EASYCKPT_DIRECT_IO": "auto"}).direct_io is None


def test_errors_name_field_and_source(tmp_path):
    with pytest.raises(ConfigError, match=r"slots.*EASYCKPT_SLOTS"):
        resolve({}, None, {"EASYCKPT_SLOTS": "many"})
    file = tmp_path / "c.yaml"
    file.write_text("slot: 4")
    with pytest.raises(ConfigError, match=r"c\.yaml.*'slot'.*mean 'slots'"):
        resolve({}, file, {})
    file.write_text("slots: [1, 2]")
    with pytest.raises(ConfigError, match=r"slots.*c\.yaml"):
        resolve({}, file, {})
    for text in ("- a", "a: [", "\x00"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="config"):
            resolve({}, file, {})
    with pytest.raises(ConfigError, match="absent"):
        resolve({}, tmp_path / "absent", {})
    with pytest.raises(ConfigError, match="audit"):
        resolve({"audit": Audit()}, None, {})
    for text in ("{", "[]", '{"slotz": 1}', '{"stop_step": -1}', '{"left_out": "model"}', '{"root": 3}'):
        with pytest.raises(ConfigError):
            resolve({}, None, {"EASYCKPT_AUDIT": text})


@pytest.mark.parametrize("value", [0, "x"], ids=["out of range", "wrong type"])
def test_errors_of_range_and_type_name_the_source(tmp_path, value):
    file = tmp_path / "c.yaml"
    file.write_text(f"slots: {value}")
    with pytest.raises(ConfigError, match=r"slots must be .* \(from config file .*c\.yaml\)"):
        resolve({}, file, {})
    with pytest.raises(ConfigError, match=r"slots must be .* \(from config\)"):
        resolve({}, {"slots": value}, {})
    with pytest.raises(ConfigError, match=r"slots must be .* \(from environment variable EASYCKPT_SLOTS\)"):
        resolve({}, None, {"EASYCKPT_SLOTS": str(value)})
    with pytest.raises(ConfigError, match=r"slots must be .* \(from an argument\)"):
        resolve({"slots": value}, None, {})


def test_settings_that_do_not_go_together_name_both_sources():
    environ = {"EASYCKPT_LEASE_TIMEOUT": "10", "EASYCKPT_SLOTS": "3"}
    with pytest.raises(ConfigError) as caught:
        resolve({"lease_interval": 5}, None, environ)
    assert str(caught.value).endswith(
        "(lease_timeout from environment variable EASYCKPT_LEASE_TIMEOUT, lease_interval from an argument)"
    )


def test_os_environ_is_the_default(monkeypatch):
    monkeypatch.setenv("EASYCKPT_SLOTS", "7")
    assert resolve({}).slots == 7


def test_a_misspelled_variable_is_named(caplog):
    resolve({}, None, {"EASYCKPT_SAVE_INTERVAL": "7", "EASYCKPT_FAILPOINTS": "", "EASYCKPT_SLOTS": "3", "OTHER": "1"})
    assert [record.getMessage() for record in caplog.records] == [
        "environment variable EASYCKPT_SAVE_INTERVAL is no setting and changes nothing; did you mean "
        "EASYCKPT_SAVE_MEM_INTERVAL?"
    ]


def test_a_metric_of_which_none_is_kept_is_refused():
    with pytest.raises(ConfigError, match=r"keep_best must be 0 without best_metric \(.*give it too\), not 3"):
        CheckpointConfig(keep_best=3)
    with pytest.raises(ConfigError, match="keep_best must be at least 1 with best_metric='loss', not 0"):
        CheckpointConfig(best_metric="loss")
    environ = {"EASYCKPT_KEEP_BEST": "3", "EASYCKPT_BEST_METRIC": "val/loss", "EASYCKPT_BEST_MODE": "max"}
    config = resolve({"keep_every": 100}, None, environ)
    assert (config.keep_every, config.keep_best, config.best_metric, config.best_mode) == (100, 3, "val/loss", "max")
