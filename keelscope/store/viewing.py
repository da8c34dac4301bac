"""`viewed`: a run file shown by whatever installed package shows runs. The store itself draws nothing."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from keelscope.errors import UsageError

__all__ = ["viewed"]

GROUP = "keelscope.viewers"


def viewed(path: Path | None, page: str, height: int) -> object:
    """Show a run.

    A viewer is an object of the entry point group ``keelscope.viewers``: called with the file, the page and the height
    in pixels, it returns what a notebook draws.

    Args:
        path: the run file.
        page: name of a page, the first if empty.
        height: pixels.

    Returns:
        What the viewer returns.

    Raises:
        UsageError: if the run lies in memory, or no viewer is installed.
    """
    if path is None:
        raise UsageError("A run in memory has no file to show; name one when recording: ks.watch(model, 'mine.h5').")
    found = next(iter(entry_points(group=GROUP)), None)
    if found is None:
        raise UsageError(f"No viewer is installed (entry point group {GROUP}); install keelscope with its dashboards.")
    return found.load()(path, page, height)
