"""Checked access to the fields of a JSON object that came from a file."""

from __future__ import annotations

import math
import re
from typing import NoReturn

from easyckpt.errors import DamagedCheckpoint
from easyckpt.format.canonical import Json

#: The largest number that the format holds as a count, an offset or a size.
MAX_NUMBER = 2**63 - 1

TOKEN = re.compile(r"[0-9A-Za-z_-]{1,64}")
HEX_32 = re.compile(r"[0-9a-f]{32}")


class Fields:
    """One JSON object; each getter returns a value of the promised type or raises DamagedCheckpoint."""

    __slots__ = ("_table", "_where")

    def __init__(self, value: Json, where: str) -> None:
        self._where = where
        if not isinstance(value, dict):
            raise DamagedCheckpoint(f"{where} is not a JSON object")
        self._table = value

    def damaged(self, name: str, expected: str) -> NoReturn:
        """Raise the error that says that field `name` is not what was expected."""
        raise DamagedCheckpoint(f"{self._where}: field {name!r} is not {expected}")

    def raw(self, name: str) -> Json:
        """Any value, which must be present."""
        if name not in self._table:
            raise DamagedCheckpoint(f"{self._where}: field {name!r} is missing")
        return self._table[name]

    def number(self, name: str, low: int = 0, high: int = MAX_NUMBER) -> int:
        """An integer (not a bool) in [low, high]."""
        value = self.raw(name)
        if type(value) is not int or not low <= value <= high:
            self.damaged(name, f"a whole number from {low} to {high}")
        return value

    def real(self, name: str) -> float:
        """A finite number."""
        value = self.raw(name)
        if type(value) is int and abs(value) <= MAX_NUMBER:
            return float(value)
        if type(value) is not float or not math.isfinite(value):
            self.damaged(name, "a finite number")
        return value

    def flag(self, name: str) -> bool:
        """True or False."""
        value = self.raw(name)
        if type(value) is not bool:
            self.damaged(name, "true or false")
        return value

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """A string; all of it matches `pattern` if one is given."""
        value = self.raw(name)
        if type(value) is not str or (pattern is not None and pattern.fullmatch(value) is None):
            self.damaged(name, "a string" if pattern is None else f"a string like {pattern.pattern}")
        return value

    def optional_text(self, name: str, pattern: re.Pattern[str] | None = None) -> str | None:
        """A string as :meth:`text` has it, or None."""
        return None if self.raw(name) is None else self.text(name, pattern)

    def items(self, name: str) -> list[Json]:
        """A list."""
        value = self.raw(name)
        if type(value) is not list:
            self.damaged(name, "a list")
        return value

    def texts(self, name: str, pattern: re.Pattern[str] | None = None) -> tuple[str, ...]:
        """A list of strings."""
        values = []
        for value in self.items(name):
            if type(value) is not str or (pattern is not None and pattern.fullmatch(value) is None):
                self.damaged(name, "a list of strings" + ("" if pattern is None else f" like {pattern.pattern}"))
            values.append(value)
        return tuple(values)

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, none below 0."""
        values = []
        for value in self.items(name):
            if type(value) is not int or not 0 <= value <= MAX_NUMBER:
                self.damaged(name, "a list of whole numbers")
            values.append(value)
        return tuple(values)

    def table(self, name: str) -> dict[str, Json]:
        """A JSON object."""
        value = self.raw(name)
        if type(value) is not dict:
            self.damaged(name, "a JSON object")
        return value
