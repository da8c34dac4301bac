"""What a page is made of: charts, heatmaps, tables, facts, verdicts, findings and notices, as plain frozen records.

A page function returns blocks; `encoded` turns them into one binary answer and `assets/blocks.js` draws them. Texts are
always text: nothing is parsed as HTML.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "Axis",
    "Block",
    "Chart",
    "Clock",
    "Dash",
    "Facts",
    "Finding",
    "Findings",
    "Heading",
    "Heat",
    "Level",
    "Line",
    "Notice",
    "Place",
    "Span",
    "Table",
    "Verdict",
    "Verdicts",
    "encoded",
]

Dash = Literal["solid", "dashed", "dotted"]
Size = Literal["small", "third", "medium", "wide", "large"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a click leads: a run, and there a layer or a step."""

    run: str
    site: str = ""
    step: int = -1
    depth: int = -1
    page: str = ""
    """Page to go to; the one that is open if empty."""


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One line of a chart. NaN breaks it, ``-inf`` (an exact 0) and ``inf`` are marked at the edge of the chart."""

    label: str
    slot: int
    """Colour and marker, as in `RunState.slot`."""
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    """log10 of the values where the axis is logarithmic."""
    low: NDArray[np.float64] | None = None
    """Lower edge of a band around the line."""
    high: NDArray[np.float64] | None = None
    bad: NDArray[np.float64] | None = None
    """Where on ``x`` the value was a NaN; everywhere else a gap was not observed."""
    dash: Dash = "solid"
    faint: bool = False
    run: str = ""
    """Id of the run it belongs to, drawn on top when that run is in focus."""


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """How the steps of the focused run lie on an axis that does not count steps."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a chart."""

    title: str = ""
    kind: Literal["value", "step", "depth", "relative"] = "value"
    """What a click on it moves, if anything."""
    log: bool = False
    """Whether coordinates are log10 of what the ticks say."""
    span: float = 0.0
    """Smallest extent, so that flat looks flat."""
    length: float = 0.0
    """Depth at 1 on a relative axis."""
    clock: Clock | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A shaded stretch of the horizontal axis."""

    start: float
    end: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line of reference."""

    value: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over steps or over depth."""

    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    note: str = ""
    doc: str = ""
    spans: tuple[Span, ...] = ()
    levels: tuple[Level, ...] = ()
    size: Size = "medium"
    kind: str = field(default="chart", init=False)


@dataclass(frozen=True, slots=True)
class Heat:
    """A series as layer x step; the browser fetches its tile by itself."""

    title: str
    run: str
    series: str
    """``group/statistic``."""
    scale: Literal["decades", "linear"] = "decades"
    reference: str = "none"
    diverging: bool = True
    """Colours about the reference (about 0 on a linear scale), or one ramp over the range of the values."""
    limit: float = 16.0
    """Decades at the ends of the diverging colours."""
    part: str = ""
    """As in `Panel.part`."""
    doc: str = ""
    size: Size = "large"
    kind: str = field(default="heat", init=False)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    numeric: tuple[int, ...] = ()
    """Columns that hold numbers."""
    places: tuple[Place | None, ...] = ()
    """Where a click on each row leads; empty if nowhere."""
    size: Size = "wide"
    kind: str = field(default="table", init=False)


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values."""

    title: str
    pairs: tuple[tuple[str, str], ...]
    size: Size = "medium"
    kind: str = field(default="facts", init=False)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The headline of one run."""

    run: str
    name: str
    slot: int
    pill: tuple[str, str, str]
    """Headline as text, tone and icon."""
    sentence: str
    figures: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Headlines side by side."""

    items: tuple[Verdict, ...]
    size: Size = "wide"
    kind: str = field(default="verdicts", init=False)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing a rule has to say, with all its evidence."""

    rule: str
    severity: str
    name: str
    slot: int
    statement: str
    remedy: str
    evidence: tuple[tuple[str, str], ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings, the gravest first."""

    title: str
    items: tuple[Finding, ...]
    note: str = ""
    size: Size = "wide"
    kind: str = field(default="findings", init=False)


@dataclass(frozen=True, slots=True)
class Heading:
    """The title of what follows."""

    title: str
    note: str = ""
    size: Size = "wide"
    kind: str = field(default="heading", init=False)


@dataclass(frozen=True, slots=True)
class Notice:
    """Why something is not here, and how to get it."""

    title: str
    sentence: str
    code: str = ""
    pending: bool = False
    """Whether more comes when the page is asked for again."""
    size: Size = "wide"
    kind: str = field(default="notice", init=False)


Block = Chart | Heat | Table | Facts | Verdicts | Findings | Heading | Notice


def encoded(blocks: Sequence[Block]) -> tuple[list[Any], dict[str, NDArray[Any]]]:
    """Blocks as JSON values and arrays.

    Args:
        blocks: of one page.

    Returns:
        The blocks with ``{"$": name}`` in the place of arrays, and the arrays by name.

    Example:
        >>> blocks, arrays = encoded([Chart("a", Axis(), Axis(), (Line("b", 0, np.zeros(2), np.ones(2)),))])
        >>> blocks[0]["lines"][0]["y"], {name: array.tolist() for name, array in arrays.items()}
        ({'$': 'a1'}, {'a0': [0.0, 0.0], 'a1': [1.0, 1.0]})
    """
    arrays: dict[str, NDArray[Any]] = {}
    return [_plain(block, arrays) for block in blocks], arrays


def _plain(value: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    if isinstance(value, np.ndarray):
        name = f"a{len(arrays)}"
        arrays[name] = value.astype(np.float64)
        return {"$": name}
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name), arrays) for one in fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(one, arrays) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
