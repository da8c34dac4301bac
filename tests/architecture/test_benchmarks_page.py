"""Every benchmark writes its own part of docs/benchmarks.md, and leaves the others as they are."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOLD = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
TILES = "| tile | watched | CPU p10 |\n|---|---|---|"


@pytest.fixture
def bench(monkeypatch):
    """The modules of tests/bench that need nothing but Python, by name."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/bench"))
    names = ("targets", "page", "besidetable")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name)


def test_page_has_the_sections_of_all_commands_and_one_by_hand(bench):
    assert sorted(bench["page"].sections(TOLD)) == ["beside", "dashboard", "elsewhere", "storage"]


def test_a_section_is_rewritten_where_it_is(bench):
    page = bench["page"]
    for name, told in page.sections(TOLD).items():
        rewritten = page.replaced(TOLD, name, "\nOther words: \\1 {braces}.\n")
        assert rewritten.count("Other words") == 1
        assert list(page.sections(rewritten)) == list(page.sections(TOLD))
        assert page.replaced(rewritten, name, "\n".join(told.split("\n")[1:-2]) + "\n") == TOLD


def test_a_new_section_comes_last(bench):
    page = bench["page"]
    assert page.replaced("# Page\n\n", "new", "\nText.\n") == "# Page\n\n<!-- new -->\n\nText.\n<!-- end of new -->\n"


def test_make_bench_keeps_all_sections(bench):
    page = bench["page"]
    written = page.page_of(TOLD, "a machine", [("W1", "a tile")], 100, [TILES, "wholes", "growth", "processes"])
    assert page.sections(written) == page.sections(TOLD)
    assert "Machine: a machine." in written
    assert (
        page.page_of(written, "a machine", [("W1", "a tile")], 100, [TILES, "wholes", "growth", "processes"]) == written
    )


def test_what_is_hoped_for_is_told_beside_what_is_due(bench):
    rows = [f"| {tile} | blocks and norms | {low} | 1 | 1 | 1 | 1 | 1 |" for tile, low in (("W1", 1.1), ("W2", 1.03))]
    told = bench["targets"].targets_of("\n".join(["", "", *rows])).splitlines()
    assert told[2] == "| blocks and norms | p10 | W1 | 1.1 | 1.1 | yes |"
    assert told[-1] == "Hoped for beyond these limits, blocks and norms: W1 1.05 (0.05 above it), W2 1.03 (reached)."


def test_a_tool_that_does_not_run_has_a_row(bench):
    table = bench["besidetable"]
    ratio = {"low": 1.5, "median": 12.25, "mean": 2, "extra_ms": 3, "mean_ms": 4, "pairs": 9}
    found = [{"tile": tile, "version": "1.2", "ratio": ratio, "memory": [100, 130]} for tile in table.TILES]
    results = {"nnsight": [*found[:2], {"tile": "W3", "error": "ValueError: a | b"}], "composer": [{"error": "no pip"}]}
    text = table.section(results)
    ran = "| nnsight, blocks | 1.50 / 12.2 | 1.50 / 12.2 | does not run: ValueError: a / b "
    assert f"{ran}| 3.0 / 3.0 / - | +30 / +30 / - | 9 / 9 / - |" in text
    assert "| `OptimizerMonitor` of Composer | does not run: no pip | | | | | |" in text
    assert "| TorchLens `trace`, gradients | not measured | | |" in text
    assert len({line.count("|") for line in table.table(results).splitlines()}) == 1


def test_what_few_pairs_do_not_tell_apart_is_said(bench):
    table = bench["besidetable"]
    found = {
        "keelscope": (1.1, 100),
        "clip": (1.01, 100),
        "nnsight": (1.12, 100),
        "underflow": (1.8, 100),
        "anomaly": (1.2, 1),
    }
    results = {
        name: [{"tile": "W1", "ratio": {"median": median, "pairs": pairs}}] for name, (median, pairs) in found.items()
    }
    assert table.compared(results) == (
        "- **W1**, keelscope +10%. Cheaper: `clip_grad_norm_` (+1%). Not told apart: nnsight, blocks (+12%), "
        "`autograd.detect_anomaly` (+20%). Dearer: `DebugUnderflowOverflow` (+80%, 8.0 times)."
    )
