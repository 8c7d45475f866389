"""Directories of this process alone, for files that the Trainer wants to see and nobody keeps."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable


def make(what: str) -> str:
    """A new, private, empty directory."""
    return tempfile.mkdtemp(prefix=f"easyckpt_{what}_")


def write(directory: str, name: str, content: bytes) -> None:
    """Put a file into it, and make it where it was removed."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with open(os.path.join(directory, name), "wb") as file:
        file.write(content)


def names_in(directory: str) -> list[str]:
    """The path there of every file in it."""
    found = [os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names]
    return sorted(os.path.relpath(path, directory) for path in found)


def read_all(directory: str, names: Iterable[str] | None = None) -> dict[str, bytes]:
    """Every file in it, or those that are named, by its path there."""
    found = {}
    for name in names_in(directory) if names is None else sorted(names):
        with open(os.path.join(directory, name), "rb") as file:
            found[name] = file.read()
    return found


def remove(directory: str) -> None:
    """Remove it with all that is in it."""
    shutil.rmtree(directory, ignore_errors=True)
