"""``python -m benchmarks [NAME ...]``: run all benchmarks, or those named."""

from __future__ import annotations

import argparse
import importlib

ALL = ("training", "flush_and_restore", "many_tensors", "host_memory")
APART = ("compare", "hf_trainer")  # they need other libraries


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run all benchmarks, or those named.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(ALL)} (all), or {' or '.join(APART)}")
    names, _ = parser.parse_known_args()
    if unknown := set(names.names) - {*ALL, *APART}:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join((*ALL, *APART))}")
    for name in names.names or ALL:
        print(f"== {name}", flush=True)
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
