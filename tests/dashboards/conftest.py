"""Synthetic runs with known shapes, written through the store's own writers."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from dash import Dash
from flask.testing import FlaskClient
from werkzeug.serving import make_server

from keelscope.store.memory import MemoryWriter
from keelscope.store.reader import Run
from keelscope.store.schema import GroupSpec, Row, RunInfo, RunLayout, Site, Stack, StatisticSpec
from keelscope.store.writer import RunWriter
from keelscope_dashboards.app import create_app
from keelscope_dashboards.index import RunIndex
from keelscope_dashboards.state import RunState, run_states
from keelscope_dashboards.verdicts import Judge

PER_LAYER = ("attn.weight", "attn.bias")
CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT = 20_000  # ms, for a loaded machine


def layout_of(
    layers: int, *, title: str = "run", scheme: str = "keel", planned: int = 0, sublayers: int | None = 1
) -> RunLayout:
    """A stack of `layers` entries (none known if `sublayers` is None) after an embedding, two parameters in each."""

    def place(i: int) -> tuple[str, str, int]:
        return ("other", "", -1) if sublayers is None else ("layer", "sublayers", i)

    modules = (
        Site("embedding", "Embedding", numel=8),
        *(Site(f"sublayers.{i}", "Sublayer", *place(i), 8) for i in range(layers)),
    )
    parameters = tuple(
        Site(f"sublayers.{i}.{name}", "Parameter", "parameter", "sublayers", i, 4)
        for i in range(layers)
        for name in PER_LAYER
    )
    counts = StatisticSpec("nonfinite_count", "1", "Number of NaN and infinite entries.")
    rms = StatisticSpec("rms", "", "Root mean square.")
    late = StatisticSpec("late_token_level", "log10", "Mean log10 of the late per-token norms.")
    variance = StatisticSpec("variance", "", "Variance.")
    norm = StatisticSpec("norm", "", "Euclidean norm.")
    groups = (
        GroupSpec("outputs", (variance, counts), modules),
        GroupSpec("gradients", (rms, late, counts), modules),
        GroupSpec("parameter_gradients", (norm,), parameters),
    )
    config = {"scheme": scheme, "steps": planned} if planned else {"scheme": scheme}
    stacks = () if sublayers is None else (Stack("sublayers", "Sublayer", layers, sublayers, main=True),)
    info = RunInfo(
        title=title,
        run_id="0" * 32,
        created_at="2026-01-01T00:00:00Z",
        model_class="Transformer",
        n_parameters=1000,
        device="cpu",
        seed=0,
        stacks=stacks,
        config=config,
    )
    return RunLayout(info, groups, ("loss",))


def row_of(step: int, gradient: np.ndarray, variance: np.ndarray, *, loss: float = 1.0) -> Row:
    """One step from the stack's gradient RMS and output variance ``[layer]``."""
    with np.errstate(divide="ignore"):
        late = np.log10(gradient)
    bad = (~np.isfinite(gradient)).astype(float)
    values = {
        "outputs": {"variance": _after(variance[0], variance), "nonfinite_count": _after(0.0, bad * 0)},
        "gradients": {
            "rms": _after(gradient[0], gradient),
            "late_token_level": _after(late[0], late),
            "nonfinite_count": _after(0.0, bad),
        },
        "parameter_gradients": {"norm": np.repeat(gradient * 3, len(PER_LAYER))},
    }
    return Row(step, step * 0.1, values, {"loss": loss})


def _after(first: float, rest: np.ndarray) -> np.ndarray:
    return np.concatenate([[first], rest])


