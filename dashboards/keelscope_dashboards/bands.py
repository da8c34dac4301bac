"""The depth axis that several runs share on one chart, and the bands of like layers along it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from keelscope.diagnosis.axis import depth_axis
from keelscope_dashboards.blocks import Axis, Line, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from keelscope.diagnosis.axis import DepthAxis
    from keelscope.store.reader import Run
    from keelscope_dashboards.asking import Shown
    from keelscope_dashboards.rows import Profile

__all__ = ["SharedDepth", "bands_of", "shared_depth", "spans_of"]

MAX_BANDS = 12


@dataclass(frozen=True, slots=True)
class SharedDepth:
    """Depth in layers where all runs are equally deep, as a share of the depth otherwise."""

    axis: Axis
    lengths: dict[str, float]
    """Depth of every run by its id."""

    def place(self, run: str, depth: NDArray[np.float64]) -> NDArray[np.float64]:
        """Depths of one run on the axis.

        Args:
            run: its id.
            depth: as the report counts it.

        Returns:
            Coordinates.
        """
        return depth / self.lengths[run] if self.axis.kind == "relative" else depth

    def line(self, shown: Shown, label: str, profile: Profile, **look: Any) -> Line:
        """A profile as a line on it.

        Args:
            shown: whose profile it is.
            label: what the legend says.
            profile: any.
            look: further fields of `Line`.

        Returns:
            The line.
        """
        x = self.place(shown.id, profile.depth)
        return Line(label, shown.slot, x, profile.levels, bad=x[profile.nan], run=shown.id, **look)


def shared_depth(runs: Sequence[Shown]) -> SharedDepth:
    """The axis for some runs.

    Args:
        runs: at least one.

    Returns:
        The axis.
    """
    chains = {shown.id: _chain(shown) for shown in runs}
    lengths = {name: max(1.0, chain.length) for name, chain in chains.items()}
    first = next(iter(chains.values()))
    if len(set(lengths.values())) > 1:
        return SharedDepth(Axis("share of the depth (0 = input)", "relative", length=max(lengths.values())), lengths)
    return SharedDepth(Axis(f"{first.unit} (1 = input)", "depth"), lengths)


def _chain(shown: Shown) -> DepthAxis:
    with shown.source.reading() as run:
        return depth_axis(run)


def bands_of(shown: Shown) -> tuple[Span, ...]:
    """Stretches of like layers: of one stack or stage where there are several, else of one residual equation.

    Args:
        shown: a run.

    Returns:
        Nothing where all layers are alike, or where they alternate too often to be seen.
    """
    with shown.source.reading() as run:
        return spans_of(run)


def spans_of(run: Run) -> tuple[Span, ...]:
    """The same of a run.

    Args:
        run: any run.

    Returns:
        See `bands_of`.
    """
    labels = _labels(run)
    bands, start = [], 0
    for label, members in groupby(labels):
        end = start + len(list(members))
        bands.append(Span(start + 0.5, end + 0.5, label))
        start = end
    return tuple(bands) if 1 < len(bands) <= MAX_BANDS else ()


def _labels(run: Run) -> list[str]:
    chain = depth_axis(run)
    if chain.stack is None:
        return [site.stack for site in chain.sites]
    if "," in chain.stack.path:
        return [site.path.rpartition(".")[0] for site in chain.sites]
    forms = [sublayer.form for sublayer in run.info.sublayers]
    return forms if len(forms) == chain.length else []
