"""The scripts of the page against Python: decoding, pooling, bins, colours and number texts agree."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keelscope_dashboards import wire
from keelscope_dashboards.figures import edges_of
from keelscope_dashboards.levels import Kind, Levels
from keelscope_dashboards.pooling import pool
from keelscope_dashboards.theme import LIGHT, LIMIT, colour_table, symlog

ASSETS = Path(wire.__file__).parent / "assets"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="the scripts are tested with node, which is not installed")
RANK = {wire.ABSENT: 0, wire.ZERO: 2, wire.NAN: 3, wire.INF: 4}


def run(expression: str, **values: Any) -> Any:
    """The value of an expression over the pure functions, as JSON; `values` are its variables."""
    program = (
        "globalThis.window = globalThis;\n"
        + (ASSETS / "wire.js").read_text()
        + (ASSETS / "paint.js").read_text()
        + f"const ks = window.keelscope, given = {json.dumps(values)};\n"
        + f"process.stdout.write(JSON.stringify({expression}, (_, v) => ArrayBuffer.isView(v) ? [...v] : v));\n"
    )
    done = subprocess.run([str(NODE), "-"], input=program, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tile() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    kinds = rng.choice(np.array([0, 1, 1, 1, 1, 1, 2, 3, 4], dtype=np.uint8), (23, 5))
    decades = np.where(kinds == Kind.VALUE, rng.normal(0, 4, (23, 5)), 0).astype(np.float32)
    steps = np.cumsum(rng.integers(1, 40, 23))
    levels = Levels(decades, kinds, rng.normal(0, 1, 23).astype(np.float32), steps)
    pooled = pool(levels, 3)
    codes, unit = wire.encode_deviations(pooled.deviations, pooled.kinds)
    return {
        "first": pooled.first,
        "last": pooled.last,
        "reference": pooled.reference,
        "codes": codes,
        "unit": np.array(unit),
        "edges": edges_of(pooled),
    }


def test_a_packed_answer_is_unpacked() -> None:
    arrays = {
        "a": np.arange(5) * 2**40,
        "b": np.float32([[0.5, -1.5]]),
        "c": np.int16([-32768, 32767]),
        "d": np.uint8([7]),
    }
    body = base64.b64encode(wire.pack({"text": "‖∂L‖"}, arrays)).decode()
    unpacked = run("ks.unpack(Uint8Array.from(atob(given.body), (c) => c.charCodeAt(0)).buffer)", body=body)
    assert unpacked["header"]["text"] == "‖∂L‖"
    assert unpacked["arrays"]["a"] == [0, 2**40, 2**41, 3 * 2**40, 2**42]
    assert unpacked["arrays"]["b"] == [0.5, -1.5]
    assert unpacked["arrays"]["c"] == [-32768, 32767]
    assert unpacked["arrays"]["d"] == [7]


def test_bins_have_the_same_edges_and_every_step_its_bin() -> None:
    given = tile()
    first, last = given["first"].tolist(), given["last"].tolist()
    assert run("ks.edges(given.first, given.last)", first=first, last=last) == given["edges"].tolist()
    assert run("ks.edges([7], [7])") == [6.5, 7.5]
    found = run(
        "given.first.map((step) => ks.binAt({ bins: given.first.length, edges: given.edges }, step))",
        first=first,
        edges=given["edges"].tolist(),
    )
    assert found == list(range(len(first)))


def test_pooling_for_the_screen_keeps_the_worst_and_the_farthest() -> None:
    codes = tile()["codes"]
    blocks = [(b0, b1, l0, l1) for b0 in range(7) for b1 in range(b0 + 1, 8) for l0 in range(4) for l1 in (l0 + 1, 5)]
    shown = run(
        "given.blocks.map((b) => ks.farthest(Int16Array.from(given.codes), 5, ...b))",
        codes=codes.ravel().tolist(),
        blocks=blocks,
    )
    for (b0, b1, l0, l1), code in zip(blocks, shown, strict=True):
        cells = codes[b0:b1, l0:l1].ravel().tolist()
        expected = max((RANK.get(cell, 1), 0 if cell in RANK else abs(cell)) for cell in cells)
        assert code in cells
        assert (RANK.get(code, 1), 0 if code in RANK else abs(code)) == expected


def test_every_cell_is_on_the_screen_whatever_its_width() -> None:
    rng = np.random.default_rng(0)
    for pixels in (7, 40, 400):
        edges = np.cumsum(rng.uniform(0.01, 3, 61)).tolist()
        spans = run(
            "ks.pixelSpans(given.pixels, given.edges[0], given.edges[60], given.edges, 60)", pixels=pixels, edges=edges
        )
        seen = {cell for a, b in zip(spans["from"], spans["to"], strict=True) for cell in range(a, b)}
        assert seen == set(range(60))


def test_cells_get_the_colour_of_python() -> None:
    decades = [-40.0, -16.0, -3.0, -0.4, 0.0, 0.1, 1.0, 16.0]
    size = 255
    shown = run("given.d.map((d) => ks.symlog(d, given.limit))", d=decades, limit=LIMIT)
    np.testing.assert_allclose(shown, symlog(np.array(decades)), atol=1e-12)
    places = run(
        "given.d.map((d) => ks.indexTable(0.001, given.limit, given.size)[Math.round(d * 1000) & 0xffff])",
        d=decades[1:],
        limit=LIMIT,
        size=size,
    )
    expected = np.rint((symlog(np.array(decades[1:])) + 1) * (size - 1) / 2)
    np.testing.assert_allclose(places, expected, atol=1)
    table = base64.b64encode(colour_table(LIGHT).tobytes()).decode()
    first = run("ks.css(ks.lookup(given.table)[0])", table=table)
    assert first == "rgb({},{},{})".format(*colour_table(LIGHT)[0])


@pytest.mark.parametrize(
    ("level", "text"),
    [
        (0.0, "1"),
        (-0.0315, "0.93"),
        (2.4742, "298"),
        (-3.1439, "7.18 x 10⁻⁴"),
        (4.0, "1.00 x 10⁴"),
        (-2.9999999, "1.00 x 10⁻³"),
    ],
)
def test_values_are_written_as_people_read_them(level: float, text: str) -> None:
    assert run("ks.value(given.level)", level=level).replace("\N{MULTIPLICATION SIGN}", "x") == text


def test_values_without_a_number_have_words() -> None:
    assert run("[-Infinity, Infinity, NaN].map(ks.value)") == ["exactly 0", "Inf", "no value"]


def test_layers_are_told_by_their_depth_and_found_by_it() -> None:
    tile = {"layers": 24, "depth": "sub-layer", "depths": list(range(2, 49, 2))}
    found = run("[-4, 2, 13, 14, 48, 99].map((depth) => ks.layerAt(given.tile, depth))", tile=tile)
    assert found == [1, 1, 7, 7, 24, 24]
    assert run("ks.depthText(given.tile, 7)", tile=tile) == "sub-layer 14"
    ticks = run("ks.layerTicks(0.5, 24.5, 8, given.tile)", tile=tile)
    assert ticks == {"values": [1, 4, 8, 12, 16, 20, 24], "text": ["2", "8", "16", "24", "32", "40", "48"]}
    plain = {"layers": 3, "depth": "layer", "depths": []}
    assert run("ks.layerTicks(0.5, 3.5, 8, given.tile)", tile=plain)["text"] == ["1", "2", "3"]


def test_a_tail_joins_its_tile_only_if_both_are_of_one_kind() -> None:
    setup = (
        "(() => { const header = { bins: 3, layers: 2, rows: 4, unit: 0.001, generation: 1, from: 0 };"
        "const part = (n, k) => ({ first: new Float64Array(n).fill(k), last: new Float64Array(n).fill(k),"
        " reference: new Float32Array(n), codes: new Int16Array(2 * n).fill(k) });"
        "const old = ks.tileOf(header, part(3, 1));"
        "const joined = ks.spliced(old, { ...header, bins: 5, from: 2 }, part(3, 9));"
        "const refused = ['rows', 'unit', 'layers', 'generation'].map((name) =>"
        " ks.spliced(old, { ...header, bins: 5, from: 2, [name]: 77 }, part(3, 9)));"
        "return [joined.codes, joined.first, refused, ks.spliced(old, { ...header, from: 4 }, part(1, 9))]; })()"
    )
    codes, first, refused, beyond = run(setup)
    assert codes == [1, 1, 1, 1, 9, 9, 9, 9, 9, 9]
    assert first == [1, 1, 9, 9, 9]
    assert refused == [None] * 4
    assert beyond is None
