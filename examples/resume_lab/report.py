"""``report.md`` in three languages. The texts are Markdown files beside this one; this fills the numbers in."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path

LANGUAGES = ("en", "ja", "ko")
TEXTS = Path(__file__).resolve().parent / "texts"
YES_NO = {"en": ("yes", "no"), "ja": ("はい", "いいえ"), "ko": ("예", "아니요")}


def render(language: str, numbers: Mapping[str, bool | float | None]) -> str:
    """The report in `language`. Every place in the text needs its number, or this raises KeyError."""
    text = (TEXTS / f"{language}.md").read_text("utf-8")
    return string.Template(text).substitute({name: shown(language, value) for name, value in numbers.items()})


def shown(language: str, value: bool | float | None) -> str:
    """Counts in full, measured values with three digits, and 0 only for what is exactly 0."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        yes, no = YES_NO[language]
        return yes if value else no
    if isinstance(value, int) or value == 0:
        return str(int(value))
    return str(float(f"{value:.3g}"))
