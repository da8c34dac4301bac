"""`Levels`: a series as decades over the layer axis, with zero, NaN, Inf and "not observed" kept apart.

Between `keelscope.store.series.Series` and everything drawn: `figures` draws levels directly, `pooling` reduces them
to a bounded number of columns for the browser. The only arithmetic is what drawing needs: log10, the root of the
squares when a layer owns several parameters, and the distance to a stated reference at the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from keelscope.store.schema import Site
    from keelscope.store.series import Series
    from keelscope_dashboards.panels import Reference

__all__ = ["Kind", "LayerAxis", "Levels", "layer_axis", "levels_of"]

SIDE_SHARE = 1 / 32  # layers at one end whose median is the reference of that side


class Kind(IntEnum):
    """What a cell holds; when several cells share a pixel the largest kind is shown."""

    ABSENT = 0
    VALUE = 1
    ZERO = 2
    NAN = 3
    INF = 4


@dataclass(frozen=True, slots=True)
class LayerAxis:
    """The layers of a series from the input side to the output side."""

    labels: tuple[str, ...]
    """Dotted path of each layer."""
    types: tuple[str, ...]
    """Class name of each layer."""
    members: tuple[tuple[int, ...], ...]
    """Indices on the site axis that make up each layer."""
    unit: str = "layer"
    """What depth counts: sub-layers, blocks, modules, or just layers."""
    depths: tuple[int, ...] = ()
    """Depth of each layer in that unit, as the report has it; empty where it is 1, 2, 3, ..."""

    def __len__(self) -> int:
        return len(self.labels)

    def gather(
        self, values: NDArray[np.floating], observed: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Values on the layer axis: as they are, or the root of the sum of squares where a layer has several sites.

        Args:
            values: ``[step, site]``.
            observed: ``[step, site]``; sites that were not observed take no part in their layer.

        Returns:
            Values and whether any site of the layer was observed, both ``[step, layer]``.
        """
        wide = np.asarray(values, dtype=np.float64)
        if all(len(member) == 1 for member in self.members):
            order = [member[0] for member in self.members]
            if order == list(range(len(order))):  # as most runs have it: nothing has to be copied
                return wide[:, : len(order)], observed[:, : len(order)]
            return wide[:, order], observed[:, order]
        pairs = [_joined(wide[:, list(member)], observed[:, list(member)]) for member in self.members]
        return np.stack([value for value, _ in pairs], axis=1), np.stack([seen for _, seen in pairs], axis=1)


