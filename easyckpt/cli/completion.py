"""``easyckpt completion``: the script that lets a shell complete commands and options."""

from __future__ import annotations

import enum
from typing import Annotated

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined] # re-exported

from easyckpt.cli import output
from easyckpt.cli.output import Answer, AsJson

_PROGRAM = "easyckpt"
#: Asks the program for completions.
VARIABLE = "_EASYCKPT_COMPLETE"


class Shell(str, enum.Enum):
    """Shells that there is a script for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def register(app: typer.Typer) -> None:
    """Add this family's command to `app`, and have `app` answer the script's questions."""
    completion_init()
    app.command("completion")(output.command(completion))


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell that the script is for.", show_default=False)],
    as_json: AsJson = False,
) -> Answer:
    """Print the script that completes easyckpt's commands and options in a shell.

    bash: put it into ~/.local/share/bash-completion/completions/easyckpt; zsh: into a file _easyckpt in a directory
    of $fpath; fish: into ~/.config/fish/completions/easyckpt.fish.

    Exit codes: 0 printed; 2 bad input.

    Example: easyckpt completion bash > ~/.local/share/bash-completion/completions/easyckpt
    """
    script = get_completion_script(prog_name=_PROGRAM, complete_var=VARIABLE, shell=shell.value)
    return Answer({"shell": shell.value, "script": script}, script.splitlines())
