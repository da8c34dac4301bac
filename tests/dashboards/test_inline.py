"""``Run.dash()``: the dashboard of one run in a frame of a notebook."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from urllib.request import Request, urlopen

import pytest

from keelscope.errors import UsageError
from keelscope.store import viewing
from keelscope.store.reader import open_run
from keelscope_dashboards.inline import View

VIEWER = EntryPoint("inline", "keelscope_dashboards.inline:show", viewing.GROUP)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewing, "entry_points", lambda group: [VIEWER] if group == viewing.GROUP else [])


def shown(path: Path, page: str = "") -> View:
    with open_run(path) as run:
        view = run.dash(page, height=500)
    assert isinstance(view, View)
    return view


def test_a_notebook_gets_a_frame_that_it_may_hold(kit: ModuleType, tmp_path: Path) -> None:
    path = kit.write_run(tmp_path / "one.h5", "keel", layers=4, steps=3)
    view = shown(path)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", view.url)
    assert view._repr_html_().startswith(f'<iframe src="{view.url}" width="100%" height="500"')
    frame = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
    with urlopen(Request(view.url, headers=frame)) as answer:
        assert "one" in answer.read().decode()
        assert "frame-ancestors http://127.0.0.1:* http://localhost:*" in answer.headers["Content-Security-Policy"]
        assert "X-Frame-Options" not in answer.headers
    assert shown(path, "depth").url == f"{view.url}depth"


def test_what_cannot_be_shown_is_said(kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kit.write_run(tmp_path / "one.h5", "keel", layers=4, steps=3)
    with pytest.raises(UsageError, match="has no page 'nonsense'; its pages are overview, depth"):
        shown(path, "nonsense")
    with pytest.raises(UsageError, match="A run in memory has no file"):
        kit.memory_run("keel", layers=4, steps=2).dash()
    monkeypatch.setattr(viewing, "entry_points", lambda group: [])
    with pytest.raises(UsageError, match="No viewer is installed"):
        shown(path)


def test_the_package_names_the_viewer() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'[project.entry-points."{VIEWER.group}"]\n{VIEWER.name} = "{VIEWER.value}"' in text
