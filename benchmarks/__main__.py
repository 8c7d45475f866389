"""``python -m benchmarks [NAME ...]``: run all benchmarks, or those named."""

from __future__ import annotations

import importlib
import sys

ALL = ("training", "flush_and_restore", "many_tensors", "host_memory")


def main() -> None:
    for name in sys.argv[1:] or ALL:
        print(f"== {name}", flush=True)
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
