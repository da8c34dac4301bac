"""Plotly figures of a run's series: layer x step heatmap, depth profile, layer history. Usable in any notebook.

    import keelscope as ks
    from keelscope_dashboards import figures
    run = ks.open_run("runs/keel.h5")
    figures.heatmap(run["gradients/rms"]).show()

Lines are log10 values on a linear axis labelled in powers of ten, so zeros are never squeezed onto a log axis. The
app takes its axes from `axes_layout` and draws the dense marks itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from keelscope.errors import UnknownNameError
from keelscope.store.series import Series
from keelscope_dashboards.causes import extent, steps_of
from keelscope_dashboards.levels import Kind, LayerAxis, Levels, layer_axis, levels_of
from keelscope_dashboards.panels import Reference, panel_of
from keelscope_dashboards.pooling import Tile, pool
from keelscope_dashboards.theme import LIGHT, LIMIT, MARKS, SYMBOLS, TICKS, Palette, colour_table, colourscale, symlog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from keelscope.analysis.attribution import Attribution

__all__ = ["CONFIG", "axes_layout", "depth_profile", "edges_of", "heatmap", "history", "waterfall"]

CONFIG: dict[str, Any] = {"displaylogo": False, "showSendToCloud": False, "responsive": True}
"""Plotly settings that every figure is shown with; nothing is ever offered for upload."""
MAX_COLUMNS = 1000
_MARKS = dict(zip((Kind.ZERO, Kind.NAN, Kind.INF), MARKS, strict=True))
_REFERENCES = {"output": "the output side", "input": "the input side", "median": "the depth median", "none": "1"}


def heatmap(
    series: Series,
    *,
    reference: Reference | None = None,
    observed: NDArray[np.bool_] | None = None,
    palette: Palette = LIGHT,
) -> go.Figure:
    """Layer x step heatmap: colour is decades from the reference at the same step.

    Args:
        series: values ``[step, site]``.
        reference: what a level is compared with; the panel's own if None, ``"none"`` for log10 of the value itself.
        observed: ``run.observed(group)``, to tell NaN from not observed.
        palette: light or dark.

    Returns:
        A figure whose first trace has ``z[layer, step]`` in decades. Above 1,000 recorded steps the columns are
        pooled so that the farthest level of each stays.
    """
    chosen = reference or _default_reference(series)
    axis = layer_axis(series.sites)
    levels = levels_of(series, axis, reference=chosen, observed=observed)
    tile = pool(levels, -(-max(1, len(series.steps)) // MAX_COLUMNS))
    figure = go.Figure(layout=axes_layout(palette, x="step", y="layer (1 = input)"))
    figure.add_trace(_cells(tile, axis, palette, chosen))
    _add_marks(figure, tile)
    _add_colour_bar(figure, palette, chosen)
    figure.update_layout(title=_title(series), yaxis_range=[0.5, len(axis) + 0.5], margin={"l": 64, "r": 24, "t": 56})
    return figure


def depth_profile(series: Series | Mapping[str, Series], *, step: int = -1, palette: Palette = LIGHT) -> go.Figure:
    """Level of every layer at one step, depth running upwards.

    Args:
        series: one series, or several by run name.
        step: a recorded step; -1 is the last one of each run.
        palette: light or dark.

    Returns:
        A figure with one line per run: ``x`` is log10 of the value (None where there is none), ``y`` the layer from 1.

    Raises:
        UnknownNameError: if that step was not recorded.
    """
    figure = go.Figure(layout=axes_layout(palette, x="", y="layer (1 = input)"))
    shown = _by_name(series)
    for i, (name, one) in enumerate(shown.items()):
        levels = _levels_at(one, step)
        x, y = levels.marked(absolute=True)[0], np.arange(1, levels.decades.shape[1] + 1)
        figure.add_trace(_line(_finite(x), y, i, name, palette))
    _power_ticks(figure, "x")
    figure.update_layout(title=_title(next(iter(shown.values()))), showlegend=len(shown) > 1)
    return figure


def history(series: Series | Mapping[str, Series], *, layer: int, palette: Palette = LIGHT) -> go.Figure:
    """Level of one layer over all recorded steps.

    Args:
        series: one series, or several by run name.
        layer: layer number from 1 at the input side.
        palette: light or dark.

    Returns:
        A figure with one line per run: ``x`` is the step, ``y`` log10 of the value (None where there is none).

    Raises:
        UnknownNameError: if a run has no such layer.
    """
    figure = go.Figure(layout=axes_layout(palette, x="step", y=""))
    shown = _by_name(series)
    for i, (name, one) in enumerate(shown.items()):
        axis = layer_axis(one.sites)
        if not 1 <= layer <= len(axis):
            raise UnknownNameError(f"{name}: layer {layer} does not exist; layers are 1 to {len(axis)}.")
        levels = levels_of(one, axis, reference="none").marked(absolute=True)[:, layer - 1]
        figure.add_trace(_line(one.steps, _finite(levels), i, name, palette))
    _power_ticks(figure, "y")
    figure.update_layout(title=f"{_title(next(iter(shown.values())))}, layer {layer}", showlegend=len(shown) > 1)
    return figure


def waterfall(attribution: Attribution, *, palette: Palette = LIGHT) -> go.Figure:
    """Which cause changes the gradient by how many decades on its way from the output end to the input.

    Args:
        attribution: of one residual stream, e.g. ``report.paths.main.attribution``.
        palette: light or dark.

    Returns:
        A figure with one trace: ``x`` are decades per cause, negative where the gradient shrinks, the total last.
    """
    steps = steps_of(attribution)
    bars = go.Waterfall(
        orientation="h",
        x=[step.decades for step in steps],
        y=[step.title for step in steps],
        measure=["total" if step.is_total else "relative" for step in steps],
        text=[f"{step.decades:+.2f}" for step in steps],
        textposition="outside",
        textfont={"color": palette.text},
        decreasing={"marker": {"color": palette.anchors[1]}},
        increasing={"marker": {"color": palette.anchors[-2]}},
        totals={"marker": {"color": palette.muted}},
        connector={"line": {"color": palette.axis, "width": 1}},
        hovertemplate="%{y}<br>%{x:+.3f} decades<extra></extra>",
        cliponaxis=False,
    )
    figure = go.Figure(bars, layout=axes_layout(palette, x="decades against the output end", y=""))
    figure.update_layout(title="Why the gradient changes over the stack", showlegend=False)
    figure.update_layout(margin={"l": 16, "r": 48, "t": 56, "b": 48}, height=140 + 44 * max(1, len(steps)))
    low, high = extent(steps)
    spare = 0.08 * (high - low)
    figure.update_xaxes(range=[low - spare, high + spare], zeroline=True, zerolinecolor=palette.axis)
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False)
    return figure


def axes_layout(palette: Palette, *, x: str, y: str) -> dict[str, Any]:
    """The common look: font, colours, thin axes, light grid.

    Args:
        palette: light or dark.
        x: title of the horizontal axis.
        y: title of the vertical axis.

    Returns:
        A Plotly layout.
    """
    axis = {
        "gridcolor": palette.grid,
        "linecolor": palette.axis,
        "tickcolor": palette.axis,
        "showline": True,
        "ticks": "outside",
        "ticklen": 4,
        "zeroline": False,
        "separatethousands": True,
    }
    return {
        "font": {"family": "Inter, system-ui, sans-serif", "size": 12, "color": palette.muted},
        "paper_bgcolor": palette.paper,
        "plot_bgcolor": palette.paper,
        "colorway": list(palette.runs),
        "margin": {"l": 56, "r": 12, "t": 8, "b": 28},
        "xaxis": axis | {"title": {"text": x, "standoff": 6, "font": {"size": 12}}},
        "yaxis": axis | {"title": {"text": y, "standoff": 6, "font": {"size": 12}}},
        "hoverlabel": {"font": {"family": "Inter, system-ui, sans-serif", "size": 12}},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"},
    }


def edges_of(tile: Tile) -> NDArray[np.float64]:
    """Step boundaries ``[bin + 1]`` of the bins: halfway to the neighbour, and none before the training began.

    Args:
        tile: pooled levels with at least one bin.

    Returns:
        Increasing steps; a single step gets half a step on either side.
    """
    first, last = tile.first.astype(np.float64), tile.last.astype(np.float64)
    inner = (last[:-1] + first[1:]) / 2
    left = (inner[0] - last[0]) if len(inner) else 0.5
    right = (first[-1] - inner[-1]) if len(inner) else 0.5
    return np.concatenate([[max(min(first[0], 0.0) - 0.5, first[0] - left)], inner, [last[-1] + right]])


def _default_reference(series: Series) -> Reference:
    panel = panel_of(series.name)
    return panel.reference if panel else "output"


def _title(series: Series) -> str:
    panel = panel_of(series.name)
    return panel.title if panel else series.name


def _by_name(series: Series | Mapping[str, Series]) -> dict[str, Series]:
    return {series.name: series} if isinstance(series, Series) else dict(series)


def _levels_at(series: Series, step: int) -> Levels:
    """One row of a series as levels."""
    row = series.at(step)[None]
    at = np.array([series.steps[-1] if step == -1 else step])
    one = Series(series.name, row, at, series.sites, series.unit, series.doc, series.dims)
    return levels_of(one, layer_axis(series.sites), reference="none")


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isfinite(values), values, np.nan)


def _cells(tile: Tile, axis: LayerAxis, palette: Palette, reference: Reference) -> go.Heatmap:
    z = np.where(tile.kinds == Kind.VALUE, tile.deviations, np.nan).T  # [layer, bin]
    against = "" if reference == "none" else f" vs {_REFERENCES[reference]}"
    return go.Heatmap(
        z=z,
        x=edges_of(tile) if len(tile) else [],
        y=np.arange(1, len(axis) + 1),
        zmin=-LIMIT,
        zmax=LIMIT,
        colorscale=colourscale(palette),
        showscale=False,
        customdata=np.broadcast_to(np.array(axis.labels, dtype=object)[:, None], z.shape),
        hovertemplate="step %{x}, layer %{y}<br>%{customdata}<br>%{z:.2f} decades" + against + "<extra></extra>",
    )


def _add_marks(figure: go.Figure, tile: Tile) -> None:
    """Cells that hold no value, in flat colours of their own, with a legend entry each."""
    for kind, (label, colour) in _MARKS.items():
        marked = tile.kinds == kind
        if not marked.any():
            continue
        figure.add_trace(
            go.Heatmap(
                z=np.where(marked, 1.0, np.nan).T,
                x=edges_of(tile),
                y=np.arange(1, marked.shape[1] + 1),
                colorscale=[[0, colour], [1, colour]],
                showscale=False,
                hovertemplate=f"step %{{x}}, layer %{{y}}<br>{label}<extra></extra>",
            )
        )
        key = {"size": 11, "symbol": "square", "color": colour}
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", marker=key, name=label, showlegend=True))


def _add_colour_bar(figure: go.Figure, palette: Palette, reference: Reference) -> None:
    """A bar that is even on the symmetric log scale, carried by an empty trace."""
    colours = colour_table(palette, 65)
    scale = [[i / 64, f"rgb({r},{g},{b})"] for i, (r, g, b) in enumerate(colours)]
    title = "log10" if reference == "none" else f"decades vs<br>{_REFERENCES[reference]}"
    bar = {
        "title": {"text": title},
        "tickvals": symlog(np.array(TICKS, dtype=np.float64)),
        "ticktext": [f"{tick:+d}" if tick else "0" for tick in TICKS],
        "thickness": 12,
        "outlinewidth": 0,
    }
    marker = {"color": [0], "cmin": -1, "cmax": 1, "colorscale": scale, "showscale": True, "colorbar": bar}
    figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", marker=marker, showlegend=False))


def _line(x: NDArray[Any], y: NDArray[Any], index: int, name: str, palette: Palette) -> go.Scatter:
    """One run: a line with its marker at about six places, so that runs differ by more than colour."""
    colour, symbol = palette.runs[index % len(palette.runs)], SYMBOLS[index % len(SYMBOLS)]
    every = max(1, len(y) // 6)
    sizes = np.where(np.arange(len(y)) % every == every // 2, 7, 0)
    marker = {"symbol": symbol, "size": sizes, "color": colour, "opacity": 1}
    line = {"color": colour, "width": 1.5}
    return go.Scatter(x=x, y=y, mode="lines+markers", line=line, marker=marker, name=name)


def _power_ticks(figure: go.Figure, axis: str) -> None:
    """Label an axis of log10 values in powers of ten."""
    values = [getattr(trace, axis) for trace in figure.data]
    known = np.concatenate([np.asarray(v, dtype=np.float64) for v in values]) if values else np.empty(0)
    known = known[np.isfinite(known)]
    low, high = (float(known.min()), float(known.max())) if known.size else (-1.0, 0.0)
    middle, half = (low + high) / 2, max(2.0, (high - low) * 0.55)
    stride = max(1, int(np.ceil(half / 3)))
    ticks = np.arange(np.ceil((middle - half) / stride) * stride, middle + half, stride)
    settings = {
        "range": [middle - half, middle + half],
        "tickvals": ticks,
        "ticktext": [f"10<sup>{t:.0f}</sup>" for t in ticks],
    }
    figure.update_layout({f"{axis}axis": settings})
