"""The HTTP interface ``/api/v1``: state as JSON, tiles, profiles and histories as binary arrays. Nothing here writes.

Every answer is made from an id that the index knows; unknown ids, panels and paths are 404, values out of range 400.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, abort, jsonify, request
from flask.typing import ResponseReturnValue

from keelscope.errors import SeriesNotFoundError
from keelscope_dashboards.panels import PANELS, Panel
from keelscope_dashboards.state import digest_of, run_states, summary_of
from keelscope_dashboards.wire import encode_deviations, pack

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from keelscope_dashboards.followed import FollowedRun
    from keelscope_dashboards.index import RunIndex
    from keelscope_dashboards.verdicts import Judge

__all__ = ["blueprint"]

MAX_HISTORY_BINS = 2000


def blueprint(index: RunIndex, judge: Judge) -> Blueprint:
    """The routes over one index of runs.

    Args:
        index: the runs.
        judge: gives the verdicts.

    Returns:
        A blueprint to register on the server.
    """
    routes = Blueprint("api", __name__, url_prefix="/api")

    @routes.get("/v1/state")
    def state() -> ResponseReturnValue:
        states = run_states(index, judge)
        answer = jsonify({"title": index.title, "digest": digest_of(states), "runs": summary_of(states)})
        answer.add_etag()
        return answer.make_conditional(request)

    @routes.get("/v1/runs/<run_id>/tile")
    def tile(run_id: str) -> ResponseReturnValue:
        return _tile(_source(index, run_id), _panel(), start=_integer("from", 0))

    @routes.get("/v1/runs/<run_id>/profile")
    def profile(run_id: str) -> ResponseReturnValue:
        return _profile(_source(index, run_id), _panel(), step=_integer("step", None))

    @routes.get("/v1/runs/<run_id>/history")
    def history(run_id: str) -> ResponseReturnValue:
        bins = min(MAX_HISTORY_BINS, max(1, _integer("bins", 1000)))
        return _history(_source(index, run_id), _panel(), layer=_integer("layer", None), bins=bins)

    @routes.route("/", defaults={"rest": ""}, methods=["GET", "POST"])
    @routes.route("/<path:rest>", methods=["GET", "POST"])
    def unknown(rest: str) -> ResponseReturnValue:
        del rest
        abort(404)

    return routes


def _source(index: RunIndex, run_id: str) -> FollowedRun:
    source = index.get(run_id)
    if source is None:
        abort(404, "No run has that id.")
    return source


def _panel() -> Panel:
    name = request.args.get("panel", "")
    for panel in PANELS:
        if panel.name == name:
            return panel
    abort(404, "No panel has that name.")
    return None


def _integer(name: str, default: int | None) -> int:
    text = request.args.get(name, default)
    try:
        value = int(text) if text is not None else None
    except ValueError:
        value = None
    if value is None or abs(value) > 2**53:
        abort(400, f"{name} must be an integer.")
    return value


def _binary(body: bytes) -> Response:
    answer = Response(body, mimetype="application/octet-stream")
    answer.headers["Cache-Control"] = "no-store"
    return answer


def _tile(source: FollowedRun, panel: Panel, *, start: int) -> Response:
    try:
        with source.locked:
            tile, axis = source.tile(panel), source.axis(panel)
            version = {"revision": source.revision, "generation": source.generation}
    except SeriesNotFoundError:
        abort(404, "The run does not hold that series.")
    if not 0 <= start <= len(tile):
        abort(400, "from is not a bin of this tile.")
    part = tile.since(start)
    codes, unit = encode_deviations(part.deviations, part.kinds)
    labels, depths = (list(axis.labels), list(axis.depths)) if start == 0 else (None, None)
    header = {
        "from": start,
        "bins": len(tile),
        "layers": len(axis),
        "depth": axis.unit,
        "rows": tile.rows,
        "unit": unit,
        **version,
        "labels": labels,
        "depths": depths,
        "reference": panel.reference,
    }
    arrays: dict[str, NDArray[Any]] = {
        "first": part.first,
        "last": part.last,
        "reference": part.reference,
        "codes": codes,
    }
    return _binary(pack(header, arrays))


def _profile(source: FollowedRun, panel: Panel, *, step: int) -> Response:
    try:
        levels = source.profile(panel, step)
    except SeriesNotFoundError:
        abort(404, "The run does not hold that series.")
    header = {"step": int(levels.steps[0]) if len(levels.steps) else None}
    return _binary(pack(header, {"levels": levels.decades[:1].ravel(), "kinds": levels.kinds[:1].ravel()}))


def _history(source: FollowedRun, panel: Panel, *, layer: int, bins: int) -> Response:
    try:
        if not 0 <= layer < len(source.axis(panel)):
            abort(400, "The run has no such layer.")
        band = source.history(panel, layer, bins)
    except SeriesNotFoundError:
        abort(404, "The run does not hold that series.")
    arrays: dict[str, NDArray[Any]] = {
        "first": band.first,
        "last": band.last,
        "low": band.low,
        "high": band.high,
        "kinds": band.kinds,
    }
    return _binary(pack({"layer": layer}, arrays))
