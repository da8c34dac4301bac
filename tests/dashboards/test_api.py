"""The HTTP interface: shapes and values, and that ids are the only way to a file."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from keelscope.diagnosis.report import diagnose
from keelscope.store.reader import open_run
from keelscope_dashboards import wire


def run_id(app: Any, name: str) -> str:
    return next(run["id"] for run in app.client.get("/api/v1/state").json["runs"] if run["name"] == name)


def test_state_lists_the_runs_and_nothing_about_this_machine(three_runs: Any, runs_folder: Path) -> None:
    three_runs.judged()
    answer = three_runs.client.get("/api/v1/state")
    assert [run["name"] for run in answer.json["runs"]] == ["keel", "post_ln", "pre_ln"]
    assert [run["headline"] for run in answer.json["runs"]] == ["flat", "vanishing", "drifting"]
    keel = answer.json["runs"][0]
    assert (keel["status"], keel["rows"], keel["head"], keel["planned"]) == ("finished", 60, 590, 600)
    assert keel["panels"] == ["gradient", "late-token", "variance", "parameter-gradient"]
    assert str(runs_folder) not in answer.text


def test_an_unchanged_state_is_not_sent_again(three_runs: Any) -> None:
    three_runs.judged()
    tag = three_runs.client.get("/api/v1/state").headers["ETag"]
    assert three_runs.client.get("/api/v1/state", headers={"If-None-Match": tag}).status_code == 304


def test_a_tile_is_the_series(kit: ModuleType, three_runs: Any, runs_folder: Path) -> None:
    answer = three_runs.client.get(f"/api/v1/runs/{run_id(three_runs, 'post_ln')}/tile?panel=gradient")
    header, arrays = kit.unpack(answer.data)
    with open_run(runs_folder / "post_ln.h5") as run:
        truth = run["gradients/rms"].of("sublayers.*").values
    assert (header["bins"], header["layers"], header["rows"]) == (60, 64, 1)
    assert header["labels"][:2] == ["sublayers.0", "sublayers.1"]
    levels = arrays["codes"] * header["unit"] + arrays["reference"][:, None]
    np.testing.assert_allclose(levels, np.log10(truth), atol=0.0006)
    np.testing.assert_array_equal(arrays["first"], np.arange(60) * 10)


@pytest.mark.parametrize(("sublayers", "unit", "last"), [(0, "block", 6), (1, "sub-layer", 6), (2, "sub-layer", 12)])
def test_depth_is_counted_as_in_the_report(
    kit: ModuleType, tmp_path: Path, sublayers: int, unit: str, last: int
) -> None:
    path = kit.write_run(tmp_path / "run.h5", "keel", layers=6, steps=5, sublayers=sublayers)
    with kit.served(tmp_path) as app:
        header, _ = kit.unpack(app.client.get(f"/api/v1/runs/{run_id(app, 'run')}/tile?panel=gradient").data)
        assert f"over {last} {unit}s" in app.judged()["run"].verdict.sentence
    with open_run(path) as run:
        table = {layer.path: layer.depth for layer in diagnose(run).layers if layer.depth is not None}
    assert header["depth"] == unit
    assert dict(zip(header["labels"], header["depths"], strict=True)) == table
    assert header["depths"][-1] == last


def test_without_a_stack_depth_counts_modules(kit: ModuleType, tmp_path: Path) -> None:
    kit.write_run(tmp_path / "run.h5", "keel", layers=6, steps=5, sublayers=None)
    with kit.served(tmp_path) as app:
        header, _ = kit.unpack(app.client.get(f"/api/v1/runs/{run_id(app, 'run')}/tile?panel=gradient").data)
    assert (header["depth"], header["depths"]) == ("module", [1, 2, 3, 4, 5, 6, 7])
    assert header["labels"][0] == "embedding"


def test_the_tail_of_a_tile_is_its_end(kit: ModuleType, three_runs: Any) -> None:
    path = f"/api/v1/runs/{run_id(three_runs, 'keel')}/tile?panel=variance"
    whole, tail, beyond = (kit.unpack(three_runs.client.get(f"{path}&from={start}").data) for start in (0, 57, 61))
    assert beyond[0] == whole[0]  # the browser held a finer tile: it gets the new one whole
    np.testing.assert_array_equal(tail[1]["codes"], whole[1]["codes"][57:])
    assert tail[0]["bins"] == 60
    assert tail[0]["labels"] is None


def test_parameters_are_joined_per_layer(kit: ModuleType, three_runs: Any, runs_folder: Path) -> None:
    answer = three_runs.client.get(
        f"/api/v1/runs/{run_id(three_runs, 'keel')}/profile?panel=parameter-gradient&step=300"
    )
    _, arrays = kit.unpack(answer.data)
    with open_run(runs_folder / "keel.h5") as run:
        truth = run["parameter_gradients/norm"].at(300).reshape(64, 2)
    np.testing.assert_allclose(10 ** arrays["levels"], np.sqrt((truth**2).sum(axis=1)), rtol=1e-5)


@pytest.mark.parametrize(("step", "nearest"), [(-5, 0), (304, 300), (306, 310), (10**9, 590)])
def test_a_profile_is_the_nearest_recorded_step(kit: ModuleType, three_runs: Any, step: int, nearest: int) -> None:
    answer = three_runs.client.get(f"/api/v1/runs/{run_id(three_runs, 'keel')}/profile?panel=gradient&step={step}")
    assert kit.unpack(answer.data)[0]["step"] == nearest


def test_a_history_is_the_layer(kit: ModuleType, three_runs: Any, runs_folder: Path) -> None:
    path = f"/api/v1/runs/{run_id(three_runs, 'keel')}/history?panel=gradient&layer=3"
    with open_run(runs_folder / "keel.h5") as run:
        truth = np.log10(run["gradients/rms"].of("sublayers.3").values[:, 0])
    _, all_bins = kit.unpack(three_runs.client.get(path).data)
    np.testing.assert_allclose(all_bins["low"], truth, rtol=1e-5)
    _, ten_bins = kit.unpack(three_runs.client.get(f"{path}&bins=10").data)
    np.testing.assert_allclose(ten_bins["high"], truth.reshape(10, 6).max(axis=1), rtol=1e-5)


def test_broken_numbers_keep_their_kinds(kit: ModuleType, tmp_path: Path) -> None:
    kit.write_run(tmp_path / "broken.h5", "broken", layers=9, steps=40)
    with kit.served(tmp_path) as app:
        answer = app.client.get(f"/api/v1/runs/{run_id(app, 'broken')}/tile?panel=gradient")
        codes = kit.unpack(answer.data)[1]["codes"]
        assert app.judged()["broken"].verdict.headline == "non-finite"
    assert (codes[:20, :3] == wire.ZERO).all()
    assert (codes[30:, 4] == wire.NAN).all()
    assert codes[25, 8] == wire.INF
    assert (np.abs(codes[20:25]) < 32000).all()


@pytest.mark.parametrize("layers", [1, 2000])
@pytest.mark.parametrize("steps", [1, 3])
def test_any_depth_from_one_step_on(kit: ModuleType, tmp_path: Path, layers: int, steps: int) -> None:
    kit.write_run(tmp_path / "run.h5", "keel", layers=layers, steps=steps)
    with kit.served(tmp_path) as app:
        header, arrays = kit.unpack(app.client.get(f"/api/v1/runs/{run_id(app, 'run')}/tile?panel=gradient").data)
        assert arrays["codes"].shape == (steps, header["layers"])
        assert header["layers"] == layers
        assert app.judged()["run"].verdict.sentence


TRAVERSAL = (
    "..%2f..%2fetc%2fpasswd",
    "../../etc/passwd",
    "%2e%2e/%2e%2e/keel.h5",
    "keel.h5",
    "keel",
    "/etc/passwd",
    "....//",
    "%00",
    "a" * 5000,
)


@pytest.mark.parametrize("name", TRAVERSAL)
def test_a_path_is_never_an_id(three_runs: Any, name: str) -> None:
    for path in (f"/api/v1/runs/{name}/tile?panel=gradient", f"/api/v1/{name}", f"/api/{name}"):
        answer = three_runs.client.get(path)
        assert answer.status_code == 404
        assert b"root:" not in answer.data


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("tile?panel=nothing", 404),
        ("tile", 404),
        ("tile?panel=gradient&from=-1", 400),
        ("tile?panel=gradient&from=x", 400),
        ("profile?panel=gradient", 400),
        ("profile?panel=gradient&step=1e9", 400),
        ("profile?panel=gradient&step=99999999999999999999", 400),
        ("history?panel=gradient&layer=64", 400),
        ("history?panel=gradient&layer=-1", 400),
        ("history?panel=gradient&layer=0&bins=-4", 200),
    ],
)
def test_what_cannot_be_answered_is_refused(three_runs: Any, query: str, status: int) -> None:
    assert three_runs.client.get(f"/api/v1/runs/{run_id(three_runs, 'keel')}/{query}").status_code == status


def test_nothing_writes(three_runs: Any) -> None:
    for path in ("/api/v1/state", f"/api/v1/runs/{run_id(three_runs, 'keel')}/tile?panel=gradient"):
        for method in ("post", "put", "delete", "patch"):
            assert getattr(three_runs.client, method)(path).status_code in {404, 405}


@pytest.mark.parametrize(
    "path", ["/foo", "/foo/bar", "/api/", "/api//v1/state", "/assets/x", "/_dash-component-suites/dash/../x"]
)
def test_what_does_not_exist_is_not_found(three_runs: Any, path: str) -> None:
    assert three_runs.client.get(path).status_code == 404
