"""Byte counts in the words of people."""

from __future__ import annotations


def size_text(nbytes: int) -> str:
    """`nbytes` in the binary unit that fits."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} PiB"
