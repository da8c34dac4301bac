from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keelscope.diagnosis.finding import Finding, Severity
from keelscope.diagnosis.layers import Layer
from keelscope.tables import Gap, fold


def rows(n, before=1, after=1, stack="h"):
    ends = [layer(f"in{i}", "") for i in range(before)], [layer(f"out{i}", "") for i in range(after)]
    return [*ends[0], *(layer(f"{stack}.{i}", stack) for i in range(n)), *ends[1]]


def layer(path, stack):
    numbers = dict.fromkeys(
        ("output_variance", "gradient_rms", "late_token_gradient", "ratio", "parameter_gradient_norm", "weight_norm")
    )
    return Layer(path=path, kind="B", role="layer" if stack else "other", stack=stack, depth=None, **numbers)


def paths(folded):
    return [str(row) if isinstance(row, Gap) else row.path for row in folded]


def test_short_stacks_stay_whole():
    assert paths(fold(rows(40))) == [row.path for row in rows(40)]


def test_a_thousand_layers():
    assert paths(fold(rows(1000))) == [
        "in0", "h.0", "h.1", "h.2", "... 246 more", "h.249", "... 249 more", "h.499", "... 249 more", "h.749",
        "... 247 more", "h.997", "h.998", "h.999", "out0",
    ]  # fmt: skip


def test_rows_that_a_finding_names_stay():
    findings = [Finding("knee", Severity.WARNING, "", ("h.123", "h.124")), Finding("x", Severity.INFO, "")]
    folded = paths(fold(rows(1000), findings))
    assert folded[4:8] == ["... 120 more", "h.123", "h.124", "... 124 more"]


def test_a_finding_on_every_layer_does_not_unfold_the_table():
    finding = Finding("vanishing", Severity.ERROR, "", tuple(f"h.{i}" for i in range(1000)))
    assert len(fold(rows(1000), [finding])) <= 16


def test_each_stack_is_folded_by_itself():
    both = [*rows(50, 0, 0, "encoder"), *rows(30, 0, 0, "decoder")]
    folded = paths(fold(both))
    assert sum(path.startswith("decoder") for path in folded) == 30
    assert sum(path.startswith("encoder") for path in folded) == 9


@given(st.integers(0, 300), st.integers(0, 3), st.integers(0, 3), st.sets(st.integers(0, 299), max_size=4))
def test_nothing_is_lost_and_order_is_kept(n, before, after, named):
    table = rows(n, before, after)
    folded = fold(table, [Finding("r", Severity.INFO, "", tuple(f"h.{i}" for i in named))])
    kept = [row for row in folded if not isinstance(row, Gap)]
    assert sum(row.hidden if isinstance(row, Gap) else 1 for row in folded) == len(table)
    assert kept == [row for row in table if row in kept]
    assert {f"h.{i}" for i in named if i < n} <= {row.path for row in kept}


@pytest.mark.parametrize("n", [41, 64])
def test_the_limit(n):
    assert any(isinstance(row, Gap) for row in fold(rows(n)))
