"""Colours of the dashboard: two diverging maps, the symmetric log scale they sit on, run colours, figure layout.

The maps are drawn from a few anchors of our own and interpolated in a perceptual space (OKLab, Ottosson 2020). Blue
is below the reference, brown is above. `figures` uses them in Python; the app sends the same tables to the browser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "DARK",
    "LIGHT",
    "LIMIT",
    "MARKS",
    "SHADES",
    "SYMBOLS",
    "TICKS",
    "Palette",
    "colour_table",
    "colourscale",
    "style_of",
    "symlog",
    "symlog_inverse",
]

LIMIT = 16.0
"""Decades at the ends of the colour scale."""
TICKS = (-16, -3, -1, 0, 1, 3, 16)
"""Decades named on the colour scale."""
MARKS = (("exactly 0", "#8a8f98"), ("NaN", "#c2257a"), ("Inf", "#7b2fbe"))
"""Names and colours of cells that hold no level, the same in both themes."""
SHADES = 33
"""Colours of a heatmap on a page without scripts."""
_KNEE = 0.5  # decades below which the scale is close to linear
_SPAN = float(np.log1p(LIMIT / _KNEE))


@dataclass(frozen=True, slots=True)
class Palette:
    """Everything that differs between the light and the dark theme."""

    name: str
    anchors: tuple[str, ...]
    """Diverging map from ``-LIMIT`` to ``LIMIT`` decades, evenly spaced on the symmetric log scale."""
    ramp: tuple[str, ...]
    """One-sided map from the smallest to the largest value."""
    runs: tuple[str, ...]
    """Line colours; told apart by marker shape too."""
    paper: str
    text: str
    muted: str
    grid: str
    axis: str


LIGHT = Palette(
    name="light",
    anchors=("#081d58", "#1f5ba3", "#74acd5", "#c9dfee", "#f3f1ee", "#f5d6bf", "#e0935f", "#b04a1c", "#5a1205"),
    ramp=("#f4f1ea", "#d5dfd3", "#a3c6c4", "#6aa3b8", "#3f7aa5", "#2b4f86", "#1c2a58"),
    runs=("#0072b2", "#b26a00", "#8c3c78", "#0f6f3c", "#ed2e65", "#032497", "#6c0004", "#097af9"),
    paper="#ffffff",
    text="#1b2028",
    muted="#5a6472",
    grid="#e9ecf0",
    axis="#aab2bd",
)
DARK = Palette(
    name="dark",
    anchors=("#9fd0ff", "#5fa3e6", "#32699f", "#1f3f5c", "#16191d", "#4a2c1d", "#8f4d26", "#dd8247", "#ffc9a6"),
    ramp=("#1a1d24", "#22354d", "#2a567a", "#3b7f9b", "#63a8ac", "#a3cdb8", "#eaf0cf"),
    runs=("#4fa8e0", "#f0a93b", "#f0b4de", "#56faa0", "#ee4253", "#8971ed", "#94b590", "#e647a5"),
    paper="#171a1f",
    text="#e8eaed",
    muted="#9aa3af",
    grid="#262b32",
    axis="#4b535e",
)
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "hexagon", "cross", "x")
"""Marker of each run, in the order of `Palette.runs`."""


def symlog(decades: NDArray[np.floating]) -> NDArray[np.float64]:
    """Place decades on the colour scale: ``sign(d) log(1 + |d| / 0.5) / log(1 + 16 / 0.5)``, clipped to [-1, 1].

    Args:
        decades: any shape; NaN stays NaN.

    Returns:
        Positions of the same shape.

    Example:
        >>> symlog(np.array([-16.0, 0.0, 16.0, 400.0])).tolist()
        [-1.0, 0.0, 1.0, 1.0]
    """
    wide = np.asarray(decades, dtype=np.float64)
    return np.clip(np.sign(wide) * np.log1p(np.abs(wide) / _KNEE) / _SPAN, -1.0, 1.0)


def symlog_inverse(positions: NDArray[np.floating]) -> NDArray[np.float64]:
    """Decades at positions of the colour scale.

    Args:
        positions: in [-1, 1], any shape.

    Returns:
        Decades of the same shape.

    Example:
        >>> symlog_inverse(symlog(np.array([-3.0, 0.25]))).round(12).tolist()
        [-3.0, 0.25]
    """
    wide = np.asarray(positions, dtype=np.float64)
    return np.asarray(np.sign(wide) * _KNEE * np.expm1(np.abs(wide) * _SPAN), dtype=np.float64)


def colour_table(palette: Palette, size: int = 255, *, ramp: bool = False) -> NDArray[np.uint8]:
    """Colours ``[size, 3]`` from the lowest to the highest end, evenly spaced on the symmetric log scale.

    Args:
        palette: the theme.
        size: number of colours; odd, so that the middle one is the reference.
        ramp: the one-sided map instead of the diverging one.

    Returns:
        sRGB, 0 to 255.
    """
    anchors = _oklab(np.array([_rgb(colour) for colour in (palette.ramp if ramp else palette.anchors)]))
    at, knots = np.linspace(0, 1, size), np.linspace(0, 1, len(anchors))
    mixed = np.stack([np.interp(at, knots, anchors[:, k]) for k in range(3)], axis=1)  # [size, 3]
    return np.asarray(np.rint(_srgb(mixed) * 255), dtype=np.uint8)


def colourscale(palette: Palette, size: int = 65) -> list[list[Any]]:
    """The map as a Plotly colour scale whose axis is true decades from ``-LIMIT`` to ``LIMIT``.

    Args:
        palette: the theme.
        size: number of colours.

    Returns:
        Pairs of position in [0, 1] and colour.
    """
    decades = symlog_inverse(np.linspace(-1, 1, size))
    positions = np.clip((decades + LIMIT) / (2 * LIMIT), 0.0, 1.0)
    positions[0], positions[-1] = 0.0, 1.0
    return [
        [float(p), f"rgb({r},{g},{b})"] for p, (r, g, b) in zip(positions, colour_table(palette, size), strict=True)
    ]


def style_of(palette: Palette) -> str:
    """A theme as CSS variables: for pages whose pictures take their colours from style sheets.

    Args:
        palette: the theme.

    Returns:
        Declarations of ``--page --ink --soft --grid --axis --lost --gained --run0 ... --k0 ...``.
    """
    named = {
        "page": palette.paper,
        "ink": palette.text,
        "soft": palette.muted,
        "grid": palette.grid,
        "axis": palette.axis,
        "lost": palette.anchors[1],
        "gained": palette.anchors[-2],
    }
    named |= {f"run{i}": colour for i, colour in enumerate(palette.runs[:4])}
    named |= {f"k{i}": "#{:02x}{:02x}{:02x}".format(*colour) for i, colour in enumerate(colour_table(palette, SHADES))}
    return " ".join(f"--{name}: {colour};" for name, colour in named.items())


_TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def _rgb(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def _oklab(srgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[n, 3]`` sRGB in [0, 1] to OKLab."""
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return np.asarray(np.cbrt(linear @ _TO_LMS.T) @ _TO_LAB.T, dtype=np.float64)


def _srgb(lab: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[n, 3]`` OKLab to sRGB clipped to [0, 1]."""
    lms = (lab @ np.linalg.inv(_TO_LAB).T) ** 3
    linear = np.clip(lms @ np.linalg.inv(_TO_LMS).T, 0.0, 1.0)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
