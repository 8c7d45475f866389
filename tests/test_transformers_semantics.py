"""What a wrapped Trainer's arguments, files and callbacks mean, on each supported major version of transformers."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.trainers.launch import REPOSITORY, VERSIONS, quiet


#: Damage in each kind of file is the same with both versions: CI looks at it with the newer one.
DAMAGE = "damage_in_any_file"


@pytest.mark.parametrize(("version", "chosen"), [("4", f"not {DAMAGE}"), ("5", f"not {DAMAGE}"), ("5", DAMAGE)])
def test_semantics(version, chosen):
    python = REPOSITORY / f".venv-transformers{version}" / "bin" / "python"
    ran = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, "tests/trainers/semantics.py"],
        cwd=REPOSITORY,
        env={**os.environ, **quiet(), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
