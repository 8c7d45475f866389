"""The plots of `benchmarks/compare.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OURS, OTHERS = "#d1495b", "#5b7c99"


def draw(summaries: dict[str, dict[str, Any]], folder: Path) -> None:
    """``compare_training.png``: what training pays. ``compare_storage.png``: durable, load, memory."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    others = {name: one for name, one in summaries.items() if name != "none"}

    def bars(axes: Any, title: str, values: dict[str, float], *, log: bool = False, base: float = 0.0) -> None:
        names = list(values)[::-1]  # barh begins at the bottom
        colours = [OURS if name == "easyckpt" else OTHERS for name in names]
        drawn = axes.barh(names, [values[name] - base for name in names], left=base, color=colours)
        axes.bar_label(drawn, labels=[f"{values[name]:.3g}" for name in names], padding=3, fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.15)
        if log:
            axes.set_xscale("log")
            axes.set_xlim(left=0.1)  # ms; a later beginning would make small differences look large
        axes.spines[["top", "right"]].set_visible(False)

    def page(name: str, *panels: tuple[Any, ...]) -> None:
        figure, places = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), sharey=True)
        for axes, (title, values, options) in zip(places, panels, strict=True):
            bars(axes, title, values, **options)
        for axes in places:
            axes.tick_params(labelsize=8)
        figure.tight_layout()
        figure.savefig(folder / name, dpi=110)
        pyplot.close(figure)

    def each(key: str, unit: float, source: dict[str, dict[str, Any]] = others) -> dict[str, float]:
        return {name: one[key] * unit for name, one in source.items()}

    page(
        "compare_training.png",
        ("blocked a save, median (ms, logarithmic)", each("blocked", 1e3), {"log": True}),
        ("blocked, p99 (ms, logarithmic)", each("blocked_p99", 1e3), {"log": True}),
        ("training time against none", each("against_none", 1.0), {"base": 1.0}),
    )
    page(
        "compare_storage.png",
        ("until durable (s)", each("durable", 1.0), {}),
        ("load (s)", each("load", 1.0), {}),
        ("peak memory (GB)", each("peak_bytes", 1e-9), {}),
    )
