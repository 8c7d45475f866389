"""The last results of the long campaigns, kept with seed and date."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parents[1] / "campaigns" / "results"


def record(name: str, *, seed: int, **figures: Any) -> None:
    """Write the result of a campaign that has passed in full."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    document = {"campaign": name, "seed": seed, "date": time.strftime("%Y-%m-%d"), **versions, **figures}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
