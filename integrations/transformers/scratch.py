"""Directories of this process alone, for files that the Trainer wants to see and nobody keeps."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile


def make(what: str) -> str:
    """A new, private, empty directory."""
    return tempfile.mkdtemp(prefix=f"easyckpt_{what}_")


def make_at(directory: str) -> None:
    """A directory for what the program itself writes."""
    os.makedirs(directory)


def write(directory: str, name: str, content: bytes) -> None:
    """Put a file into it."""
    with open(os.path.join(directory, name), "wb") as file:
        file.write(content)


def read_all(directory: str) -> dict[str, bytes]:
    """Every file in it, by its path there."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in sorted(names):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, directory)] = file.read()
    return found


def remove_empty(directory: str) -> None:
    """Remove it if there is nothing in it."""
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def remove(directory: str) -> None:
    """Remove it with all that is in it."""
    shutil.rmtree(directory, ignore_errors=True)
