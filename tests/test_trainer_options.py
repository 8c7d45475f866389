"""What a wrapped Trainer takes beside the Trainer's own arguments, wherever it is set."""

from __future__ import annotations

import pytest

from easyckpt import ConfigError
from easyckpt.integrations.transformers.options import Options


@pytest.mark.parametrize("where", ["argument", "mapping", "file", "environment"])
def test_back_pressure_counts_wherever_it_is_set(where, tmp_path, monkeypatch):
    given = {}
    if where == "argument":
        given["back_pressure"] = "skip"
    elif where == "mapping":
        given["config"] = {"back_pressure": "skip"}
    elif where == "file":
        (tmp_path / "run.yaml").write_text("back_pressure: skip\n")
        given["config"] = str(tmp_path / "run.yaml")
    else:
        monkeypatch.setenv("EASYCKPT_BACK_PRESSURE", "skip")
    assert Options.of({}).back_pressure == ("skip" if where == "environment" else "wait")
    assert Options.of(given).back_pressure == "skip"
    assert Options.of({"back_pressure": "wait", "config": given.get("config")}).back_pressure == "wait"


def test_a_wrong_option_is_named():
    for name in ("on_save", "back_pressure"):
        with pytest.raises(ConfigError, match=name):
            Options.of({name: "perhaps"})
