"""Layer x step: any series as a large heatmap, on a linear, a logarithmic or a diverging scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from keelscope_dashboards.asking import Ask, Choice, Option, Page, nothing_chosen
from keelscope_dashboards.blocks import Heat
from keelscope_dashboards.depth import parts_of
from keelscope_dashboards.pages.depth import series_options
from keelscope_dashboards.panels import panel_of, series_panel
from keelscope_dashboards.rows import has

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keelscope_dashboards.blocks import Block

__all__ = ["PAGE"]

MOST_RUNS = 4


def _choices(ask: Ask) -> Sequence[Choice]:
    key = next(iter(ask.chosen.get("series", ())), "gradients/rms")
    known = panel_of(key)
    scales = (Option("diverging", "Decades vs reference"), Option("log", "Log"), Option("linear", "Linear"))
    against = (Option("output", "Output side"), Option("input", "Input side"), Option("median", "Depth median"))
    diverging = ask.chosen.get("scale", ("diverging",)) == ("diverging",)
    parts = _parts(ask, key)
    return (
        Choice("series", "Series", series_options(ask), ("gradients/rms",), look="select"),
        Choice("scale", "Colours", scales, ("diverging",)),
        Choice("against", "Reference", against if diverging else (), (known.reference if known else "output",)),
        Choice("part", "Part", tuple(Option(part, part) for part in parts), parts[:1], look="select"),
        Choice("of", "Runs", (Option("focus", "Focused"), Option("all", "All shown")), ("focus",)),
    )


def _parts(ask: Ask, key: str) -> tuple[str, ...]:
    """What lies side by side at every depth, for example two norms."""
    return parts_of(ask.focus.source.axis(series_panel(key))) if has(ask.focus, key) else ()


def _build(ask: Ask) -> Sequence[Block]:
    key = ask.one("series")
    if not key:
        return [nothing_chosen(f"{ask.focus.name} holds no series over depth and steps.")]
    wanted = ask.runs if ask.one("of") == "all" else (ask.focus,)
    shown = [one for one in wanted if has(one, key)][:MOST_RUNS]
    return [_heat(ask, one.id, one.name, key, large=len(shown) == 1) for one in shown]


def _heat(ask: Ask, run: str, name: str, key: str, *, large: bool) -> Heat:
    scale = ask.one("scale")
    unit: Literal["decades", "linear"] = "linear" if scale == "linear" else "decades"
    reference = ask.one("against") if scale == "diverging" else "none"
    size: Literal["large", "medium"] = "large" if large else "medium"
    part, diverging = ask.one("part"), scale == "diverging"
    return Heat(name, run, key, unit, reference, diverging=diverging, part=part, size=size, doc=key)


PAGE = Page(
    "heatmap",
    "Layer \N{MULTIPLICATION SIGN} step",
    "grid",
    "Where and when does a quantity leave its usual level?",
    _build,
    _choices,
)
