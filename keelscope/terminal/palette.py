"""Colours and table frame that the terminal views share. A meaning is always a word as well; colour only repeats it."""

from __future__ import annotations

from rich import box
from rich.table import Table

__all__ = ["BAR", "SEVERITY_STYLE", "WORD_STYLE", "frame"]

WORD_STYLE = {
    "flat": "green",
    "drifting": "yellow",
    "vanishing": "red",
    "exploding": "red",
    "dead": "red",
    "non-finite": "red",
    "not enough data": "dim",
}
"""Style by headline."""
SEVERITY_STYLE = ("dim", "yellow", "red")
"""Style by `Severity` value."""
BAR = 10
"""Characters of a full bar."""


def frame() -> Table:
    """An empty table with a rule under its head and nothing else."""
    return Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
