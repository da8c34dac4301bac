"""`Evidence`: what rules and the headline look at, read from a run once: recent values, depth profiles, coverage.

Between `keelscope.store` and everything that judges. A rule asks for medians over the recent recorded steps
(`recent`), for the values at the reported step (`at_step`), or for a profile; it never reads the run by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keelscope.analysis.dynamics import median_over_steps
from keelscope.analysis.profile import MIN_LAYERS, DepthProfile, depth_profile
from keelscope.diagnosis.axis import DepthAxis, depth_axis, row_owner, row_sites
from keelscope.diagnosis.beside import axes_beside
from keelscope.diagnosis.profiles import NamedProfile, floor_remark
from keelscope.diagnosis.thresholds import DEFAULTS
from keelscope.errors import UnknownNameError
from keelscope.formatting import count
from keelscope.store.schema import CoverageEntry, Site

if TYPE_CHECKING:
    from keelscope.store.reader import Run
    from keelscope.store.series import Series

__all__ = ["LATE_TOKENS", "OUTPUT_GRADIENT", "PARAMETER_GRADIENT", "RECENT_STEPS", "Evidence"]

RECENT_STEPS = 10
"""Recorded steps whose median a verdict is drawn from."""
OUTPUT_GRADIENT = "gradients/rms"
LATE_TOKENS = "gradients/late_token_level"
PARAMETER_GRADIENT = "parameter_gradients/norm"

_BLOCK = 1 << 22  # values read at once: 32 MB
_SIZE_TREND = 0.5  # decades by which the layers' parameter counts may drift over depth before norms stop comparing
_FEW_ENTRIES = 16  # of a layer: the log of one normal number has a standard deviation of half a decade
_LATE_ZEROS = 0.1  # share of late tokens without gradient above which the late-token profile says nothing


class Evidence:
    """A run as seen at one step, with the recorded steps before it.

    Attributes:
        run: the run.
        step: the reported step.
        steps: ``[recent]``, the recorded steps whose median the profiles show.
        thresholds: what verdicts compare with, by name.
        kept: results that several rules share, by a name that starts with that of the module that makes them.
    """

    def __init__(
        self, run: Run, *, step: int = -1, recent: int = RECENT_STEPS, thresholds: Mapping[str, float] = DEFAULTS
    ) -> None:
        self.run = run
        self.thresholds = thresholds
        recorded = np.asarray(run.steps, dtype=np.int64)
        self.step = _chosen_step(recorded, step)
        self.steps = recorded[recorded <= self.step][-recent:]
        self._recorded = recorded
        self.kept: dict[str, object] = {}
        self._medians: dict[str, NDArray[np.float64] | None] = {}

    @cached_property
    def axis(self) -> DepthAxis:
        """The depth axis."""
        return depth_axis(self.run)

    @cached_property
    def chains(self) -> tuple[Evidence, ...]:
        """This evidence, then the same run along each further stack that is a chain of its own."""
        return self, *(self._along(axis) for axis in axes_beside(self.run, self.axis, self.rows))

    def _along(self, axis: DepthAxis) -> Evidence:
        other = copy(self)
        for name in ("chains", "profiles"):
            other.__dict__.pop(name, None)
        other.axis, other.kept = axis, {}
        return other

    @cached_property
    def coverage(self) -> tuple[CoverageEntry, ...]:
        """The coverage of the run; at an earlier step than the last one, as the first row shows it."""
        if not self._recorded.size or self.step == self._recorded[-1]:
            return self.run.coverage
        entries = self.run.coverage
        return tuple(replace(e, status=e.first, reason=e.first_reason) if e.first else e for e in entries)

    @cached_property
    def rows(self) -> tuple[Site, ...]:
        """The rows of the layer table in execution order."""
        return row_sites(self.run)

    def blocks(self, key: str) -> Iterator[Series]:
        """A series up to the reported step, in pieces that fit into memory.

        Args:
            key: ``group/statistic`` or ``scalars/name``.

        Yields:
            Consecutive rows ``[row, site]``; nothing if the run does not hold the series.
        """
        if key not in self.run:
            return
        rows = max(1, _BLOCK // max(1, len(self.sites(key))))
        start = 0
        while len(piece := self.run.read(key, start, start + rows)):
            yield _cut(piece, 0, self.step)
            start += rows

    def window(self, key: str) -> Series | None:
        """A series over the recent steps.

        Args:
            key: ``group/statistic``.

        Returns:
            The series with values ``[recent, site]``; None if the run does not hold it.
        """
        if key not in self.run or self.steps.size == 0:
            return None
        return _cut(self.run.read(key, -self._reach), int(self.steps[0]), self.step)

    def observed(self, key: str) -> NDArray[np.bool_]:
        """Where a value of `window` was observed, so that a NaN there is a computed one.

        Args:
            key: ``group/statistic`` that the run holds.

        Returns:
            ``[recent, site]``.
        """
        steps = self.run.read(key, -self._reach).steps
        inside = (steps >= self.steps[0]) & (steps <= self.step)
        return np.asarray(self.run.observed(key, -self._reach)[inside])

    @property
    def _reach(self) -> int:
        """Rows from the end that hold every recent step: a group has at most one row per recorded step."""
        return int((self._recorded >= self.steps[0]).sum())

    def sites(self, key: str) -> tuple[Site, ...]:
        """Labels of the site axis of a series; empty if the run does not hold it."""
        spec = self.run.groups.get(key.partition("/")[0])
        return spec.sites if spec is not None and key in self.run else ()

    def history(self, key: str, rows: int) -> Series | None:
        """The last rows of a series up to the reported step.

        Args:
            key: ``group/statistic`` or ``scalars/name``.
            rows: how many at most.

        Returns:
            The series; None if the run does not hold it, or nothing is recorded.
        """
        if key not in self.run or self.steps.size == 0:
            return None
        after = int((self._recorded > self.step).sum())
        piece = _cut(self.run.read(key, -(rows + after)), 0, self.step)
        return replace(piece, values=piece.values[-rows:], steps=piece.steps[-rows:])

    def recent(self, key: str) -> NDArray[np.float64] | None:
        """Median over the recent steps.

        Args:
            key: ``group/statistic``.

        Returns:
            ``[site]``, NaN where not observed; None if the run does not hold the series.
        """
        if key not in self._medians:
            series = self.window(key)
            self._medians[key] = None if series is None else median_over_steps(series.values)
        return self._medians[key]

    def latest(self, key: str) -> tuple[int, NDArray[np.float64]] | None:
        """The last row at or before the reported step, however long ago: for groups on a sparse schedule.

        Args:
            key: ``group/statistic``.

        Returns:
            Its step and values ``[site, ...]``; None if there is none.
        """
        found: tuple[int, NDArray[np.float64]] | None = None
        recent = self.window(key)
        for series in [recent] if recent is not None and len(recent) else self.blocks(key):
            if len(series):
                found = int(series.steps[-1]), np.asarray(series.values[-1], dtype=np.float64)
        return found

    def at_step(self, key: str) -> NDArray[np.float64] | None:
        """Values at the reported step, or at the last recorded one before it that holds this group.

        Args:
            key: ``group/statistic``.

        Returns:
            ``[site]``; None if nothing was recorded.
        """
        series = self.window(key)
        return None if series is None or len(series) == 0 else np.asarray(series.values[-1], dtype=np.float64)

    def last_step(self, key: str) -> int:
        """The recorded step that `at_step` shows; -1 if there is none."""
        series = self.window(key)
        return -1 if series is None or len(series) == 0 else int(series.steps[-1])

    def on_axis(self, key: str, values: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """Recent medians of a module series on the depth axis.

        Args:
            key: ``group/statistic`` with modules as sites.
            values: ``[site]`` to use instead of the recent medians.

        Returns:
            ``[layer]``, NaN where not observed or not recorded.
        """
        medians = self.recent(key) if values is None else values
        out = np.full(len(self.axis), np.nan)
        if medians is not None:
            place = {site.path: i for i, site in enumerate(self.sites(key))}
            for layer, site in enumerate(self.axis.sites):
                if site.path in place:
                    out[layer] = medians[place[site.path]]
        return out

    def by_owner(
        self, key: str, rows: tuple[Site, ...], values: NDArray[np.float64], observed: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Norms of parameters summed in squares over the row that owns or contains them.

        Each parameter belongs to one row, the innermost; a stack entry holds all its parameters.

        Args:
            key: ``group/statistic`` with parameters as sites and norms as values.
            rows: the rows.
            values: ``[parameter]``.
            observed: ``[parameter]``; others are left out.

        Returns:
            ``[row]``; NaN where no parameter of the row was observed, or an observed one is NaN.
        """
        place = {site.path: i for i, site in enumerate(rows)}
        owners = np.array([row_owner(site.path, place) for site in self.sites(key)], dtype=np.int64)
        known = (owners >= 0) & observed
        finite = values[known & np.isfinite(values)]
        unit = float(np.max(finite, initial=0.0)) or 1.0  # squares of tiny norms would underflow
        squares = np.full(len(rows), np.nan)
        squares[owners[known]] = 0.0
        np.add.at(squares, owners[known], (values[known] / unit) ** 2)
        return np.asarray(np.sqrt(squares) * unit)

    @cached_property
    def profiles(self) -> Mapping[str, NamedProfile]:
        """The depth profiles that can be drawn, by series: output gradient, late tokens, parameter gradient."""
        found = (self._output_profile(), self._late_profile(), self._parameter_profile())
        return {profile.key: profile for profile in found if profile is not None and profile.shape.observed}

    @property
    def judged(self) -> tuple[NamedProfile, ...]:
        """The profiles that a verdict may rest on: counted, with enough layers, and with a slope."""
        profiles = self.profiles.values()
        return tuple(p for p in profiles if p.counted and p.shape.usable >= MIN_LAYERS and not np.isnan(p.shape.total))

    @property
    def gradient(self) -> NamedProfile | None:
        """The whole-tensor output-gradient profile; the parameter-gradient one where outputs were not watched."""
        first = (key for key in self.profiles if key != LATE_TOKENS)
        return next((self.profiles[key] for key in first), None)

    def _output_profile(self) -> NamedProfile:
        by_size = self.axis.stack is None and "gradients/norm" in self.run  # unlike modules: RMS would show their size
        key, title = ("gradients/norm", "gradient norm") if by_size else (OUTPUT_GRADIENT, "gradient RMS")
        shape = self._shape(self.on_axis(key))
        return NamedProfile(key, title, shape, remark=floor_remark(title, shape))

    def _late_profile(self) -> NamedProfile | None:
        levels = self.on_axis(LATE_TOKENS)
        if self.axis.stack is None or not np.isfinite(levels).any():
            return None
        title = "late-token gradient level"
        shape = self._shape(np.power(10.0, levels))
        zeros = self.on_axis("gradients/late_token_zero_fraction")
        top = zeros[np.isfinite(zeros)][-1:]
        if top.size and not top[0] < _LATE_ZEROS:
            share = f"{100 * top[0]:.0f} %"
            remark = f"The {title} is not counted: {share} of the late tokens get no gradient at the top of the stack."
            return NamedProfile(LATE_TOKENS, title, shape, counted=False, remark=remark)
        return NamedProfile(LATE_TOKENS, title, shape, remark=floor_remark(title, shape))

    def _parameter_profile(self) -> NamedProfile | None:
        title = "parameter-gradient norm"
        medians = self.recent(PARAMETER_GRADIENT)
        if medians is None:
            return None
        norms = self.by_owner(PARAMETER_GRADIENT, self.axis.sites, medians, ~np.isnan(medians))
        shape = self._shape(norms)
        sizes = self._layer_sizes()
        trend = self._shape(sizes).total
        is_alone = not np.isfinite(self.on_axis(OUTPUT_GRADIENT)).any()
        awake = self._layer_sizes(medians > 0)
        if not is_alone and np.isfinite(awake).any() and np.nanmedian(awake) < _FEW_ENTRIES:
            few = count(int(np.nanmedian(awake)), "number of a layer gets", "numbers of a layer get")
            remark = f"The {title} is not counted: {few} a gradient (median), which scatters by chance."
            return NamedProfile(PARAMETER_GRADIENT, title, shape, counted=False, remark=remark)
        if abs(trend) > _SIZE_TREND and not is_alone:
            usable = sizes[np.isfinite(sizes)]
            grown = f"layers hold {usable[0]:,.0f} parameters at the input end and {usable[-1]:,.0f} at the output end"
            remark = f"The {title} is not counted: {grown}, so norms do not compare."
            return NamedProfile(PARAMETER_GRADIENT, title, shape, counted=False, remark=remark)
        return NamedProfile(PARAMETER_GRADIENT, title, shape, remark=floor_remark(title, shape))

    def _layer_sizes(self, which: NDArray[np.bool_] | bool = True) -> NDArray[np.float64]:
        """Entries of each layer's parameters, or of those in a mask ``[layer]``; NaN where that is not known."""
        roots = np.sqrt([float(site.numel) for site in self.sites(PARAMETER_GRADIENT)])
        return self.by_owner(PARAMETER_GRADIENT, self.axis.sites, roots, (roots > 0) & which) ** 2

    def _shape(self, values: NDArray[np.float64]) -> DepthProfile:
        axis = self.axis
        roles = [site.kind for site in axis.sites]
        return depth_profile(values, axis.depth, length=axis.length, roles=roles, skip=axis.first_block)


def _cut(series: Series, first: int, last: int) -> Series:
    """The rows from one step to another, both included."""
    start, stop = np.searchsorted(series.steps, [first, last + 1])
    return replace(series, values=series.values[start:stop], steps=series.steps[start:stop])


def _chosen_step(recorded: NDArray[np.int64], step: int) -> int:
    if recorded.size == 0:
        return -1
    if step == -1:
        return int(recorded[-1])
    if step not in recorded:
        raise UnknownNameError(
            f"step {step} was not recorded; {recorded.size} steps are recorded, {recorded[0]} to {recorded[-1]}."
        )
    return step
