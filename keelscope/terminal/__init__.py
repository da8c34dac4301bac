"""Reports and comparisons in the terminal, drawn with rich.

`layered` draws one report, `side_by_side` several, `sparkline` the profiles in them. Without colour, in a pipe or on
80 columns everything stays readable.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from typing import Protocol

from rich.console import Console, RenderableType

from keelscope.terminal.layered import report_view
from keelscope.terminal.side_by_side import comparison_view

NARROWEST, USUAL = 40, 100

__all__ = ["Viewable", "as_text", "comparison_view", "render", "report_view", "terminal_width"]


class Viewable(Protocol):
    """What can be drawn: a report or a comparison."""

    def view(self, console: Console, *, unfold: bool = False) -> RenderableType:
        """Something rich can print on that console."""


def render(report: Viewable, console: Console | None = None, *, unfold: bool = False) -> None:
    """Print a report or a comparison.

    Args:
        report: what to print.
        console: where to; standard output by default.
        unfold: show every layer of long stacks.
    """
    target = console or Console()
    target.print(report.view(target, unfold=unfold))


def as_text(view: Callable[[Console], RenderableType], *, width: int) -> str:
    """A view as plain text.

    Args:
        view: makes the renderable for a console.
        width: characters per line.

    Returns:
        Lines without trailing spaces, no colour codes.
    """
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False, emoji=False)
    console.print(view(console))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def terminal_width() -> int:
    """Characters per line where ``print`` writes to: ``COLUMNS``, else the terminal's width, else 100.

    Returns:
        At least 40.
    """
    return max(NARROWEST, shutil.get_terminal_size((USUAL, 24)).columns)
