"""The audit's picture: the metrics of all runs, and how far their states are apart."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from easyckpt.cli.audit.findings import Findings

ADVICE = "no picture without matplotlib: pip install 'easyckpt[plots]'"


def picture(straight: Mapping[int, Mapping[str, Any]], others: list[Findings], metric: str | None) -> bytes | None:
    """A PNG; None where matplotlib is not installed. `straight` are the metrics of the straight run."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    if metric is not None:
        curves.plot(*_series(straight, metric), color="black", linewidth=3, alpha=0.3, label="straight")
        for found in others:
            curves.plot(*_series(found.series, metric), linewidth=1, label=found.name)
    curves.set(xlabel="step", title="What was logged")
    curves.set_ylabel(metric or "").set_parse_math(False)  # a name is no formula
    for found in others:
        steps = found.steps
        values = [max((part.growth.get(step, 0.0) for part in found.parts.values()), default=0.0) for step in steps]
        differences.plot(steps, values, marker=".", linewidth=1, label=found.name)
    differences.set_yscale("symlog", linthresh=1e-12)
    differences.set(xlabel="step", ylabel="largest absolute difference", title="Away from the straight run")
    for text in differences.legend(fontsize="small").get_texts():
        text.set_parse_math(False)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names of components may be too long for the layout, or lack a glyph
        figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def main_metric(straight: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The metric that is drawn: one that is called a loss, else the first."""
    names = list(dict.fromkeys(name for values in straight.values() for name in values))
    return next((name for name in names if "loss" in name.lower()), names[0] if names else None)


def _series(metrics: Mapping[int, Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    largest = sys.float_info.max
    points = [
        (step, float(v[name]))
        for step, v in sorted(metrics.items())
        if isinstance(v.get(name), (int, float)) and not abs(v[name]) > largest
    ]
    return [step for step, _ in points], [value for _, value in points]
