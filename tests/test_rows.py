"""From observations to one value per site."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from keelscope import kernel
from keelscope.board import Board, gather
from keelscope.calls import CallRecord, ParameterRecord, terms_of
from keelscope.errors import ProbeError
from keelscope.probe import Tap, TensorProbe
from keelscope.rows import (
    module_calls,
    module_observations,
    parameter_calls,
    parameter_observations,
    probe_extents,
    probe_values,
)
from keelscope.statistics import MAX_ABS, MEAN, MOMENTS, NORM, RMS, SQUARES, Statistic, additive


@pytest.fixture(params=["compiled", "torch"])
def path(request, monkeypatch):
    """Terms from the compiled kernel, if it is there, and from torch."""
    if request.param == "torch":
        monkeypatch.setattr(kernel, "_native", None)


PROBE = TensorProbe("p", Tap.OUTPUT, (MEAN, NORM, MAX_ABS))


def slots(board: Board, x: Tensor, probe: TensorProbe = PROBE):
    return {(probe.name, terms): board.put(terms, (x,)) for terms in terms_of(probe)}


def call(site: int, grad_enabled: bool = True, **fields) -> CallRecord:
    return CallRecord(site, grad_enabled, tracked=grad_enabled, **fields)


def values(probe: TensorProbe, observations, board: Board, sites: int, **options):
    found, observed = probe_values(probe, observations, board.fetch(), sites, **options)
    return found, observed.tolist()


def test_calls_merge_and_what_was_not_seen_is_nan():
    board = Board()
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([4.0])
    calls = [call(2, outputs=slots(board, a)), call(0, outputs=slots(board, b)), call(2, outputs=slots(board, b))]
    found, observed = values(PROBE, module_observations(Tap.OUTPUT, calls), board, 4)
    assert observed == [True, False, True, False]
    np.testing.assert_allclose(found["mean"], [4, math.nan, 7 / 3, math.nan])
    np.testing.assert_allclose(found["norm"], [4, math.nan, math.sqrt(21), math.nan])
    np.testing.assert_allclose(found["max_abs"], [4, math.nan, 4, math.nan])


def test_forwards_without_gradient_count_only_if_there_is_no_other():
    board = Board()
    plain, teacher = slots(board, torch.ones(1)), slots(board, torch.full((1,), 9.0))
    with_gradient = call(0, outputs=plain)
    without = call(0, grad_enabled=False, outputs=teacher)
    recomputed = call(0, grad_enabled=False, recomputed=True, outputs=teacher)
    assert module_observations(Tap.OUTPUT, [without, with_gradient]) == {0: [plain]}
    assert module_observations(Tap.OUTPUT, [without]) == {0: [teacher]}
    assert module_observations(Tap.OUTPUT, [without, recomputed]) == {0: [teacher]}
    assert module_observations(Tap.OUTPUT, [with_gradient, recomputed]) == {0: [plain, teacher]}
    assert module_observations(Tap.OUTPUT, []) == {}


def test_gradients_are_those_of_the_first_leaf_that_got_any():
    board = Board()
    first, second = slots(board, torch.ones(1)), slots(board, torch.ones(2))
    record = call(0, leaves={"0": [], "1": [first, second], "2": [second]})
    assert module_observations(Tap.OUTPUT_GRADIENT, [record]) == {0: [first, second]}
    assert module_observations(Tap.OUTPUT_GRADIENT, [call(0, leaves={"": []})]) == {}
    assert module_observations(Tap.INPUT, [call(1, inputs=first)]) == {1: [first]}


def test_parameters():
    board = Board()
    one, two = slots(board, torch.ones(1)), slots(board, torch.ones(2))
    records = {
        0: ParameterRecord(leaf=[one, two], accumulated=two, weight=one),
        1: ParameterRecord(leaf=[one, two]),
        2: ParameterRecord(update=one),
    }
    assert parameter_observations(Tap.PARAMETER_GRADIENT, records) == {0: [two], 1: [one, two]}
    assert parameter_observations(Tap.PARAMETER, records) == {0: [one]}
    assert parameter_observations(Tap.UPDATE, records) == {2: [one]}


def test_what_cannot_merge_is_taken_from_the_first():
    board = Board()
    terms = additive("first", ("a",), lambda x: x.double().sum().reshape(1))
    probe = TensorProbe("p", Tap.OUTPUT, (Statistic("s", terms, lambda t: t["a"], "1", "A.", mergeable=False),))
    calls = [call(0, outputs=slots(board, torch.tensor([x]), probe)) for x in (3.0, 5.0)]
    assert values(probe, module_observations(Tap.OUTPUT, calls), board, 1)[0]["s"].tolist() == [3]


def test_loss_scale_is_taken_out_after_merging():
    board = Board()
    calls = [call(0, outputs=slots(board, torch.tensor([x]))) for x in (3.0, -4.0)]
    found, _ = values(PROBE, module_observations(Tap.OUTPUT, calls), board, 1, factor=0.5)
    assert [found[name][0] for name in ("mean", "norm", "max_abs")] == [-0.25, 2.5, 2]


def test_statistics_with_an_axis():
    board = Board()
    terms = additive("signs", ("low", "high"), lambda x: torch.stack([(x < 0).sum(), (x > 0).sum()]).double())
    statistic = Statistic(
        "s",
        terms,
        lambda t: np.stack([t["low"], t["high"]], -1),
        "1",
        "A.",
        dims=("side",),
        coords={"side": (-1.0, 1.0)},
    )
    probe = TensorProbe("p", Tap.OUTPUT, (statistic,))
    calls = [call(1, outputs=slots(board, torch.tensor([-1.0, 2.0, 3.0]), probe))]
    found, _ = values(probe, module_observations(Tap.OUTPUT, calls), board, 2)
    np.testing.assert_array_equal(found["s"], [[math.nan, math.nan], [1, 2]])


def test_calls_in_plain_numbers():
    board = Board()
    inputs = TensorProbe("i", Tap.INPUT, (RMS,))
    x, g = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    record = call(5, inputs=slots(board, x, inputs), outputs=slots(board, x), leaves={"h": [slots(board, g)], "n": []})
    (got,) = module_calls("abcdef", [record], [PROBE, inputs], board.fetch())["f"]
    assert got.inputs == {"rms": pytest.approx(math.sqrt(12.5)), "count": 2}
    assert got.outputs == {"mean": 3.5, "norm": pytest.approx(5), "max_abs": 4, "count": 2}
    assert got.leaves == {"h": (2,), "n": ()}
    squares = TensorProbe("p", Tap.PARAMETER_GRADIENT, (Statistic("s", SQUARES, lambda t: t["squares"], "1", "A."),))
    mean = TensorProbe(
        "p",
        Tap.PARAMETER_GRADIENT,
        (Statistic("m", additive("m", ("a",), lambda x: x.double().sum().reshape(1)), lambda t: t["a"], "1", "A."),),
    )
    board = Board()
    records = {
        0: ParameterRecord(leaf=[slots(board, x, squares), slots(board, g, squares)]),
        1: ParameterRecord(leaf=[slots(board, x, mean)]),
    }
    got = parameter_calls(["w", "b"], records, board.fetch())
    assert got["w"].per_backward == (5, 2)
    assert math.isnan(got["b"].per_backward[0]), "terms without squares have no norm"


class TestBoard:
    def test_slots_find_their_terms(self, path):
        board = Board()
        tensors = [torch.full((n,), float(n)) for n in (1, 2, 3)]
        singly = [board.put(MOMENTS, (x,)) for x in tensors]
        together = board.put_many(SQUARES, tensors)
        fetched = board.fetch()
        assert gather(singly, MOMENTS, fetched)[:, 0].tolist() == [1, 2, 3]
        assert gather(together, SQUARES, fetched) == pytest.approx(np.array([[n, n**3] for n in (1, 2, 3)]), rel=1e-14)

    def test_packed_and_other_terms_side_by_side(self, path):
        board = Board()
        tensors = [torch.ones(3), torch.eye(3).to_sparse(), torch.ones(2)]
        singly, together = [board.put(MOMENTS, (x,)) for x in tensors], board.put_many(SQUARES, tensors)
        fetched = board.fetch()
        assert gather(singly, MOMENTS, fetched)[:, 0].tolist() == [3, 9, 2]
        assert gather(together, SQUARES, fetched) == pytest.approx(np.array([[3, 3], [9, 3], [2, 2]]), rel=1e-14)

    def test_terms_without_a_batched_kernel(self, path):
        board = Board()
        found = board.put_many(MOMENTS, [torch.ones(2), torch.ones(3)])
        assert gather(found, MOMENTS, board.fetch())[:, 0].tolist() == [2, 3]

    def test_empty(self):
        assert Board().fetch() == {}

    def test_wrong_terms(self):
        wrong = additive("wrong", ("a", "b"), lambda x: x.double().sum().reshape(1))
        with pytest.raises(ProbeError, match=r"terms 'wrong' gave shape \[1\], expected \[2\]"):
            Board().put(wrong, (torch.ones(2),))

    def test_no_graph_is_kept(self, path):
        board = Board()
        weight = torch.ones(3, requires_grad=True)
        slot = board.put(MOMENTS, (weight * 2,))
        assert gather([slot], MOMENTS, board.fetch())[0, 1] == 2


def test_attention_is_observed_as_often_as_it_happens():
    board = Board()
    first, second, other = (slots(board, torch.tensor([value])) for value in (1.0, 2.0, 4.0))
    calls = [call(0, attention=[first, second], outputs=other), call(1, outputs=other), call(0, attention=[other])]
    assert module_observations(Tap.ATTENTION, calls) == {0: [first, second, other]}


def test_how_many_coordinates_there_are():
    terms = additive("sides", ("low", "high"), lambda x: torch.stack([(x < 0).sum(), (x > 0).sum()]).double())
    both = Statistic(
        "both",
        terms,
        lambda t: np.stack([t["low"], t["high"]], axis=-1),
        "1",
        "Counts.",
        dims=("side",),
        coords={"side": (0.0, 1.0)},
        extent=lambda t: np.where(t["high"] > 0, 2, 1),
    )
    probe = TensorProbe("p", Tap.OUTPUT, (both, MEAN))
    board = Board()
    low, high = (slots(board, torch.tensor([value]), probe) for value in (-1.0, 1.0))
    fetched = board.fetch()
    assert probe_extents(probe, {0: [low]}, fetched) == {"side": 1}
    assert probe_extents(probe, {0: [low], 3: [low, high]}, fetched) == {"side": 2}
    assert probe_extents(probe, {}, fetched) == {"side": 1}
