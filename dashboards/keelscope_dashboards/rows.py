"""Rows and columns of a run as pages draw them: one step over depth, one site over steps, read in bounded slices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from keelscope_dashboards.depth import inner_names
from keelscope_dashboards.levels import Kind
from keelscope_dashboards.panels import series_panel
from keelscope_dashboards.pooling import envelope

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from keelscope.store.reader import Run
    from keelscope.store.schema import Site
    from keelscope_dashboards.asking import Shown
    from keelscope_dashboards.levels import LayerAxis

__all__ = ["Profile", "groups_of", "has", "log_fits", "plain_series", "profile_at", "recorded", "row_at", "scalar"]

MAX_POINTS = 1000
WIDE = 1.0  # decades of spread from which a logarithmic axis is easier to read


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """One step of one series over depth."""

    step: int
    depth: NDArray[np.float64]
    levels: NDArray[np.float64]
    """log10 of the values, or the values themselves: ``-inf`` for exactly 0, ``inf``, NaN where there is none."""
    axis: LayerAxis
    nan: NDArray[np.bool_]
    """Which of the levels are not there because the value was a NaN."""

    def of(self, kept: NDArray[np.bool_]) -> Profile:
        """Some of its entries; the axis stays as it is."""
        return replace(self, depth=self.depth[kept], levels=self.levels[kept], nan=self.nan[kept])

    def families(self) -> Iterator[tuple[str, Profile]]:
        """The sites that play one part at every depth, by the last name in their path; layers are one family.

        Yields:
            Name and entries; the name is empty where there is one family.
        """
        if len(np.unique(self.depth)) == len(self.depth):
            yield "", self
            return
        names = np.array([label.rpartition(".")[2] for label in self.axis.labels])
        for name in dict.fromkeys(names.tolist()):
            yield name, self.of(names == name)


def profile_at(shown: Shown, key: str, step: int, *, linear: bool = False) -> Profile | None:
    """The recorded row of a series nearest to a step.

    Args:
        shown: a run.
        key: ``group/statistic``.
        step: any step.
        linear: the values themselves instead of log10.

    Returns:
        The row on the layer axis; None if the run has none.
    """
    if not has(shown, key):
        return None
    panel = series_panel(key, reference="none", scale="linear" if linear else "decades")
    axis, levels = shown.source.axis(panel), shown.source.profile(panel, step)
    if len(levels.steps) == 0:
        return None
    values = levels.marked(absolute=True)[0]
    if linear:
        values[np.isneginf(values)] = 0.0
    depth = np.array(axis.depths or range(1, len(axis) + 1), dtype=np.float64)
    return Profile(int(levels.steps[0]), depth, values, axis, levels.kinds[0] == Kind.NAN)


def has(shown: Shown, key: str) -> bool:
    """Whether a run holds a series."""
    with shown.source.reading() as run:
        return key in run


def recorded(shown: Shown, group: str) -> bool:
    """Whether a run holds at least one row of a group."""
    with shown.source.reading() as run:
        return group in run.groups and len(run.steps_of(group)) > 0


def groups_of(run: Run) -> dict[str, tuple[str, ...]]:
    """The statistics of every group that can be laid out over ``[step, site]``, with at most one further axis."""
    plain = {
        name: tuple(spec.name for spec in group.statistics if not spec.dims or inner_names(spec))
        for name, group in run.groups.items()
    }
    return {name: statistics for name, statistics in plain.items() if statistics}


def plain_series(shown: Shown) -> list[str]:
    """Names of all series over ``[step, site]`` of a run, in recorded order."""
    with shown.source.reading() as run:
        return [f"{group}/{name}" for group, names in groups_of(run).items() for name in names]


def row_at(shown: Shown, key: str, step: int) -> tuple[int, NDArray[np.float64], tuple[Site, ...]] | None:
    """The recorded row of a series nearest to a step, on its own site axis.

    Args:
        shown: a run.
        key: ``group/statistic``.
        step: any step.

    Returns:
        Its step, the values ``[site, ...]`` and the sites; None if the run has none.
    """
    with shown.source.reading() as run:
        if key not in run:
            return None
        steps = run.steps_of(key.partition("/")[0])
        if len(steps) == 0:
            return None
        row = int(np.abs(steps - step).argmin())
        series = run.read(key, row, row + 1)
    return int(steps[row]), np.asarray(series.values[0], dtype=np.float64), series.sites


def log_fits(columns: Sequence[NDArray[np.float64]]) -> bool:
    """Whether values are read more easily on a logarithmic axis: none is negative, and they span more than a decade.

    Args:
        columns: of any length.

    Returns:
        Whether they do.

    Example:
        >>> log_fits([np.array([0.0, 1.0, 20.0])]), log_fits([np.array([1.0, 2.0])]), log_fits([np.array([-1.0, 50.0])])
        (True, False, False)
    """
    known = np.concatenate([column[np.isfinite(column)] for column in columns]) if columns else np.empty(0)
    positive = known[known > 0]
    if not positive.size or known.min() < 0:
        return False
    return bool(np.log10(positive.max() / positive.min()) > WIDE)


def scalar(shown: Shown, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]] | None:
    """A scalar over the steps on which it was logged, reduced to the lowest and the highest of at most 1,000 bins.

    Args:
        shown: a run.
        name: of the scalar.

    Returns:
        Steps, lowest and highest value ``[bin]``; None if the run has none.
    """
    if not has(shown, f"scalars/{name}"):
        return None
    with shown.source.reading() as run:
        series = run.read(f"scalars/{name}")
    values = np.asarray(series.values, dtype=np.float64)
    logged = ~np.isnan(values)  # a scalar need not be logged on every step
    if not logged.any():
        return None
    starts, low, high = envelope(values[logged], MAX_POINTS)
    return np.asarray(series.steps, dtype=np.float64)[logged][starts], low, high