def rows_of(kind: str, layers: int, steps: int, *, every: int = 10, seed: int = 0) -> list[Row]:
    """Rows of a run that is flat (keel), drifting (pre_ln), vanishing (post_ln) or broken (zeros, NaN, Inf)."""
    rng = np.random.default_rng(seed)
    texture = 0.08 * np.sin(np.linspace(0, 17, layers) + rng.uniform(0, 6)) + rng.normal(0, 0.05, layers)
    depth = np.linspace(-1, 0, layers) if layers > 1 else np.zeros(1)  # -1 at the input
    rows = []
    for i in range(steps):
        trained = i / max(1, steps - 1)
        noise = texture + rng.normal(0, 0.04, layers)
        level, growth = _SHAPES[kind](depth, trained)
        gradient = 10 ** (-3 - 0.4 * trained + level + noise)
        if kind == "broken":
            _break(gradient, i)
        variance = 10 ** (growth + rng.normal(0, 0.01, layers))
        rows.append(row_of(i * every, gradient, variance, loss=3.5 - 2 * trained))
    return rows


_SHAPES: dict[str, Callable[[np.ndarray, float], tuple[np.ndarray, np.ndarray]]] = {
    "keel": lambda depth, trained: (0.1 * depth + 0.1 * np.sin(9 * depth), 0.05 * depth),
    "pre_ln": lambda depth, trained: (-1.4 * depth, 2.4 * np.log10(2 + depth) * (1 + trained)),
    "post_ln": lambda depth, trained: ((13 - 6 * trained) * depth, 0 * depth),
    "broken": lambda depth, trained: (2 * depth, 0 * depth),
}


