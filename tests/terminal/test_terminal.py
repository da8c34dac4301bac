from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.console import Console

from keelscope.diagnosis import compare, diagnose
from keelscope.formatting import NOT_OBSERVED
from keelscope.terminal import render

N = 64


def sloped(total, n=N):
    return 1e-4 * 10.0 ** (total / n * np.arange(-n + 1, 1.0))


def printed(view, *, width=80, encoding="utf-8", **options):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    render(view, Console(file=stream, width=width, **options.pop("console", {})), **options)
    stream.flush()
    return raw.getvalue().decode(encoding)


@pytest.fixture(scope="session")
def post_ln(make_run):
    return diagnose(make_run(sloped(-0.6), late=np.log10(sloped(4.5)), title="post_ln"))


@pytest.fixture(scope="session")
def keel(make_run):
    return diagnose(make_run(sloped(0), late=np.log10(sloped(0.01)), title="keel"))


def test_a_report_says_word_sentence_finding_and_steps(post_ln):
    text = str(post_ln)
    for part in (
        "post_ln",
        "vanishing  Late-token gradient level shrinks",
        "S = +4.50",
        "error  vanishing",
        "hides it",
    ):
        assert part in text
    assert "Verdict and table: step 0, the only recorded step." in text
    assert "Depth is counted in sub-layers: 64 in 64 entries of Block." in text


def test_the_chart_has_ticks_and_ends(post_ln):
    lines = str(post_ln).splitlines()
    ticks = [line.split("┤")[0].strip() for line in lines if "┤" in line]
    assert ticks == ["1.00e-04", "", "", "", f"{sloped(4.5)[0]:.2e}"]
    assert any(re.search(r"└input ─+ 64 sub-layers, output", line) for line in lines)


def test_the_table_has_one_row_per_layer_in_order(make_run):
    text = diagnose(make_run(sloped(0.3, 12), late=np.zeros(12))).to_text(width=120)
    rows = re.findall(r"^ +(\d+)  (layers\.\d+) ", text, flags=re.M)
    assert rows == [(str(i + 1), f"layers.{i}") for i in range(12)]
    header = next(line for line in text.splitlines() if "grad RMS" in line and "depth" in line)
    assert header.split() == [
        "depth",
        "layer",
        "type",
        "out",
        "var",
        "grad",
        "RMS",
        "late",
        "tok",
        "ratio",
        "p.",
        "grad",
        "weights",
        "grad",
        "RMS",
    ]


def test_numbers_stay_apart_in_the_table(make_run):
    def edit(k, values, observed):
        values["gradients"]["rms"][2:5] = [0.0, np.nan, np.inf]
        values["gradients"]["nonfinite_count"][2:5] = [0, 1, 1]

    gradient = np.full(8, 1e-5)
    gradient[5] = np.nan
    lines = diagnose(make_run(gradient, edit=edit)).to_text().splitlines()
    cell = {row: next(line for line in lines if f" layers.{row} " in line).split()[4] for row in range(6)}
    assert [cell[row] for row in range(6)] == ["1.00e-05", "0", "NaN", "Inf", "1.00e-05", NOT_OBSERVED]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal(post_ln, keel, width):
    for view in (post_ln, keel, compare(keel, post_ln)):
        assert max(map(len, printed(view, width=width).splitlines())) <= width


def test_no_line_ends_with_spaces(post_ln, keel):
    for view in (post_ln, compare(keel, post_ln)):
        assert [line for line in printed(view).splitlines() if line != line.rstrip()] == []


def test_eighty_columns_cut_no_number(post_ln):
    table = printed(post_ln).split("depth  layer")[1]
    assert "…" not in table


def test_an_ascii_stream_gets_ascii(post_ln, keel):
    for view in (post_ln, compare(keel, post_ln)):
        text = printed(view, encoding="ascii")
        assert text.isascii()
        assert "#" in text


def test_what_was_not_observed_can_be_written_in_ascii(make_run):
    gradient = np.ones(8)
    gradient[3] = np.nan
    row = next(
        line for line in printed(diagnose(make_run(gradient)), encoding="ascii").splitlines() if "layers.3" in line
    )
    assert row.split()[4] == "-"


def test_colour_only_repeats_the_word(post_ln):
    coloured = printed(post_ln, console={"force_terminal": True, "color_system": "standard"})
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == printed(post_ln)


def test_a_thousand_layers_fold_and_unfold(make_run):
    report = diagnose(make_run(sloped(0, 1000)))
    folded, whole = printed(report), printed(report, unfold=True)
    assert len(folded.splitlines()) < 50
    assert "... 246 more" in folded
    assert len(re.findall(r"^ +\d+  layers\.\d+", whole, flags=re.M)) == 1000


def test_few_layers_have_no_chart(make_run):
    text = printed(diagnose(make_run(np.ones(2))))
    assert "┤" not in text
    assert "not enough data" in text


def test_a_comparison_has_a_verdict_line_and_rows_for_each_run(keel, post_ln):
    lines = printed(compare(keel, post_ln)).splitlines()
    assert lines[1].split()[:2] == ["keel", "flat"]
    assert lines[2].split()[:2] == ["post_ln", "vanishing"]
    assert "S +4.50" in lines[2]
    rows = [line for line in lines if re.match(r"^ +\d+-\d+ ", line)]
    assert [row.split()[0] for row in rows] == [f"{4 * i + 1}-{4 * i + 4}" for i in range(16)]
    first = rows[0].split()
    assert float(first[1]) == pytest.approx(1e-4, rel=0.01)
    assert float(first[2]) == pytest.approx(1e-4, rel=0.05)


def test_eight_runs_fit(make_run):
    reports = [diagnose(make_run(sloped(i), title=f"run{i}")) for i in range(8)]
    text = printed(compare(reports), width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert all(f"run{i}" in text for i in range(8))


def test_markup_in_names_is_not_interpreted(make_run):
    assert "[red]net[/]" in printed(diagnose(make_run(np.ones(8), title="[red]net[/]")))
    comparison = compare(make_run(np.ones(8), title="[red]a[/]"), make_run(np.ones(8), title="b"))
    assert "[red]a[/]" in printed(comparison)


def test_rich_prints_the_same_as_render(post_ln):
    stream = io.StringIO()
    Console(file=stream, width=80).print(post_ln)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines == [line.rstrip() for line in printed(post_ln).splitlines()]


def test_columns_are_explained_where_they_are_shown(post_ln):
    wide, narrow = (" ".join(printed(post_ln, width=width).split()) for width in (120, 60))
    assert "S: decades lost from output to input. Columns: late tok = gradient of a typical token" in wide
    assert ("ratio = gradient" in wide, "ratio = gradient" in narrow) == (True, False)
