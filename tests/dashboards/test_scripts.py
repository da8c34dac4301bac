"""The scripts of the page against Python: decoding, pooling, bins, colours and number texts agree."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

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
        + (ASSETS / "axes.js").read_text()
        + (ASSETS / "paint.js").read_text()
        + (ASSETS / "svg.js").read_text()
        + (ASSETS / "export.js").read_text()
        + (ASSETS / "picker.js").read_text()
        + f"const ks = window.keelscope, given = {json.dumps(values)};\n"
        + f"process.stdout.write(JSON.stringify({expression}, (_, v) => ArrayBuffer.isView(v) ? [...v] : v));\n"
    )
    done = subprocess.run([str(NODE), "-"], input=program, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def plainly(text: str) -> str:
    """With the signs that a keyboard has."""
    return text.replace("\N{MINUS SIGN}", "-").replace("\N{MULTIPLICATION SIGN}", "x")


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
        (0.0, "1.00"),
        (-0.0315, "0.930"),
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


def test_blocks_get_their_arrays_back() -> None:
    from keelscope_dashboards.blocks import Axis, Chart, Line, encoded

    line = Line("a", 0, np.array([0.0, 1.0]), np.array([np.nan, -np.inf]))
    blocks, arrays = encoded([Chart("b", Axis(), Axis(log=True), (line,))])
    body = base64.b64encode(wire.pack({"blocks": blocks}, arrays)).decode()
    back = run(
        "(() => { const bytes = Uint8Array.from(atob(given.body), (c) => c.charCodeAt(0));"
        " const { header, arrays } = ks.unpack(bytes.buffer);"
        " const [chart] = ks.revived(header.blocks, arrays), [line] = chart.lines;"
        " return [line.x, [...line.y].map(String), line.low, chart.y.log]; })()",
        body=body,
    )
    assert back == [[0, 1], ["NaN", "-Infinity"], None, True]


@pytest.mark.parametrize(
    ("extent", "span", "held", "expected"),
    [
        ([0, 10], 0, None, [-0.5, 10.5]),
        ([2, 2], 4, None, [0, 4]),
        ([0, 0], 0, None, [-0.5, 0.5]),
        ([4, 6], 0, [0, 5.9], [0, 6.1]),  # grows, never shrinks
        ([4, 6], 0, [3, 7], [3, 7]),
        ([4, 6], 0, [-90, 90], [3.9, 6.1]),  # unless it is far too wide
        (None, 0, None, [-0.05, 1.05]),
    ],
)
def test_an_axis_has_room_and_is_calm(
    extent: list[float] | None, span: float, held: list[float] | None, expected: list[float]
) -> None:
    assert run("ks.roomy(given.e, given.s, given.h)", e=extent, s=span, h=held) == pytest.approx(expected)


def test_log_axes_of_any_width_have_a_few_readable_ticks() -> None:
    wide = run("ks.logTicks([-9, -3], 6)")
    assert wide["values"] == [-9, -8, -7, -6, -5, -4, -3]
    narrow = run("ks.logTicks([Math.log10(0.4), Math.log10(1.2)], 6)")
    assert narrow["text"] == ["0.4", "0.6", "0.8", "1", "1.2"]
    np.testing.assert_allclose(narrow["values"], np.log10([0.4, 0.6, 0.8, 1.0, 1.2]), atol=1e-9)
    texts = run("ks.logTicks([-5.2, -3.9], 6)")["text"]
    powers = ["10<sup>-5</sup>", "2x10<sup>-5</sup>", "5x10<sup>-5</sup>", "10<sup>-4</sup>"]
    assert [plainly(text) for text in texts] == powers
    ranges = [[low, low + width] for low in np.linspace(-8, 3, 23).tolist() for width in (0.01, 0.1, 0.5, 1.3, 3.4, 20)]
    counts = run("given.ranges.map((range) => ks.logTicks(range, 6).values.length)", ranges=ranges)
    assert min(counts) >= 1
    assert max(counts) <= 9


def test_values_in_linear_units_are_written_with_their_sign() -> None:
    texts = run("[0.25, -0.0315, 0, null, -1e-7, 32768].map((v) => ks.plain(v === null ? NaN : v))")
    assert [plainly(text) for text in texts] == [
        "0.250",
        "-0.0315",
        "exactly 0",
        "no value",
        "-1.00 x 10⁻⁷",
        "32,768",
    ]


def test_steps_and_tokens_are_mapped_onto_each_other() -> None:
    steps, tokens = [0, 10, 40], [100, 200, 800]
    there = run("[-5, 0, 5, 25, 40, 99].map((s) => ks.interpolated(given.a, given.b, s))", a=steps, b=tokens)
    assert there == [100, 100, 150, 500, 800, 800]
    back = run("[100, 150, 500, 800].map((s) => ks.interpolated(given.b, given.a, s))", a=steps, b=tokens)
    assert back == [0, 5, 25, 40]
    assert run("ks.nearest([1, 4, 9], 6.4)") == 1
    assert run("ks.extent([[3, NaN], [-1, Infinity]].map((a) => Float64Array.from(a)))") == [-1, 3]


def test_a_ramp_spans_the_range_of_the_values() -> None:
    codes = [-2000, 0, 500, 1000, 3000]
    places = run("given.c.map((c) => ks.rampTable(0.001, 0, 1, 255)[c & 0xffff])", c=codes)
    assert places == [0, 0, 127, 254, 254]


def test_what_was_not_observed_zero_and_nan_are_drawn_each_in_its_way() -> None:
    codes = [wire.ABSENT, wire.ZERO, wire.NAN, wire.INF, 0]
    colours = run(
        "(() => { const tile = { bins: 5, layers: 1, unit: 0.001, codes: Int16Array.from(given.codes),"
        " edges: Float64Array.from([0, 1, 2, 3, 4, 5]) };"
        " const image = { width: 60, height: 12, data: new Uint8ClampedArray(60 * 12 * 4) };"
        " const colours = Uint32Array.from({ length: 255 }, (_, i) => 1000 + i);"
        " const look = { colours, limit: 16, period: 6, stroke: 2,"
        " ground: 1, zero: 2, alarmGround: 3, alarm: 4, dots: 5, blank: 6 };"
        " ks.paintCells(image, tile, { x0: 0, x1: 5, y0: 0.5, y1: 1.5 }, look);"
        " const out = new Uint32Array(image.data.buffer), seen = [];"
        " for (let cell = 0; cell < 5; cell++) { const kinds = new Set();"
        " for (let x = 12 * cell; x < 12 * cell + 12; x++)"
        " for (let y = 0; y < 12; y++) kinds.add(out[y * 60 + x]); seen.push([...kinds].sort((a, b) => a - b)); }"
        " return seen; })()",
        codes=codes,
    )
    assert colours == [[5, 6], [1, 2], [3, 4], [3, 4], [1127]]


def test_a_table_as_csv_holds_numbers_and_runs_nothing() -> None:
    rows = [["=1+1", 0.1, 1e-300], ['a,"b"', 1 / 3, -2]]
    text = run("ks.csv(['note\\nmore', ''], ['name', 'x', 'y'], given.rows)", rows=rows)
    assert text.splitlines() == [
        "# note more",
        "name,x,y",
        "'=1+1,0.1,1e-300",
        '"a,""b""",0.333333333,-2',
    ]
    assert run("ks.csv([], ['x'], [[NaN], [Infinity], [-Infinity]])") == "x\nnan\ninf\n-inf\n"


