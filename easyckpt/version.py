"""The version of the package, in one place; setup.py reads this file without importing it."""

from __future__ import annotations

VERSION = "0.1.0"
