"""Training curves: every scalar of every run over steps, tokens or wall time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from keelscope_dashboards.asking import Ask, Choice, Option, Page, nothing_chosen
from keelscope_dashboards.blocks import Axis, Chart, Clock, Line
from keelscope_dashboards.rows import has, log_fits, scalar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from keelscope_dashboards.asking import Shown
    from keelscope_dashboards.blocks import Block

__all__ = ["PAGE"]

CLOCKS = {"step": ("Steps", "step"), "tokens": ("Tokens", "tokens"), "wall_time": ("Wall time", "seconds")}
UNITS = {"wall_time": "seconds", "watch_ms": "milliseconds"}
PLAIN = {"lr", *CLOCKS}  # scalars whose shape is read on a linear axis


def _choices(ask: Ask) -> Sequence[Choice]:
    clocks = [name for name in CLOCKS if name == "step" or any(has(one, f"scalars/{name}") for one in ask.runs)]
    over = tuple(Option(name, CLOCKS[name][0]) for name in clocks)
    scale = (Option("auto", "Auto"), Option("log", "Log"), Option("linear", "Linear"))
    return Choice("over", "Over", over, ("step",)), Choice("scale", "Values", scale, ("auto",))


def _build(ask: Ask) -> Sequence[Block]:
    charts = [chart for name in _names(ask) if (chart := _chart(ask, name)).lines]
    sentence = "No scalar is logged. watch.log(loss=loss) records one per step."
    return charts or [nothing_chosen(sentence)]


def _names(ask: Ask) -> list[str]:
    """The scalars of all runs but the one that is the axis; the loss first."""
    names: dict[str, None] = {}
    for shown in ask.runs:
        with shown.source.reading() as run:
            names.update(dict.fromkeys(run.scalars))
    kept = [name for name in names if name != ask.one("over")]
    return sorted(kept, key=lambda name: (name != "loss", name in CLOCKS))


def _chart(ask: Ask, name: str) -> Chart:
    found = [(shown, column) for shown in ask.runs if (column := scalar(shown, name)) is not None]
    chosen = ask.one("scale")
    fits = name not in PLAIN and log_fits([values for _, (_, *ends) in found for values in ends])
    log = fits if chosen == "auto" else chosen == "log"
    lines = tuple(_line(ask, shown, *column, log=log) for shown, column in found)
    axis = Axis(CLOCKS[ask.one("over")][1], "step", clock=_clock(ask, ask.focus))
    return Chart(name, axis, Axis(UNITS.get(name, ""), log=log), lines, size="wide" if name == "loss" else "medium")


def _line(
    ask: Ask,
    shown: Shown,
    steps: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    *,
    log: bool,
) -> Line:
    clock = _clock(ask, shown)
    x = steps if clock is None else np.interp(steps, clock.steps, clock.values)
    if log:
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = np.log10(low), np.log10(high)
    with np.errstate(invalid="ignore"):
        middle = np.where(low == high, low, (low + high) / 2)
    pooled = not np.array_equal(low, high, equal_nan=True)
    return Line(shown.name, shown.slot, x, middle, low if pooled else None, high if pooled else None, run=shown.id)


def _clock(ask: Ask, shown: Shown) -> Clock | None:
    """How the steps of a run lie on the axis; None where it counts steps or the run did not log the clock."""
    name = ask.one("over")
    column = None if name == "step" else scalar(shown, name)
    if column is None:
        return None
    known = np.isfinite(column[1])
    return Clock(column[0][known], column[1][known])


PAGE = Page(
    "curves",
    "Training curves",
    "curve",
    "How did the loss and everything else that was logged develop?",
    _build,
    _choices,
    single=False,
)
