"""What is said of a stack whose causes are known."""

from __future__ import annotations

import numpy as np
import pytest

from keelscope.diagnosis import diagnose

CASES = {
    "post-norms": (
        {"depth": 128, "post": True, "width": 32, "scale": 0.55},
        {"form": "n(x + F(x))", "norm": True},
        [
            "loses 6.70 decades over 128 sub-layers: post-norms divide by sqrt(1 + v), v = 0.302; the total",
            "is held up",
        ],
    ),
    "pre-norms": (
        {"depth": 64, "pre": True},
        {"form": "x + F(n x)"},
        ["keeps the gradient (0 decades over 64 sub-layers); the total gradient", "stays level"],
    ),
    "weight under a norm": (
        {"depth": 64, "pre": True, "post": True, "alpha": 64.0, "width": 32},
        {"form": "n(a x + F(n x))", "norm": True},
        ["keeps the gradient", "stays level."],
    ),
    "convex gate": (
        {"depth": 64, "alpha": 0.9, "beta": 0.1},
        {"form": "a x + b F(x)", "gates": {"layers.0.t": ("gate (token)", [0], {"value": 0.1})}},
        [
            "loses 2.93 decades over 64 sub-layers: gates and weights multiply it by 0.900 per sub-layer",
            "shrinks with it, and the branches (which add 0.10 decades) do not make up for it",
            "Largest cause: the weights on the shortcut (2.93 decades lost).",
        ],
    ),
    "growing weights": (
        {"depth": 64, "alpha": 1.1, "scale": 0.01},
        {"form": "a x + F(x)"},
        ["gains 2.65 decades over 64 sub-layers: weights multiply it by 1.10", "grows towards the input"],
    ),
    "no norm at all": (
        {"depth": 64},
        {"form": "x + F(x)"},
        [
            "keeps the gradient (0 decades",
            "grows towards the input, by the branches",
            "Largest cause: the branches (8.4",
        ],
    ),
    "weighed under a norm": (
        {"depth": 128, "post": True, "alpha": 2.0, "width": 32},
        {"form": "n(a x + F(x))", "norm": True},
        ["post-norms divide by sqrt(1 + v/a^2), v = 0.983, a = 2.00; the"],
    ),
    "cut": (
        {"depth": 32, "alpha": [1.0] * 10 + [0.0] + [1.0] * 21},
        {"form": "a x + F(x)"},
        ["is cut: it passes exactly nothing in 1 of 32 sub-layers", "passes there by the branches alone"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_words_fit_the_case(stack, name):
    model, run, expected = CASES[name]
    text = diagnose(stack.recorded(stack.measure(**model), **run)).explanation
    for part in expected:
        assert part in text
    assert text.endswith(".")


def test_a_law_that_does_not_hold_is_not_given_as_the_reason(stack):
    values = stack.measure(64, post=True, width=32)
    values["shortcut_gain"] = values["shortcut_gain"] * 0.5
    values["shortcut_only_gradient"] = np.full(64, np.nan)
    text = diagnose(stack.recorded(values, norm=True)).explanation
    assert "post-norms and weights multiply it by 0.358" in text
    assert "where sqrt(1 + v/a^2) explains -" in text


def test_branches_along_the_stream_take_more(stack):
    values = stack.measure(64, post=True, width=32)
    values["branch_gain"][:], values["cosine"][:] = 0.05, 0.4
    values["predicted_slope"][:] = 0.5 * np.log10(1.05)
    values["shortcut_gain"] = np.full(64, (1 + 0.05 + 2 * 0.4 * np.sqrt(0.05)) ** -0.5)
    values["shortcut_only_gradient"] = np.full(64, np.nan)
    text = diagnose(stack.recorded(values, norm=True)).explanation
    assert "the size of a x + F, v = 0.0500, where F points along x (cosine 0.400)" in text


def test_what_the_float_floor_hides_is_said(stack):
    values = stack.measure(512, post=True, pre=True, width=8)
    values["shortcut_only_gradient"][values["shortcut_only_gradient"] < 1e-45] = 0.0
    text = diagnose(stack.recorded(values, norm=True)).explanation
    hidden = (values["shortcut_only_gradient"] < 1e-37).sum()
    assert hidden > 100
    assert f"The float32 floor of 1e-37 hides the shortcut gradient of {hidden} sub-layers; gains continue" in text


def test_a_second_path_that_joins_below_is_said(stack):
    values = stack.measure(64, post=True, width=32)
    values["shortcut_only_gradient"][0] = values["output_gradient"][-1]
    text = diagnose(stack.recorded(values, norm=True)).explanation
    carried = np.log10(values["shortcut_only_gradient"] / values["output_gradient"][-1])
    lowest = int(np.argmin(carried))
    assert f"The shortcut path loses {-carried.min():.2f} decades over {64 - lowest} sub-layers: post-norms" in text
    assert f"below layers.{lowest // 2}.branch{lowest % 2} another path gives {-carried.min():.2f} decades back" in text


def test_gaps_and_streams_are_said(stack):
    values = stack.measure(32, post=True)
    values["input_gradient"][4] = np.nan
    text = diagnose(stack.recorded(values, norm=True, streams=[0] * 30 + [1] * 2)).explanation
    assert "The causes leave 1 sub-layer without a usable gradient out." in text
    assert text.endswith("This is the longest of 2 residual streams.")


def test_nothing_is_said_of_nothing(stack):
    values = {name: np.full(8, np.nan) for name in stack.SUBLAYER}
    values["alpha"] = np.ones(8)
    assert diagnose(stack.recorded(values)).explanation == ""


def test_a_stream_that_is_a_small_part_is_said_first(stack):
    text = diagnose(stack.recorded(stack.measure(32), streams=[0] * 12 + [1] * 10 + [2] * 10)).explanation
    assert text.startswith("In the longest of 3 residual streams (12 of 32 sub-layers) the shortcut path loses")
    assert text.count("residual streams") == 1
