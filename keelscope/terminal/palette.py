"""What the terminal views share: colours, table frame, and what becomes of signs that a stream cannot encode.

A meaning is always a word as well; colour only repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from keelscope.formatting import NOT_OBSERVED

__all__ = ["BAR", "SEVERITY_STYLE", "WORD_STYLE", "Encodable", "frame"]

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


@dataclass(frozen=True, slots=True)
class Encodable:
    """A view whose text any stream can take: on one that is not UTF-8, frames, blocks and dashes become ASCII."""

    view: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        if not options.ascii_only:
            yield from console.render(self.view, options)
            return
        unicode = options.copy()
        unicode.encoding = "utf-8"
        for segment in console.render(self.view, unicode):
            text = segment.text.translate(_ASCII).encode("ascii", "replace").decode()
            yield Segment(text, segment.style, segment.control)


_ASCII = str.maketrans(
    {
        **dict.fromkeys("╭╮╰╯└", "+"),
        **dict.fromkeys("│┤", "|"),
        **dict(zip("▁▂▃▄▅▆▇█", ".:-=+*%#", strict=True)),
        **dict.fromkeys("▏▎▍", "."),
        **dict.fromkeys("▌▋▊▉", "#"),
        "·": " ",
        "─": "-",
        NOT_OBSERVED: "-",
        "…": ".",
    }
)