def test_lines_are_saved_as_values_not_as_logarithms() -> None:
    lines = "[{ label: 'a', x: [1, 2], y: [-Infinity, 2] }, { label: 'b', x: [1], y: [0], low: [-1], high: [1] }]"
    table = run(f"ks.lineRows({lines}, true)")
    assert table["head"] == ["line", "x", "value", "low", "high"]
    assert table["rows"] == [["a", 1, 0, None, None], ["a", 2, 100, None, None], ["b", 1, 1, 0.1, 10]]


def test_marks_on_a_canvas_become_elements() -> None:
    drawn = run(
        "(() => { const c = new ks.SvgContext(); c.beginPath(); c.setLineDash([6, 4]);"
        " ks.paintLine(c, [0, 1, 2, 3], [0, 5, NaN, 5], { colour: '#123456', width: 2, alpha: 0.5, dash: [6, 4] });"
        " c.font = '11px x'; c.fillText('<b>&', 1, 2); return String(c); })()"
    )
    assert drawn.startswith('<path d="M0 0L1 5M3 5" fill="none" stroke="#123456" stroke-width="2"')
    assert 'stroke-dasharray="6 4" opacity="0.5"/>' in drawn
    assert "&#60;b&#62;&#38;</text>" in drawn


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0, 12000, ["0", "5,000", "10,000"]),
        (-0.2, 0.2, ["\N{MINUS SIGN}0.2", "\N{MINUS SIGN}0.1", "0", "0.1", "0.2"]),
        (47.9, 48.1, ["47.90", "47.95", "48.00", "48.05", "48.10"]),
        (0, 5e7, ["0", "2\N{MULTIPLICATION SIGN}10<sup>7</sup>", "4\N{MULTIPLICATION SIGN}10<sup>7</sup>"]),
    ],
)
def test_ticks_of_a_linear_axis_are_round_numbers(low: float, high: float, text: list[str]) -> None:
    assert run("ks.plainTicks([given.low, given.high], 4)", low=low, high=high)["text"] == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(-0.5, 0.5, ["0"]), (-0.01, 0.01, ["0"]), (-0.5, 1.5, ["0", "1"]), (-0.5, 39.5, ["0", "10", "20", "30"])],
)
def test_an_axis_that_counts_steps_has_whole_numbers(low: float, high: float, text: list[str]) -> None:
    assert run("ks.countTicks(given.range, 5).text", range=[low, high]) == text


