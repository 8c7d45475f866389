"""The trainings that have to be exact: one function each, which says what it proves.

The table can be read without transformers; the functions are called where there is one.
"""

from tests.trainers.scenarios import (
    drawn,
    ends,
    evaluating,
    order,
    ranks,
    settings,
    streams,
    subclasses,
    trl,
    updates,
)
from tests.trainers.scenarios.table import BATCH, LONG, SAVE, STEPS, Scenario, Setup, those_of

__all__ = ["BATCH", "LONG", "SAVE", "STEPS", "TABLE", "Scenario", "Setup"]

TABLE = those_of((order, ends, drawn, streams, updates, evaluating, ranks, settings, subclasses, trl))
