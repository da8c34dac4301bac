from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keelscope.diagnosis import Severity, diagnose
from keelscope.diagnosis.headline import WORDS, word_of

N = 32


def sloped(total, n=N):
    """Gradient RMS that loses `total` decades per L from output to input."""
    return 1e-4 * 10.0 ** (total / n * np.arange(-n + 1, 1.0))


@pytest.mark.parametrize(
    ("total", "word"),
    [
        (0.0, "flat"),
        (0.99, "flat"),
        (-0.99, "flat"),
        (1.01, "drifting"),
        (-1.99, "drifting"),
        (2.01, "vanishing"),
        (-2.01, "exploding"),
        (9.0, "vanishing"),
    ],
)
def test_words_by_slope(make_run, total, word):
    report = diagnose(make_run(sloped(total)))
    assert report.headline == word == word_of(total)
    assert report.profile.shape.total == pytest.approx(total, abs=1e-6)
    assert report.verdict.decided_by == "gradients/rms"


def test_the_sentence_has_the_numbers(make_run):
    assert diagnose(make_run(sloped(3.2), sublayers=2)).sentence == (
        "Gradient RMS shrinks from output to input: fitted x6.31e-04 over 64 sub-layers, slope +0.0500 decades per "
        "sub-layer, S = +3.20 decades (parameter-gradient norm 0)."
    )


def test_blocks_and_modules_are_called_so(make_run):
    assert "over 32 blocks" in diagnose(make_run(sloped(0), sublayers=0)).sentence
    assert "over 32 modules" in diagnose(make_run(sloped(0), stack=False)).sentence


@pytest.mark.parametrize(("late", "word"), [(4.5, "vanishing"), (-3.0, "exploding"), (1.5, "drifting")])
def test_late_tokens_decide_when_they_are_worse(make_run, late, word):
    report = diagnose(make_run(sloped(-0.6), late=np.log10(sloped(late))))
    assert (report.headline, report.verdict.decided_by) == (word, "gradients/late_token_level")
    assert report.sentence.startswith("Late-token gradient level ")
    assert "gradient RMS -0.60" in report.sentence


def test_late_tokens_without_gradient_at_the_top_do_not_count(make_run):
    report = diagnose(make_run(sloped(0), late=np.log10(sloped(4.5)), late_zeros=0.97))
    assert report.headline == "flat"
    assert "The late-token gradient level is not counted: 97 % of the late tokens get no gradient" in report.notes[-1]


def test_parameter_gradients_decide_when_they_are_worse(make_run):
    report = diagnose(make_run(sloped(0), parameter=sloped(3.0)))
    assert (report.headline, report.verdict.decided_by) == ("vanishing", "parameter_gradients/norm")


def test_parameter_gradients_alone_are_enough(make_run):
    report = diagnose(make_run(sloped(0), parameter=sloped(-4.0), groups=("parameter_gradients",)))
    assert report.headline == "exploding"
    assert "over 32 sub-layers" in report.sentence


@pytest.mark.parametrize("word", ["flat", "vanishing"])
def test_parameter_norms_of_layers_that_grow_do_not_count(make_run, word):
    """Unless nothing else is known."""
    groups = ("gradients", "parameter_gradients") if word == "flat" else ("parameter_gradients",)
    run = make_run(sloped(0), parameter=sloped(3.0), groups=groups, size=lambda i: 100 * (i + 1))
    report = diagnose(run)
    assert report.headline == word
    assert ("hold 100 parameters at the input end and 3,200 at the output end" in report.notes[-1]) == (word == "flat")


def test_equal_weight_gradients_do_not_hide_a_vanishing_output_gradient(make_run):
    assert diagnose(make_run(sloped(8.7), parameter=np.full(N, 0.1))).headline == "vanishing"


@pytest.mark.parametrize("group", ["outputs", "gradients"])
def test_non_finite_comes_first(make_run, group):
    def edit(k, values, observed):
        values[group]["nonfinite_count"][4] = 3

    report = diagnose(make_run(np.tile(sloped(5), (4, 1)), edit=edit))
    assert report.headline == "non-finite"
    assert report.sentence == "NaN or Inf was recorded on 4 of the last 4 recorded steps, first at step 0."


def test_non_finite_parameter_gradients(make_run):
    def edit(k, values, observed):
        values["parameter_gradients"]["norm"][:] = np.inf

    assert diagnose(make_run(sloped(0), edit=edit)).sentence == "NaN or Inf was recorded at step 0."


def test_one_bad_step_long_ago_is_a_finding_only(make_run):
    def edit(k, values, observed):
        values["gradients"]["nonfinite_count"][4] = float(k == 2)

    report = diagnose(make_run(np.tile(sloped(0), (12, 1)), edit=edit))
    assert report.headline == "flat"
    assert [f.rule for f in report.findings] == ["nonfinite_backward"]