def test_axes_are_drawn_where_their_values_lie() -> None:
    box = {"left": 50, "top": 10, "width": 200, "height": 100, "right": 10, "bottom": 30}
    ticks = {"values": [0, 1, 9], "text": ["<b>", "10<sup>3</sup>", "off the axis"]}
    x, y = ({"range": [0, 2], "ticks": ticks, "title": title, "grid": True} for title in ("a & b", ""))
    drawn = run("ks.axesSvg(...given.all)", all=[box, x, y, {"grid": "#111111", "axis": "#222222", "muted": "#333333"}])
    root = ET.fromstring(f"<svg>{drawn}</svg>")
    words = [("".join(text.itertext()), text.get("class"), text.get("x")) for text in root.iter("text")]
    assert words[:2] == [("<b>", "xtick", "50.5"), ("103", "xtick", "150.5")]
    assert [text.get("y") for text in root.iter("text") if text.get("class") == "ytick"] == ["114.5", "64.5"]
    assert words[-1] == ("a & b", "xtitle", "150")
    assert root[0].get("d") == "M50.5 10v100M150.5 10v100M50 110.5h200M50 60.5h200"


def test_runs_are_found_by_any_words_of_theirs() -> None:
    assert run("['keel Lr', 'lr 4', ''].map((words) => ks.matches('sweep-lr3e-4 keel', words))") == [True, True, True]
    assert run("ks.matches('sweep-lr3e-4 keel', 'lr post')") is False


def test_depths_that_are_all_odd_still_have_ticks() -> None:
    tile = {"layers": 24, "depth": "sub-layer", "depths": list(range(1, 49, 2))}
    assert run("ks.layerTicks(0.5, 24.5, 8, given.tile)", tile=tile)["text"] == ["1", "7", "15", "23", "31", "39", "47"]
    offset = {"layers": 46, "depth": "sub-layer", "depths": list(range(3, 49))}
    assert run("ks.layerTicks(0.5, 46.5, 8, given.tile)", tile=offset)["text"] == [
        "3",
        "8",
        "16",
        "24",
        "32",
        "40",
        "48",
    ]
