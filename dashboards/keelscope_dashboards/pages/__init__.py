"""The pages of the dashboard, in the order of the navigation. One new page = one file and one entry of `PAGES`."""

from __future__ import annotations

from keelscope_dashboards.asking import Page
from keelscope_dashboards.pages import about, compare, curves, depth, diagnostics, gain, gates, heatmap, layer, paths

__all__ = ["OVERVIEW", "PAGES", "page_of"]

OVERVIEW = Page("overview", "Overview", "overview", "Where do gradients vanish, explode or stay flat?")
"""The page without a name in the address."""
PAGES: tuple[Page, ...] = (
    OVERVIEW,
    depth.PAGE,
    heatmap.PAGE,
    gain.PAGE,
    paths.PAGE,
    gates.PAGE,
    layer.PAGE,
    compare.PAGE,
    curves.PAGE,
    diagnostics.PAGE,
    about.PAGE,
)


def page_of(name: str) -> Page | None:
    """The page of a name.

    Args:
        name: as in the address.

    Returns:
        The page, None if there is none.

    Example:
        >>> page_of("depth").title, page_of("nothing")
        ('Depth profile', None)
    """
    return next((page for page in PAGES if page.name == name), None)
