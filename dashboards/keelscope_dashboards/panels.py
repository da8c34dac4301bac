"""The panels of the dashboard: which series can be drawn over depth and steps. One new panel = one entry of `PANELS`.

`levels` turns the series of a panel into decades on the layer axis; the app, the figures and the metric switch read
everything else (title, symbol, reference) from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["PANELS", "Panel", "Reference", "Scale", "panel_of", "series_panel"]

Reference = Literal["output", "input", "median", "none"]
"""What a level is compared with at the same step: the output side, the input side, the depth median, nothing."""
Scale = Literal["decades", "linear"]
"""Whether a level is log10 of a value or the value itself."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One series drawn as layer x step."""

    name: str
    """Short name in the address bar."""
    title: str
    key: str
    """``group/statistic`` in the run file."""
    symbol: str
    reference: Reference
    doc: str
    """One sentence for the reader of the chart."""
    scale: Scale = "decades"
    part: str = ""
    """Last name in the path of the sites to draw, where several kinds lie at every depth; all if empty."""

    @property
    def group(self) -> str:
        """The group of the series."""
        return self.key.partition("/")[0]

    @property
    def id(self) -> str:
        """What tells two ways to draw one series apart."""
        return f"{self.key}|{self.reference}|{self.scale}|{self.part}"


PANELS = (
    Panel(
        "gradient",
        "Gradient RMS",
        "gradients/rms",
        "RMS(∂L/∂x)",
        "output",
        "Root mean square of the loss gradient at each layer's output.",
    ),
    Panel(
        "late-token",
        "Late-token level",
        "gradients/late_token_level",
        "late ‖∂L/∂x‖",
        "output",
        "Geometric mean of the per-token gradient norms over the later half of the positions.",
    ),
    Panel(
        "variance",
        "Output variance",
        "outputs/variance",
        "Var(x)",
        "input",
        "Variance of each layer's output.",
    ),
    Panel(
        "parameter-gradient",
        "Parameter gradient",
        "parameter_gradients/norm",
        "‖∂L/∂θ‖",
        "median",
        "Norm of the gradient of all parameters of a layer together.",
    ),
)


def panel_of(key: str) -> Panel | None:
    """The panel that draws a series.

    Args:
        key: ``group/statistic``.

    Returns:
        The panel, or None if the series has none.

    Example:
        >>> panel_of("outputs/variance").reference
        'input'
    """
    return next((panel for panel in PANELS if panel.key == key), None)


def series_panel(
    key: str, *, reference: Reference | None = None, scale: Scale = "decades", part: str = "", doc: str = ""
) -> Panel:
    """A panel of any series, whether it is one of `PANELS` or not.

    Args:
        key: ``group/statistic``.
        reference: what levels are compared with; that of the panel in `PANELS` if None, else nothing.
        scale: log10 or the values themselves, which are compared with nothing.
        part: last name in the path of the sites to draw; all if empty.
        doc: what the statistic is.

    Returns:
        The panel.

    Example:
        >>> series_panel("norms/sigma_max").reference, series_panel("outputs/variance", scale="linear").reference
        ('none', 'none')
    """
    known = panel_of(key) or Panel(key, key, key, key.partition("/")[2], "none", doc)
    if scale == "linear":
        return replace(known, reference="none", scale=scale, part=part)
    return replace(known, reference=reference or known.reference, part=part)