def _break(gradient: np.ndarray, i: int) -> None:
    """Zeros near the input at the start, one NaN layer later, one Inf."""
    layers = len(gradient)
    if i < 20:
        gradient[: layers // 3] = 0
    if i >= 30:
        gradient[layers // 2] = np.nan
    if i == 25:
        gradient[layers - 1] = np.inf


def write_run(
    path: Path, kind: str, *, layers: int = 64, steps: int = 60, every: int = 10, seed: int = 0, **layout: Any
) -> Path:
    """A finished run file."""
    planned = steps * every
    writer = RunWriter(path, layout_of(layers, title=path.stem, scheme=kind, planned=planned, **layout))
    for row in rows_of(kind, layers, steps, every=every, seed=seed):
        writer.append(row)
    writer.close()
    return Path(writer.path)


def memory_run(kind: str, *, layers: int = 64, steps: int = 60, every: int = 10) -> Run:
    """A run that never touches the disk."""
    writer = MemoryWriter(layout_of(layers, scheme=kind))
    for row in rows_of(kind, layers, steps, every=every):
        writer.append(row)
    return writer.run()


def unpack(body: bytes) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """Header and arrays of a binary answer, as assets/wire.js reads them."""
    length = int.from_bytes(body[:4], "little")
    header = json.loads(body[4 : 4 + length])
    at, arrays = 4 + length, {}
    for name, dtype, shape in header.pop("arrays"):
        assert at % 8 == 0
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[name] = np.frombuffer(body[at : at + size], dtype=dtype).reshape(shape)
        at += -(-size // 8) * 8
    assert at == len(body)
    return header, arrays


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The functions of this file, for tests that make their own runs."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs as ``keelscope train keel post_ln pre_ln`` leaves them."""
    folder = tmp_path_factory.mktemp("runs")
    for i, kind in enumerate(("keel", "post_ln", "pre_ln")):
        write_run(folder / f"{kind}.h5", kind, seed=i)
    return folder


@dataclass
class Served:
    """The app over some folder, without a server."""

    app: Dash
    index: RunIndex
    judge: Judge

    @property
    def client(self) -> FlaskClient:
        return self.app.server.test_client()

    def judged(self) -> dict[str, RunState]:
        """States by name once every run has its verdict."""
        end = time.monotonic() + 120  # of a loaded machine
        while time.monotonic() < end:
            states = run_states(self.index, self.judge)
            if all(state.verdict.headline != "pending" for state in states):
                return {state.name: state for state in states}
            time.sleep(0.02)
        raise AssertionError("the verdicts never came")


@contextmanager
def served(*targets: Path) -> Iterator[Served]:
    """An app over run files and folders, closed at the end."""
    index, judge = RunIndex(targets), Judge()
    try:
        yield Served(create_app(index, judge), index, judge)
    finally:
        judge.close()
        index.close()


@pytest.fixture(scope="module")
def three_runs(runs_folder: Path) -> Iterator[Served]:
    """The app over keel, post_ln and pre_ln."""
    with served(runs_folder) as app:
        yield app


@contextmanager
def at_port(app: Any, port: int = 0) -> Iterator[str]:
    server = make_server("127.0.0.1", port, app.app.server, threaded=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def desk(browser: Any) -> Iterator[Any]:
    """One profile for most tests, so that scripts are fetched and compiled once."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
    yield context
    context.close()


@pytest.fixture
def visit(browser: Any, desk: Any, site: str) -> Iterator[Callable[..., Any]]:
    """Opens a page and, at the end, checks that nothing went wrong on it and nothing left this machine."""
    opened, trouble = [], []

    def noted(text: str, lost: bool) -> None:
        closed = "ERR_SOCKET_NOT_CONNECTED" in text  # a connection was taken up that was just closed as idle
        if not closed and not (lost and "ERR_CONNECTION" in text):
            trouble.append(text)

    def open_page(query: str = "", *, url: str = site, lost: bool = False, **profile: Any) -> Any:
        page = (browser.new_context(**profile) if profile else desk).new_page()
        opened.append(page.context if profile else page)
        page.set_default_timeout(WAIT)
        page.on("console", lambda message: noted(message.text, lost) if message.type in {"error", "warning"} else None)
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda request: trouble.append(request.url) if outside(request.url, url) else None)
        page.goto(url + query)
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    for one in opened:
        one.close()
    assert trouble == []


def outside(asked: str, url: str) -> bool:
    return not asked.startswith((url, "data:", "blob:"))


SUBLAYER_STATISTICS = (
    "alpha",
    "branch_gain",
    "cosine",
    "shortcut_gain",
    "predicted_slope",
    "input_gradient",
    "shortcut_part",
    "branch_part",
    "path_cosine",
    "shortcut_only_gradient",
)
GATE_STATISTICS = ("value", "minimum", "maximum", "saturated_fraction", "gradient")


def write_paths_run(path: Path, *, layers: int = 12, steps: int = 6, seed: int = 0) -> Path:
    """A finished run with the groups ``sublayers`` and ``gates``, whose numbers are random but positive."""
    rng = np.random.default_rng(seed)
    layout = layout_of(layers, title=path.stem, scheme="keel", planned=steps * 10)
    branches = tuple(Site(f"sublayers.{i}.branch", "x + F(x)", "sublayer", "sublayers", i) for i in range(layers))
    weights = tuple(Site(f"sublayers.{i}.alpha", "learnable scalar", "gate", "sublayers", i, 1) for i in range(layers))
    extra = tuple(
        GroupSpec(name, tuple(StatisticSpec(one, "1", one) for one in statistics), sites)
        for name, statistics, sites in (
            ("sublayers", SUBLAYER_STATISTICS, branches),
            ("gates", GATE_STATISTICS, weights),
        )
    )
    writer = RunWriter(path, RunLayout(layout.info, (*layout.groups, *extra), layout.scalars))
    for row in rows_of("keel", layers, steps, seed=seed):
        more = {group.name: {spec.name: rng.uniform(0.1, 0.9, layers) for spec in group.statistics} for group in extra}
        more["gates"]["gradient"][2] = 0.0
        writer.append(Row(row.step, row.wall_time, {**row.values, **more}, row.scalars))
    writer.close()
    return Path(writer.path)


@pytest.fixture(scope="session")
def recorded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three small transformers as ``keelscope train`` really records them, and a run with paths and gates."""
    from keelscope.cli import main

    folder = tmp_path_factory.mktemp("recorded")
    sizes = "--depth 8 --width 16 --heads 2 --steps 12 --every 1 --batch-size 2 --length 32 --json"
    main(["train", "keel", "post_ln", "pre_ln", *sizes.split(), "--probes", "default", "--out", str(folder)])
    write_paths_run(folder / "with_paths.h5", layers=8)
    return folder


@pytest.fixture(scope="module")
def recorded(recorded_folder: Path) -> Iterator[Served]:
    """The app over what was recorded, every verdict ready."""
    with served(recorded_folder) as app:
        app.judged()
        yield app
