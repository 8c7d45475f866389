"""The last results of the long campaigns, kept with seed, date and seconds.

A campaign consists of tests, which may run in several processes and in any order. Each of them hands over its figures;
the process that reports adds them up, and writes the result when all tests of the campaign have passed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[1] / "campaigns" / "results"
PROPERTY = "campaign"


@pytest.fixture
def campaign_part(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Call it with the campaign's name, seed and number of tests, and the figures of this one."""

    def hand_over(name: str, *, seed: int | None, tests: int, **figures: Any) -> None:
        record_property(PROPERTY, {"campaign": name, "seed": seed, "tests": tests, "figures": figures})

    return hand_over


class Results:
    """Plugin of the process that reports: adds up, and writes what is complete."""

    def __init__(self, directory: Path = RESULTS) -> None:
        self._directory = directory
        self._documents: dict[str, dict[str, Any]] = {}
        self._passed: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Numbers and lists of all parts are added up; what is a text has to be the same in all."""
        if report.when != "call" or not report.passed or "PYTEST_XDIST_WORKER" in os.environ:
            return
        for part in [value for key, value in report.user_properties if key == PROPERTY]:
            self._add(part, report.duration)

    def _add(self, part: Any, seconds: float) -> None:
        name = part["campaign"]
        document = self._documents.setdefault(name, {key: part[key] for key in ("campaign", "seed", "tests")})
        figures = part["figures"] | {"seconds": seconds}
        for key, value in figures.items():
            document[key] = document[key] + value if key in document and not isinstance(value, str) else value
        self._passed[name] = self._passed.get(name, 0) + 1

    def pytest_sessionfinish(self) -> None:
        """Write the results of the campaigns of which every test has passed."""
        versions = {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
        for name, document in self._documents.items():
            if self._passed[name] == document["tests"]:
                document["seconds"] = round(document["seconds"])
                complete = {"date": time.strftime("%Y-%m-%d", time.gmtime()), **versions, **document}
                self._directory.mkdir(parents=True, exist_ok=True)
                (self._directory / f"{name}.json").write_text(json.dumps(complete, indent=1) + "\n")
