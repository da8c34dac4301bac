from __future__ import annotations

import numpy as np
import pytest

from keelscope.diagnosis import diagnose, evidence
from keelscope.diagnosis.evidence import Evidence
from keelscope.diagnosis.nonfinite import nonfinite_history

N = 8


def ramp(steps):
    """Step k has the value k + 1 everywhere."""
    return np.arange(1.0, steps + 1)[:, None] * np.ones(N)


def test_the_window_ends_at_the_step(make_run):
    found = Evidence(make_run(ramp(30)), step=200, recent=4)
    assert found.steps.tolist() == [170, 180, 190, 200]
    assert found.window("gradients/rms").steps.tolist() == [170, 180, 190, 200]
    assert found.recent("gradients/rms")[0] == pytest.approx(19.5)
    assert found.at_step("gradients/rms")[0] == 21.0
    assert found.observed("gradients/rms").shape == (4, N + 2)


@pytest.mark.parametrize("step", [-1, 250])
def test_a_group_recorded_on_fewer_steps_keeps_its_own_rows(make_run, step):
    def edit(k, values, observed):
        if k % 7:
            del values["parameter_gradients"]

    found = Evidence(make_run(ramp(30), parameter=ramp(30), edit=edit), step=step, recent=10)
    assert found.window("parameter_gradients/norm").steps.tolist() == ([210, 280] if step == -1 else [210])
    assert len(found.window("gradients/rms")) == 10
    assert found.at_step("parameter_gradients/norm")[1] == pytest.approx(0.8 * (29 if step == -1 else 22))


def test_a_group_that_was_not_recorded_recently_has_no_values(make_run):
    def edit(k, values, observed):
        if k:
            del values["parameter_gradients"]

    run = make_run(ramp(30), parameter=ramp(30), edit=edit)
    assert Evidence(run).at_step("parameter_gradients/norm") is None
    assert {layer.parameter_gradient_norm for layer in diagnose(run).layers} == {None}
    assert list(diagnose(run).profiles) == ["gradients/rms"]


def test_blocks_cover_every_row_once(make_run, monkeypatch):
    run = make_run(ramp(23))
    monkeypatch.setattr(evidence, "_BLOCK", 5 * (N + 2))
    pieces = list(Evidence(run, step=200).blocks("gradients/rms"))
    assert [len(piece) for piece in pieces] == [5, 5, 5, 5, 1]
    assert np.concatenate([piece.steps for piece in pieces]).tolist() == list(range(0, 210, 10))


@pytest.mark.parametrize("group", ["gradients", "parameter_gradients"])
def test_non_finite_flags_do_not_depend_on_the_block_size(make_run, monkeypatch, group):
    def edit(k, values, observed):
        if k in {3, 17}:
            values["gradients"]["nonfinite_count"][k % 5] = 1
            values["parameter_gradients"]["norm"][k % 5] = np.nan  # the RMS beside it says that it was seen

    run = make_run(ramp(23), edit=edit)
    whole = nonfinite_history(Evidence(run), group)
    monkeypatch.setattr(evidence, "_BLOCK", 60)
    parts = nonfinite_history(Evidence(run), group)
    assert np.array_equal(whole.flags, parts.flags)
    assert np.argwhere(whole.flags).tolist() == [[3, 3], [17, 2]]


def test_what_the_run_does_not_hold_is_none_or_empty(make_run):
    found = Evidence(make_run(ramp(2), groups=("gradients",)))
    assert found.recent("outputs/variance") is None
    assert found.at_step("outputs/variance") is None
    assert list(found.blocks("outputs/variance")) == []
    assert np.isnan(found.on_axis("outputs/variance")).all()
    assert found.sites("outputs/variance") == ()


def test_norms_compare_layers_of_different_size(make_run):
    run = make_run(np.ones(N), stack=False)
    assert list(Evidence(run).profiles) == ["gradients/norm", "parameter_gradients/norm"]


def test_gradients_of_a_few_numbers_per_layer_are_not_counted(make_run):
    """ReZero at its start: only the scalar of each layer has one, and its logarithm scatters by half a decade."""
    steep = np.logspace(-4, 0, N)
    few, many = (make_run(np.ones(N), parameter=steep, size=lambda i, n=n: n) for n in (15, 20))
    profile = Evidence(few).profiles["parameter_gradients/norm"]
    assert not profile.counted
    assert profile.remark.startswith("The parameter-gradient norm is not counted: 15 numbers of a layer get a gradient")
    assert (diagnose(few).headline, diagnose(many).headline) == ("flat", "vanishing")
