"""Which versions can be wrapped. It imports no name that an old one may lack: it is asked before all else."""

from __future__ import annotations

import accelerate
import transformers
from packaging.version import Version

from easyckpt.errors import ConfigError

OLDEST, TESTED = Version("4.46"), (Version("4.57.6"), Version("5.24.0"))
OLDEST_ACCELERATE = Version("1.0")


def check() -> None:
    """Raise ConfigError where the versions that are installed cannot be wrapped."""
    here, accelerates = Version(transformers.__version__), Version(accelerate.__version__)
    if here.release < OLDEST.release:
        raise ConfigError(
            f"transformers {here} is installed; easyckpt wraps the Trainer of {OLDEST} and newer: upgrade transformers"
        )
    if accelerates.release < OLDEST_ACCELERATE.release:
        raise ConfigError(
            f"accelerate {accelerates} is installed; easyckpt needs {OLDEST_ACCELERATE} or newer: upgrade it"
        )
    if here.major > max(TESTED).major:
        raise ConfigError(
            f"transformers {here} is installed; this version of easyckpt knows those up to {max(TESTED).major}.x: "
            "upgrade easyckpt"
        )
