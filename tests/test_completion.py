"""Completion: the scripts work in the shells that they are for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import run  # noqa: F401 - a fixture


@pytest.fixture
def program(tmp_path) -> Path:
    """A directory for PATH with `easyckpt` in it, whatever is installed here."""
    path = tmp_path / "bin"
    path.mkdir()
    script = path / "easyckpt"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m easyckpt "$@"\n')
    script.chmod(0o755)
    return path


def complete(program: Path, script: Path, *words: str) -> list[str]:
    """What a real bash offers for the last one of `words`."""
    ask = f"""
        PATH="{program}:$PATH"
        source "{script}"
        complete -p easyckpt > /dev/null || exit 9
        COMP_WORDS=(easyckpt {" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words)}
        _easyckpt_completion easyckpt
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "--norc", "-c", ask], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_options(program, tmp_path, run):
    ran = run("completion", "bash")
    assert ran.code == 0
    script = tmp_path / "completion.bash"
    script.write_text(ran.out)
    assert {"ls", "show", "verify", "doctor", "watch", "completion"} <= set(complete(program, script, ""))
    assert complete(program, script, "do") == ["doctor"]
    assert {"--clean", "--all", "--json"} <= set(complete(program, script, "doctor", "--"))
    assert complete(program, script, "completion", "f") == ["fish"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_it_can_parse(run, tmp_path, shell):
    ran = run("completion", shell, "--json")
    assert ran.code == 0
    assert "_EASYCKPT_COMPLETE=complete_" + shell in ran.document["script"]
    if shutil.which(shell) is not None:
        script = tmp_path / "script"
        script.write_text(run("completion", shell).out)
        subprocess.run([shell, "-n", str(script)], check=True)


def test_another_shell_is_bad_input(run):
    assert run("completion", "tcsh").code == 2