def test_a_step_that_the_loss_scaler_skipped_is_its_normal_work(make_run):
    def edit(k, values, observed):
        values["gradients"]["nonfinite_count"][:] = float(k == 3)

    run = make_run(np.tile(sloped(0), (4, 1)), edit=edit, scalars={"skipped": [0, 0, 0, 1]})
    assert diagnose(run).headline == "flat"
    assert [(finding.rule, finding.severity) for finding in diagnose(run).findings] == [
        ("overflow_step_skipped", Severity.INFO)
    ]


def test_few_layers(make_run):
    assert diagnose(make_run([1e-9, 1e-5, 1.0])).findings == ()
    assert diagnose(make_run(np.ones(3))).sentence == (
        "Found 3 layers with a gradient; a slope over depth needs at least 4."
    )


def test_nothing_recorded(make_run):
    report = diagnose(make_run(np.empty((0, 8))))
    assert (report.headline, report.sentence) == ("not enough data", "No step is recorded yet.")
    assert report.step == -1


def test_no_gradient(make_run):
    report = diagnose(make_run(np.full(8, np.nan), parameter=np.full(8, np.nan)))
    assert report.sentence == "No gradient was recorded: no backward pass reached a watched layer."


def test_dead_below_a_layer(make_run):
    values = np.ones(10)
    values[:4] = 0.0
    report = diagnose(make_run(values))
    assert report.headline == "dead"
    assert report.sentence == (
        "The gradient RMS is exactly 0 in 4 of 10 layers, up to layers.3: no signal gets through."
    )


def test_dead_everywhere(make_run):
    report = diagnose(make_run(np.zeros(10), parameter=np.zeros(10)))
    assert report.sentence == "The gradient RMS is exactly 0 in 10 of 10 layers: no signal gets through."


def test_one_zero_layer_in_the_middle_is_not_dead(make_run):
    values = np.ones(10)
    values[5] = 0.0
    assert diagnose(make_run(values)).headline == "flat"


def test_underflow_is_vanishing_not_dead(make_run):
    report = diagnose(make_run(10.0 ** -np.linspace(60, 2, 30)))
    assert report.headline == "vanishing"
    assert "12 of 30 layers lie under the float32 floor of 1e-37 in the gradient RMS" in " ".join(report.notes)


def test_every_layer_under_the_floor(make_run):
    assert diagnose(make_run(np.full(8, 1e-39))).headline == "dead"


def test_the_verdict_is_the_median_of_recent_steps(make_run):
    table = np.tile(sloped(0), (25, 1))
    table[:15] = sloped(6)  # long ago
    table[20] = sloped(-9)  # one outlier
    report = diagnose(make_run(table))
    assert report.headline == "flat"
    assert report.steps == tuple(range(150, 250, 10))
    assert report.notes[0] == "Verdict: median of 10 recorded steps, 150 to 240. Table: step 240."
    assert diagnose(make_run(table), step=140).headline == "vanishing"


def test_the_embedding_end_and_the_first_block_do_not_decide(make_run):
    values = np.ones(64)
    values[:2] *= 40.0  # Keel's first block
    assert diagnose(make_run(values)).headline == "flat"
    assert diagnose(make_run(values)).findings == ()


@settings(max_examples=40, deadline=None)
@given(total=st.floats(-12, 12), c=st.floats(1e-8, 1e8), seed=st.integers(0, 1000))
def test_scale_changes_neither_word_nor_number(make_run, total, c, seed):
    values = sloped(total) * 10.0 ** np.random.default_rng(seed).normal(0, 0.1, N)
    one = diagnose(make_run(values, parameter=values))
    scaled = diagnose(make_run(c * values, parameter=c * values))
    assert scaled.profile.shape.total == pytest.approx(one.profile.shape.total, abs=1e-6)
    if min(abs(abs(one.profile.shape.total) - limit) for limit in (1, 2)) > 1e-6:
        assert scaled.headline == one.headline


@settings(max_examples=40, deadline=None)
@given(total=st.floats(-12, 12), seed=st.integers(0, 1000))
def test_reversed_depth_swaps_vanishing_and_exploding(make_run, total, seed):
    values = sloped(total) * 10.0 ** np.random.default_rng(seed).normal(0, 0.1, N)
    opposite = {"vanishing": "exploding", "exploding": "vanishing"}
    one = diagnose(make_run(values, groups=("gradients",)))
    flipped = diagnose(make_run(values[::-1], groups=("gradients",)))
    assert flipped.profile.shape.total == pytest.approx(-one.profile.shape.total, abs=1e-9)
    if min(abs(abs(one.profile.shape.total) - limit) for limit in (1, 2)) > 1e-6:
        assert flipped.headline == opposite.get(one.headline, one.headline)


def test_every_word_is_listed():
    assert set(WORDS) == {"flat", "drifting", "vanishing", "exploding", "dead", "non-finite", "not enough data"}
