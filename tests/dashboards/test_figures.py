"""Figures: what is drawn is the data, in decades; nothing is offered for upload; no import of dash."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from keelscope.errors import UnknownNameError
from keelscope.store.schema import Site
from keelscope.store.series import Series
from keelscope_dashboards import figures
from keelscope_dashboards.theme import DARK

SITES = tuple(Site(f"layers.{i}", "Layer", "layer", "layers", i) for i in range(5))
RNG = np.random.default_rng(0)
VALUES = 10 ** RNG.normal(-4, 2, (7, 5))
GRADIENT = Series("gradients/rms", VALUES, np.arange(7) * 10, SITES)


def test_ten_to_the_colour_is_the_series() -> None:
    figure = figures.heatmap(GRADIENT, reference="none")
    np.testing.assert_allclose(10 ** np.asarray(figure.data[0].z), VALUES.T, rtol=1e-5)
    np.testing.assert_array_equal(figure.data[0].y, [1, 2, 3, 4, 5])
    np.testing.assert_allclose(figure.data[0].x, [-0.5, *range(5, 66, 10)])


def test_the_colour_is_the_distance_to_the_output_side() -> None:
    z = np.asarray(figures.heatmap(GRADIENT).data[0].z)
    np.testing.assert_allclose(10**z, (VALUES / VALUES[:, -1:]).T, rtol=1e-4)


def test_ten_to_the_profile_is_the_row() -> None:
    line = figures.depth_profile({"a": GRADIENT}, step=20).data[0]
    np.testing.assert_allclose(10 ** np.asarray(line.x), VALUES[2], rtol=1e-5)
    last = figures.depth_profile(GRADIENT).data[0]
    np.testing.assert_allclose(10 ** np.asarray(last.x), VALUES[-1], rtol=1e-5)


def test_ten_to_the_history_is_the_column() -> None:
    line = figures.history({"a": GRADIENT, "b": GRADIENT}, layer=4).data[1]
    np.testing.assert_allclose(10 ** np.asarray(line.y), VALUES[:, 3], rtol=1e-5)
    np.testing.assert_array_equal(line.x, GRADIENT.steps)


def test_cells_without_a_value_are_traces_of_their_own() -> None:
    values = VALUES.copy()
    values[0, 0], values[1, 1], values[2, 2] = 0, np.nan, np.inf
    broken = Series("gradients/rms", values, GRADIENT.steps, SITES)
    names = [trace.name for trace in figures.heatmap(broken).data if trace.name]
    assert names == ["exactly 0", "NaN", "Inf"]
    assert np.isnan(np.asarray(figures.heatmap(broken).data[0].z)[[0, 1, 2], [0, 1, 2]]).all()


def test_long_runs_are_pooled_to_a_bounded_number_of_columns() -> None:
    long = Series("gradients/rms", 10 ** RNG.normal(0, 1, (2500, 5)), np.arange(2500), SITES)
    z = np.asarray(figures.heatmap(long).data[0].z)
    assert z.shape == (5, 834)


@pytest.mark.parametrize("steps", [0, 1])
def test_short_series_are_drawn(steps: int) -> None:
    short = Series("gradients/rms", VALUES[:steps], GRADIENT.steps[:steps], SITES)
    assert len(figures.heatmap(short).data[0].x) in {0, 2}
    assert len(figures.history(short, layer=1).data[0].x) == steps


def test_an_unknown_layer_is_named() -> None:
    with pytest.raises(UnknownNameError, match="layer 6 does not exist; layers are 1 to 5"):
        figures.history(GRADIENT, layer=6)


def test_the_palette_is_followed() -> None:
    assert figures.heatmap(GRADIENT, palette=DARK).layout.paper_bgcolor == DARK.paper


def test_nothing_is_offered_for_upload() -> None:
    assert figures.CONFIG["showSendToCloud"] is False


def test_figures_do_not_import_dash() -> None:
    code = (
        "import sys, keelscope_dashboards.figures; print([n for n in ('dash', 'flask', 'torch') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
