"""The HTTP interface ``/api/v1``: state as JSON, tiles, profiles and histories as binary arrays. Nothing here writes.

Every answer is made from an id that the index knows; unknown ids, panels and paths are 404, values out of range 400.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, get_args

from flask import Blueprint, Response, abort, jsonify, request
from flask.typing import ResponseReturnValue

from keelscope.errors import RunFileError, SeriesNotFoundError
from keelscope_dashboards.asking import Ask, Page, Shown, settled
from keelscope_dashboards.blocks import encoded
from keelscope_dashboards.pages import page_of
from keelscope_dashboards.panels import PANELS, Panel, Reference, Scale, series_panel
from keelscope_dashboards.rows import groups_of
from keelscope_dashboards.state import RunState, digest_of, run_states, summary_of
from keelscope_dashboards.tables import tile_csv
from keelscope_dashboards.wire import RESOLUTION, encode_deviations, pack

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from keelscope_dashboards.followed import FollowedRun
    from keelscope_dashboards.index import RunIndex
    from keelscope_dashboards.verdicts import Judge

__all__ = ["blueprint"]

MAX_HISTORY_BINS = 2000
MAX_RUNS = 8  # of one page
SECONDS = 0.4  # one answer may read a long run; the browser asks again for the rest


def blueprint(index: RunIndex, judge: Judge) -> Blueprint:
    """The routes over one index of runs.

    Args:
        index: the runs.
        judge: gives the verdicts.

    Returns:
        A blueprint to register on the server.
    """
    routes = Blueprint("api", __name__, url_prefix="/api")

    @routes.errorhandler(RunFileError)
    def unreadable(error: RunFileError) -> ResponseReturnValue:
        del error  # it may tell a path; the run list says what is wrong
        return Response("The run cannot be read.", 404, mimetype="text/plain")

    @routes.get("/v1/state")
    def state() -> ResponseReturnValue:
        states = run_states(index, judge)
        answer = jsonify({"title": index.title, "digest": digest_of(states), "runs": summary_of(states)})
        answer.add_etag()
        return answer.make_conditional(request)

    @routes.get("/v1/runs/<run_id>/tile")
    def tile(run_id: str) -> ResponseReturnValue:
        source = _source(index, run_id)
        return _tile(source, _panel(source), start=_integer("from", 0))

    @routes.get("/v1/runs/<run_id>/table.csv")
    def table(run_id: str) -> ResponseReturnValue:
        source = _source(index, run_id)
        return _table(source, _panel(source))

    @routes.get("/v1/runs/<run_id>/profile")
    def profile(run_id: str) -> ResponseReturnValue:
        source = _source(index, run_id)
        return _profile(source, _panel(source), step=_integer("step", None))

    @routes.get("/v1/runs/<run_id>/history")
    def history(run_id: str) -> ResponseReturnValue:
        bins = min(MAX_HISTORY_BINS, max(1, _integer("bins", 1000)))
        source = _source(index, run_id)
        return _history(source, _panel(source), layer=_integer("layer", None), bins=bins)

    @routes.get("/v1/pages/<name>")
    def page(name: str) -> ResponseReturnValue:
        found = page_of(name)
        if found is None or found.build is None:
            abort(404, "No page has that name.")
        return _page(found, _ask(index, judge))

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


def _panel(source: FollowedRun) -> Panel:
    """One of the panels, or any series over ``[step, site]`` that the run holds, drawn as the query says."""
    name = request.args.get("panel", "")
    key = next((panel.key for panel in PANELS if panel.name == name), name)
    if key == name and not _is_plain(source, key):
        abort(404, "No panel has that name.")
    reference, scale = request.args.get("reference"), request.args.get("scale", "decades")
    if scale not in get_args(Scale) or (reference is not None and reference not in get_args(Reference)):
        abort(400, "scale is decades or linear; reference is output, input, median or none.")
    panel = series_panel(key, reference=reference, scale=scale, part=request.args.get("part", ""))  # type: ignore[arg-type]  # checked above
    if not panel.part:  # nothing to look up, so nobody waits for whoever reads the run
        return panel
    with source.reading() as run:
        if panel.group in run.groups and not len(source.axis(panel)):
            abort(404, "No site of that series has that name.")
    return panel


def _is_plain(source: FollowedRun, key: str) -> bool:
    group, _, name = key.partition("/")
    with source.reading() as run:
        return name in groups_of(run).get(group, ())


def _ask(index: RunIndex, judge: Judge) -> Ask:
    """The runs and the cursor of the query; an id that no run has is not found."""
    states = {state.id: state for state in run_states(index, judge)}
    focus = request.args.get("run", "")
    named = [one for one in request.args.get("runs", "").split(",") if one]
    if focus not in states or any(one not in states for one in named):
        abort(404, "No run has that id.")
    if states[focus].error:
        abort(404, "That run cannot be read.")
    wanted = dict.fromkeys([focus, *named][:MAX_RUNS])
    runs = tuple(_shown(index, judge, one) for one in states.values() if one.id in wanted and not one.error)
    own = next(one for one in runs if one.id == focus)
    return Ask(runs, own, step=_integer("step", 2**53), depth=_integer("depth", 1))


def _shown(index: RunIndex, judge: Judge, state: RunState) -> Shown:
    return Shown(state.id, state.name, state.slot, _source(index, state.id), state.verdict, judge.report(state.id))


def _page(page: Page, ask: Ask) -> Response:
    """The blocks of a page, with its controls as they are set."""
    wished = {name: tuple(value.split(",")) for name, value in request.args.items()}
    choices = page.choices(replace(ask, chosen=wished))
    chosen = {choice.name: settled(choice, wished.get(choice.name, ())) for choice in choices}
    blocks, arrays = encoded(list(page.build(replace(ask, chosen=chosen)) if page.build else ()))
    controls = [{**asdict(choice), "chosen": chosen[choice.name]} for choice in choices]
    return _binary(pack({"page": page.name, "choices": controls, "blocks": blocks}, arrays))


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
        version = {"revision": source.revision, "generation": source.generation}
        look = source.look(panel, SECONDS)
    except SeriesNotFoundError:
        abort(404, "The run does not hold that series.")
    tile, axis = look.tile, look.axis
    if start < 0:
        abort(400, "from is not a bin of this tile.")
    start = start if start <= len(tile) else 0  # the tile that the browser holds was finer
    part = tile.since(start)
    resolution = RESOLUTION if panel.scale == "decades" else 0.0
    codes, unit = encode_deviations(part.deviations, part.kinds, resolution)
    labels, depths = (list(axis.labels), list(axis.depths)) if start == 0 else (None, None)
    header = {
        "from": start,
        "bins": len(tile),
        "layers": len(axis),
        "depth": axis.unit,
        "rows": tile.rows,
        "unit": unit,
        **version,
        "behind": look.behind,
        "labels": labels,
        "depths": depths,
        "reference": panel.reference,
        "scale": panel.scale,
    }
    arrays: dict[str, NDArray[Any]] = {
        "first": part.first,
        "last": part.last,
        "reference": part.reference,
        "codes": codes,
    }
    return _binary(pack(header, arrays))


def _table(source: FollowedRun, panel: Panel) -> Response:
    try:
        with source.locked:
            tile, axis = source.tile(panel), source.axis(panel)
    except SeriesNotFoundError:
        abort(404, "The run does not hold that series.")
    answer = Response(tile_csv(tile, axis, panel, source.name), mimetype="text/csv")
    answer.headers["Cache-Control"] = "no-store"
    answer.headers["Content-Disposition"] = "attachment"
    return answer


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
