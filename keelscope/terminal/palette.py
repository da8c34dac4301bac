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
    """A view whose text any stream can take.

    Lines end without spaces; on a stream that is not UTF-8, frames, blocks and dashes become ASCII.
    """

    view: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        unicode = options.copy()
        unicode.encoding = "utf-8"
        for line in Segment.split_lines(console.render(self.view, unicode)):
            for segment in _without_end(line):
                text = segment.text
                if options.ascii_only:
                    text = text.translate(_ASCII).encode("ascii", "replace").decode()
                yield Segment(text, segment.style, segment.control)
            yield Segment.line()


def _without_end(line: list[Segment]) -> list[Segment]:
    """A line without the spaces at its end."""
    kept = list(line)
    while kept and not kept[-1].text.strip(" "):
        kept.pop()
    if kept:
        last = kept[-1]
        kept[-1] = Segment(last.text.rstrip(" "), last.style, last.control)
    return kept


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
