"""What every benchmark shares: the machine's description, results as JSON, tables for the README."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE / "README.md"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def median(values: Iterable[float]) -> float:
    """The median."""
    return statistics.median(values)


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that `part` (0 to 1) of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def timed(action: Callable[[], Any]) -> float:
    """Seconds that `action` takes."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def child(module: str, *arguments: str, threads: int | None = None) -> dict[str, Any]:
    """Run ``python -m module arguments`` in a fresh process; its last line of output is JSON."""
    environment = dict(os.environ)
    environment.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{module} {arguments} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def write(
    name: str, question: str, result: dict[str, Any], header: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Keep `result` as JSON, and put the table into the README."""
    RESULTS.mkdir(exist_ok=True)
    document = {"question": question, "machine": machine(), **result}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(row)} |" for row in rows)]
    about = document["machine"]
    place = f"{about['cpu']}, {about['cores']} cores, {about['memory_gb']} GB; torch {about['torch']}; {about['date']}"
    _replace_section(
        name, f"{question}\n\n" + "\n".join(lines) + f"\n\n{place}; load before the run {about['load_before']}.\n"
    )
    print("\n".join(lines))


def _replace_section(name: str, body: str) -> None:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = README.read_text() if README.exists() else "# Benchmarks\n"
    section = f"{begin}\n{body}{end}"
    if begin in text:
        head, _, rest = text.partition(begin)
        text = head + section + rest.partition(end)[2]
    else:
        text += f"\n## {name.replace('_', ' ').capitalize()}\n\n{section}\n"
    README.write_text(text)


def milliseconds(seconds: float) -> str:
    """For tables."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
