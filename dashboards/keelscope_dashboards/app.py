"""The Dash app: its pages, two callbacks, the HTTP interface and the guard on one Flask server.

Dash carries the words (run list, cards, findings) and the state of the controls. The dense data go straight from
`api` to the browser in binary and never pass through a callback.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dash import ClientsideFunction, Dash, Input, Output, State, no_update
from dash.exceptions import DependencyException
from flask import abort, request

from keelscope_dashboards import cards, guard
from keelscope_dashboards.api import blueprint
from keelscope_dashboards.page import whole_page
from keelscope_dashboards.pages import OVERVIEW, PAGES, page_of
from keelscope_dashboards.skeleton import skeleton
from keelscope_dashboards.state import run_states
from keelscope_dashboards.theme import DARK, LIGHT, Palette

if TYPE_CHECKING:
    from collections.abc import Collection

    from flask import Flask, Response

    from keelscope_dashboards.index import RunIndex
    from keelscope_dashboards.verdicts import Judge

__all__ = ["create_app"]

# Asks for the runs, and sets colours and page before anything is painted: no page flashes white or as another one.
_SCHEME = """
window.keelscope = { early: fetch("api/v1/state", { cache: "no-store" }).catch(() => null) };
keelscope.scheme = (chosen) => {
  let wish = chosen;
  try { // a frame of another site may have no storage
    if (chosen) localStorage.setItem("keelscope-scheme", chosen);
    wish = localStorage.getItem("keelscope-scheme");
  } catch (refused) {}
  const system = matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.dataset.scheme = wish || (system.matches ? "dark" : "light");
  return system;
};
keelscope.scheme().addEventListener("change", () => keelscope.scheme());
document.documentElement.dataset.page = location.pathname.split("/").pop() || "overview";
"""
_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<title>{%title%}</title>
{%favicon%}
{%css%}
<style>COLOURS</style>
<script>SCHEME</script>
</head>
<body>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>"""


ASSETS = Path(__file__).parent / "assets"
UNUSED = re.compile(r'<script src="[^"]*(?:/deps/polyfill@|/dash_table/)[^"]*"></script>\n?')
"""Scripts that Dash loads for browsers of 2018 and for tables, which cost a tenth of the start."""


def create_app(index: RunIndex, judge: Judge, *, hosts: Collection[str] = guard.LOOPBACK, framed: bool = False) -> Dash:
    """The app over one index of runs; its ``.server`` is an ordinary WSGI application.

    Args:
        index: the runs.
        judge: gives the verdicts.
        hosts: host names a browser may use.
        framed: whether pages of this machine, such as a notebook, may hold it in a frame.

    Returns:
        The app, never in debug mode.
    """
    app = Dash(
        __name__,
        title="keelscope",
        update_title="",
        assets_folder=str(ASSETS),
        index_string=_INDEX.replace("COLOURS", _variables()).replace("SCHEME", _SCHEME),
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
        serve_locally=True,
        enable_mcp=False,
        add_log_handler=False,
        suppress_callback_exceptions=True,  # else the layout travels twice
    )
    app.server.after_request(_keep_assets)
    app.layout = lambda: whole_page(run_states(index, judge), title=index.title)
    _paint_early(app, index, judge)
    _add_callbacks(app, index, judge)
    app.server.register_blueprint(blueprint(index, judge))
    _refuse_unknown(app.server)
    policy = guard.content_security_policy([*app.csp_hashes(), guard.script_hash(_SCHEME)], framed=framed)
    guard.install(app.server, hosts=hosts, policy=policy, framed=framed)
    return app


def _keep_assets(answer: Response) -> Response:
    """What carries its time of change in the address is never asked for again."""
    if request.path.startswith("/assets/") and answer.status_code == 200:
        kept = "public, max-age=31536000, immutable" if request.args.get("m") else "public, max-age=3600"
        answer.headers["Cache-Control"] = kept
    return answer


def _refuse_unknown(server: Flask) -> None:
    """Dash answers every unknown path with the page, and a wrong component path with an error: both become 404."""
    known = {f"/{page.name}" for page in PAGES}

    def stray() -> None:
        if (request.endpoint or "").endswith("<path:path>") and request.path not in known:
            abort(404)

    server.before_request(stray)
    server.register_error_handler(DependencyException, lambda _: ("Not found.", 404))


def _paint_early(app: Dash, index: RunIndex, judge: Judge) -> None:
    """Put the skeleton beside the entry point of the page."""
    whole = app.interpolate_index

    def with_skeleton(*, app_entry: str, scripts: str, **parts: str) -> str:
        page = page_of(request.path.strip("/")) or OVERVIEW
        first = skeleton(run_states(index, judge), index.title, page)
        return str(whole(app_entry=first + app_entry, scripts=UNUSED.sub("", scripts), **parts))

    app.interpolate_index = with_skeleton


def _add_callbacks(app: Dash, index: RunIndex, judge: Judge) -> None:
    app.clientside_callback(ClientsideFunction("keelscope", "boot"), Input("settings", "data"), State("digest", "data"))

    def words(digest: str, dealt: list[str] | None, drawn: str) -> tuple[Any, ...]:
        states = run_states(index, judge)
        listed = digest.partition(".")[0] == drawn.partition(".")[0]
        return (
            no_update if listed else cards.run_list(states),
            cards.verdict_cards(states, dealt),
            cards.findings(states),
            cards.findings_count(states),
            digest,
        )

    outputs = [Output(name, "children") for name in ("run-list", "cards", "findings", "findings-count")]
    inputs = (Input("digest", "data"), Input("dealt", "data"), State("drawn", "data"))
    app.callback(*outputs, Output("drawn", "data"), *inputs, prevent_initial_call=True)(words)


def _variables() -> str:
    """Both palettes as CSS variables."""
    return ":root{" + _colours(LIGHT) + "}[data-scheme=dark]{" + _colours(DARK) + "}"


def _colours(palette: Palette) -> str:
    runs = [f"--run-{i}:{colour}" for i, colour in enumerate(palette.runs)]
    named = [f"--{name}:{getattr(palette, name)}" for name in ("paper", "text", "muted", "grid", "axis")]
    return ";".join([*runs, *named, f"color-scheme:{palette.name}"])
