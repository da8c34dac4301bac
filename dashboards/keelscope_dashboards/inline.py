"""The dashboard of one run as the output of a notebook cell: what ``Run.dash()`` returns.

A thread of the process serves it on 127.0.0.1 until the process ends; a cell that runs again finds the server there.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from keelscope.errors import UsageError
from keelscope_dashboards.pages import PAGES, page_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["View", "show"]

PORT = 8050


@dataclass(frozen=True, slots=True)
class View:
    """A page of the dashboard; notebooks draw it."""

    url: str
    height: int

    def _repr_html_(self) -> str:
        frame = f'<iframe src="{escape(self.url)}" width="100%" height="{self.height}" style="border: 0"'
        return f'{frame} title="keelscope dashboard"></iframe>'


_SERVED: dict[Path, str] = {}
_LOCK = threading.Lock()


def show(path: Path, page: str = "", height: int = 900) -> View:
    """Serve a run, unless this process already does.

    Args:
        path: the run file.
        page: name of a page, the overview if empty.
        height: of the frame, in pixels.

    Returns:
        What the notebook draws.

    Raises:
        UsageError: if there is no such page.
    """
    if page and page_of(page) is None:
        names = ", ".join(one.name for one in PAGES)
        raise UsageError(f"The dashboard has no page {page!r}; its pages are {names}.")
    target = path.absolute()
    with _LOCK:
        if target not in _SERVED:
            _SERVED[target] = _started(target)
        return View(f"{_SERVED[target]}{page}", height)


def _started(path: Path) -> str:
    from keelscope_dashboards.app import create_app
    from keelscope_dashboards.index import RunIndex
    from keelscope_dashboards.server import listen, serve_on
    from keelscope_dashboards.verdicts import Judge

    listening = listen("127.0.0.1", PORT)
    server = create_app(RunIndex([path]), Judge(), framed=True).server
    threading.Thread(target=serve_on, args=(server, listening), daemon=True, name="keelscope-dash").start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}/"
