"""Draws a long finished run from the overviews in its file: a hundredth of the numbers, read in a moment.

`keelscope_dashboards.followed` asks before it reads rows. A bin is drawn from its lowest, mean and highest value; the
level it is compared with is that of the means, where rows are compared each with its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from keelscope.store.overview import FACTORS, LONG_RUN
from keelscope_dashboards.levels import Kind, levels_of
from keelscope_dashboards.pooling import Tile

if TYPE_CHECKING:
    from keelscope.store.overview import Overview
    from keelscope.store.reader import Run
    from keelscope_dashboards.drawn import Drawn
    from keelscope_dashboards.levels import Levels

__all__ = ["begin_from_overview"]

COARSER = 3  # times fewer bins that a first look may have


def begin_from_overview(run: Run, drawn: Drawn, *, hurried: bool = False) -> None:
    """Fill an empty pool from the coarsest overview that is fine enough, if the run has one that shows the same.

    Args:
        run: the run.
        drawn: one panel; left as it is where rows have to be read.
        hurried: take the coarsest overview at first, read in a tenth of the time; the next call takes the right one.
    """
    rows = len(run.steps_of(drawn.panel.group))
    if (drawn.pool.seen and not drawn.coarse) or rows <= LONG_RUN or any(len(one) != 1 for one in drawn.axis.members):
        return
    least = drawn.pool.limit / COARSER if hurried and not drawn.coarse else drawn.pool.limit
    fitting = [factor for factor in FACTORS if -(-rows // factor) >= least]
    drawn.coarse = bool(fitting) and -(-rows // max(fitting)) < drawn.pool.limit
    made = run.stored_overview(drawn.panel.key, max(fitting), sites=drawn.sites) if fitting else None
    if made is None or made.low.ndim > 2:
        return
    blank = run.read(drawn.panel.key, 0, 0, sites=drawn.sites)
    low, mean, high = (
        levels_of(
            replace(blank, values=values, steps=made.first),
            drawn.axis,
            reference=drawn.panel.reference,
            observed=made.observed,
            linear=drawn.panel.scale == "linear",
        )
        for values in (made.low, made.mean, made.high)
    )
    if drawn.panel.scale == "linear" or blank.unit in {"decades", "log10"} or not (made.low < 0).any():
        drawn.pool.begin(_tile(made, low, mean, high, max(fitting)), rows)


def _tile(made: Overview, low: Levels, mean: Levels, high: Levels, factor: int) -> Tile:
    reference = mean.reference[:, None]
    up, down = (np.where(side.kinds == Kind.VALUE, side.decades - reference, np.float32(0)) for side in (high, low))
    kinds = np.maximum(np.maximum(low.kinds, high.kinds), np.where(mean.kinds == Kind.NAN, mean.kinds, 0))
    deviations = np.where(up >= -down, up, down).astype(np.float32)
    return Tile(made.first, made.last, mean.reference, deviations, kinds.astype(np.uint8), factor)