def _joined(values: NDArray[np.float64], observed: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Root of the sum of squares of the sites of one layer, and whether there was any."""
    squares = np.where(observed, np.square(values), 0.0).sum(axis=1)
    return np.asarray(np.sqrt(squares), dtype=np.float64), np.asarray(observed.any(axis=1), dtype=np.bool_)


def layer_axis(sites: tuple[Site, ...], *, stack: str | None = None) -> LayerAxis:
    """The layers among the sites: the entries of the main stack, or every site when there is no stack.

    Args:
        sites: the site axis of a group.
        stack: path of the main stack; the one with most entries among the sites if None.

    Returns:
        The axis in execution order, the input side first.
    """
    main = _longest_stack(sites) if stack is None else stack
    entries = _entries(sites, main) if main else {}
    if not entries:
        entries = {i: [i] for i in range(len(sites))}
    heads = [sites[members[0]] for members in entries.values()]
    parameters = any(head.role == "parameter" for head in heads)
    labels = [_layer_path(head) if parameters and main else head.path for head in heads]
    return LayerAxis(tuple(labels), tuple(head.kind for head in heads), tuple(map(tuple, entries.values())))


def _longest_stack(sites: tuple[Site, ...]) -> str:
    counts: dict[str, set[int]] = {}
    for site in sites:
        if site.stack and site.position >= 0 and site.role in {"layer", "parameter"}:
            counts.setdefault(site.stack, set()).add(site.position)
    return max(counts, key=lambda path: len(counts[path]), default="")


def _entries(sites: tuple[Site, ...], stack: str) -> dict[int, list[int]]:
    """Site indices of each stack entry, by position."""
    entries: dict[int, list[int]] = {}
    for i, site in enumerate(sites):
        if site.stack == stack and site.position >= 0 and site.role in {"layer", "parameter"}:
            entries.setdefault(site.position, []).append(i)
    return dict(sorted(entries.items()))


def _layer_path(site: Site) -> str:
    """Path of the stack entry that a parameter belongs to: the stack's path and one more component."""
    depth = site.stack.count(".") + 2
    return ".".join(site.path.split(".")[:depth])


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """log10 of one series over the layer axis."""

    decades: NDArray[np.float32]
    """``[step, layer]``; 0 where `kinds` is not ``VALUE``."""
    kinds: NDArray[np.uint8]
    """``[step, layer]`` of `Kind`."""
    reference: NDArray[np.float32]
    """``[step]``: the level each row is compared with."""
    steps: NDArray[np.int64]
    """``[step]``."""

    @property
    def deviations(self) -> NDArray[np.float32]:
        """``[step, layer]``: decades above the reference of the same step; 0 where `kinds` is not ``VALUE``."""
        return np.where(self.kinds == Kind.VALUE, self.decades - self.reference[:, None], np.float32(0))

    def row(self, index: int) -> Levels:
        """One step."""
        at = slice(index, index + 1)
        return Levels(self.decades[at], self.kinds[at], self.reference[at], self.steps[at])

    def layer(self, index: int) -> Levels:
        """One layer over all steps."""
        at = slice(index, index + 1)
        return Levels(self.decades[:, at], self.kinds[:, at], self.reference, self.steps)

    def marked(self, *, absolute: bool) -> NDArray[np.float64]:
        """Decades as one array with IEEE marks: -inf for exactly 0, inf for Inf, NaN for NaN and not observed.

        Args:
            absolute: log10 of the value itself instead of the distance to the reference.

        Returns:
            ``[step, layer]``; ``10 ** marked(absolute=True)`` is the series.
        """
        out = (self.decades if absolute else self.deviations).astype(np.float64)
        out[self.kinds == Kind.ZERO] = -np.inf
        out[self.kinds == Kind.INF] = np.inf
        out[(self.kinds == Kind.NAN) | (self.kinds == Kind.ABSENT)] = np.nan
        return out


def levels_of(
    series: Series,
    axis: LayerAxis,
    *,
    reference: Reference = "output",
    observed: NDArray[np.bool_] | None = None,
    linear: bool = False,
) -> Levels:
    """The levels of a series.

    Args:
        series: values ``[step, site]`` in linear units, or already in decades when the unit says so. Of values that
            can be negative, the logarithm is that of their size.
        axis: the layers among the sites of the series.
        reference: what each row is compared with.
        observed: ``[step, site]``, tells a computed NaN from a site that was not seen. Without it, a NaN counts as
            computed unless the whole row or the whole column is NaN.
        linear: take the values themselves instead of decades.

    Returns:
        Levels of the same rows.
    """
    seen = _probably_observed(series.values) if observed is None else observed
    values, known = axis.gather(series.values, seen)
    if linear:
        logs, kinds = values, _linear_kinds(values, known)
    else:
        logs = values if _in_decades(series) else _log10(values)
        kinds = _kinds(logs, known)
    decades = logs.astype(np.float32)
    decades[kinds != Kind.VALUE] = 0.0
    return Levels(decades, kinds, _reference(decades, kinds, reference), np.asarray(series.steps, dtype=np.int64))


def _in_decades(series: Series) -> bool:
    return series.unit == "decades" or series.unit.startswith("log10")


def _log10(values: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log10(np.abs(values)))


def _probably_observed(values: NDArray[np.floating]) -> NDArray[np.bool_]:
    holds = ~np.isnan(values)
    return np.asarray(holds.any(axis=1, keepdims=True) & holds.any(axis=0, keepdims=True))


def _kinds(logs: NDArray[np.float64], observed: NDArray[np.bool_]) -> NDArray[np.uint8]:
    kinds = np.full(logs.shape, Kind.VALUE, dtype=np.uint8)
    if not np.isfinite(logs).all():
        kinds[np.isneginf(logs)] = Kind.ZERO
        kinds[np.isposinf(logs)] = Kind.INF
        kinds[np.isnan(logs)] = Kind.NAN
    kinds[~observed] = Kind.ABSENT
    return kinds


def _linear_kinds(values: NDArray[np.float64], observed: NDArray[np.bool_]) -> NDArray[np.uint8]:
    kinds = np.full(values.shape, Kind.VALUE, dtype=np.uint8)
    kinds[values == 0] = Kind.ZERO
    kinds[np.isinf(values)] = Kind.INF
    kinds[np.isnan(values)] = Kind.NAN
    kinds[~observed] = Kind.ABSENT
    return kinds


def _reference(decades: NDArray[np.float32], kinds: NDArray[np.uint8], reference: Reference) -> NDArray[np.float32]:
    """Median level of the reference layers per row; of the whole row where those hold no value, else 0."""
    steps, layers = decades.shape
    if reference == "none" or layers == 0:
        return np.zeros(steps, dtype=np.float32)
    side = max(1, round(layers * SIDE_SHARE))
    part = {"output": slice(layers - side, None), "input": slice(side), "median": slice(None)}[reference]
    medians = _nanmedian(_known(decades[:, part], kinds[:, part]))
    fallback = np.isnan(medians)
    if fallback.any():
        medians[fallback] = _nanmedian(_known(decades[fallback], kinds[fallback]))
    return np.nan_to_num(medians, nan=0.0)


def _known(decades: NDArray[np.float32], kinds: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.where(kinds == Kind.VALUE, decades, np.float32(np.nan))


def _nanmedian(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Median per row of the entries that are not NaN; NaN for a row without any."""
    if not np.isnan(values).any():
        return np.asarray(np.median(values, axis=1), dtype=np.float32)
    out = np.full(len(values), np.nan, dtype=np.float32)
    some = ~np.isnan(values).all(axis=1)
    out[some] = np.nanmedian(values[some], axis=1)
    return out
