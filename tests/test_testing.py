"""`check_probe` passes what keeps the contract and says exactly what is wrong with what does not."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from keelscope.errors import ProbeError
from keelscope.probe import Tap, TensorProbe, available_probes
from keelscope.statistics import MAX_ABS, MEAN, MOMENTS, RMS, SQUARES, Statistic, Terms, additive
from keelscope.testing import check_probe

KEPT: list[torch.Tensor] = []


def probe(*statistics: Statistic, tap: Tap = Tap.OUTPUT, **options) -> TensorProbe:
    return TensorProbe(options.pop("name", "mine"), tap, statistics or (RMS,), **options)


def statistic(terms: Terms, finish=lambda t: t["a"], **options) -> Statistic:
    return Statistic(options.pop("name", "s"), terms, finish, "1", "A number.", **options)


def sums(of, columns: tuple[str, ...] = ("a",), **options) -> Terms:
    return additive("mine", columns, of, **options)


def total(x: torch.Tensor) -> torch.Tensor:
    return x.double().sum().reshape(1)


@pytest.mark.parametrize("name", sorted(available_probes()))
def test_installed_probes_keep_the_contract(name):
    check_probe(available_probes()[name])


SEVERAL = {Tap.UPDATE, Tap.INPUT_AND_GRADIENT, Tap.RESIDUAL_SUM, Tap.RESIDUAL_GRADIENTS}


@pytest.mark.parametrize("tap", [tap for tap in Tap if tap is not Tap.JACOBIAN])
def test_every_tap_can_be_checked(tap):
    pair = additive("pair", ("a",), lambda *xs: sum(x.double().abs().sum() for x in xs).reshape(1), (0,))
    scale_free = replace(statistic(pair, lambda t: t["a"] * 0), mergeable=True)
    check_probe(probe(scale_free if tap in SEVERAL else MAX_ABS, tap=tap))


class Plain:
    """A probe that inherits nothing."""

    name, group, version, tap, statistics, optional, every = "plain", "", 1, Tap.OUTPUT, (RMS,), (), 1

    def fits(self, owner):
        return isinstance(owner, nn.Linear)

    def view(self, tensors, owner):
        return tensors


def test_nothing_needs_to_be_inherited():
    check_probe(Plain())


def test_a_statistic_with_an_axis():
    quantiles = Statistic(
        "level",
        additive("counts", ("n", "low", "high"), sides),
        lambda t: np.stack([t["low"] / t["n"], t["high"] / t["n"]], axis=-1),
        "1",
        "Shares of entries below and above 0.",
        dims=("side",),
        coords={"side": (-1.0, 1.0)},
    )
    check_probe(probe(quantiles))


def sides(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([(x == x).sum(), (x < 0).sum(), (x > 0).sum()]).double()


def test_own_module():
    class Gate(nn.Module):
        def forward(self, x, mask):
            return {"gated": x * mask}

    mine = probe(MEAN, chooses=lambda module: isinstance(module, Gate))
    check_probe(mine, module=Gate(), inputs=(torch.randn(3, 4), torch.ones(4)))
    with pytest.raises(
        ProbeError, match=r"probe 'mine': fits none of Linear, LayerNorm, .*; give a module that it fits"
    ):
        check_probe(mine)


def keeping(tensors, _):
    KEPT.append(tensors[0].detach()[0])
    return tensors


def drawing(tensors, _):
    return (tensors[0] + torch.rand(()),)


def drawing_python(tensors, _):
    random.random()
    return tensors


def changing(tensors, _):
    return (tensors[0].mul_(2),)


def reading(tensors, _):
    return tensors if tensors[0].abs().sum() > 0 else None


def masking(tensors, _):
    return (tensors[0][tensors[0] > 0],)


def kept_of(x):
    KEPT.append(x)
    return total(x)


def half_only(x):
    if x.dtype == torch.float16:
        raise TypeError("no half")
    return total(x)


WRONG = {
    "not a probe": (
        object(),
        r"lacks name, group, version, tap, statistics, optional, every, fits, view; a probe has name",
    ),
    "a class": (Plain, r"is a class: give an instance"),
    "a part missing": (
        type("P", (), {k: v for k, v in vars(Plain).items() if k != "every"})(),
        r"lacks every; a probe has",
    ),
    "name no string": (probe(name=3), r"probe 3: name is 3, expected str"),
    "name not storable": (probe(name="a/b"), r"probe 'a/b': A group cannot be called 'a/b': use at most 64 letters"),
    "name taken": (probe(name="scalars"), r"probe 'scalars': A group cannot be called 'scalars': the run file uses"),
    "group not storable": (probe(group="my group"), r"A group cannot be called 'my group'"),
    "tap": (probe(tap="output"), r"tap is 'output', expected Tap"),
    "version": (probe(version=0), r"version is 0, expected at least 1"),
    "every": (probe(every=True), r"every is True, expected int"),
    "list": (replace(probe(), statistics=[RMS]), r"statistics is \[Statistic\(.*\], expected tuple"),
    "no statistics": (replace(probe(), statistics=()), r"statistics is empty, so nothing would be recorded"),
    "no statistic": (probe("rms"), r"'rms' is no keelscope.Statistic"),
    "two of a name": (
        probe(RMS, RMS),
        r"Two things are called 'rms'; every statistic of 'mine' needs a name of its own",
    ),
    "optional of a name": (probe(RMS, optional=(RMS,)), r"Two things are called 'rms'"),
    "statistic name": (probe(replace(RMS, name="step")), r"A statistic of 'mine' cannot be called 'step'"),
    "no unit": (probe(replace(RMS, unit="")), r"statistic 'rms' needs a unit \(\"1\" for a pure number\) and a doc"),
    "no doc": (probe(replace(RMS, doc="")), r"statistic 'rms' needs a unit .* and a doc of one sentence"),
    "terms": (
        probe(replace(RMS, terms=total)),
        r"the terms of statistic 'rms' are <function .*expected keelscope.Terms",
    ),
    "columns": (probe(statistic(sums(total, ("a", "a")))), r"have columns \('a', 'a'\), expected distinct names"),
    "degrees": (probe(statistic(sums(total, degrees=(1, 2)))), r"have 2 degrees for 1 columns"),
    "coordinates": (
        probe(statistic(sums(total), dims=("head",))),
        r"each with its coordinate values .*missing: 'head'",
    ),
    "fits raises": (probe(chooses=lambda module: module.bias is None), r"fits\(ReLU\) raises AttributeError"),
    "fits type": (probe(chooses=lambda _: "yes"), r"fits\(Linear\) gives 'yes', expected True or False"),
    "fits nothing": (probe(chooses=lambda _: False), r"fits none of Linear, .*; give a module that it fits"),
    "attention nowhere": (
        probe(tap=Tap.ATTENTION, chooses=lambda module: isinstance(module, nn.Linear)),
        r"sees no attention in any of Linear, .*; give a module that it fits",
    ),
    "extent without an axis": (
        probe(statistic(sums(total), extent=lambda t: t["a"])),
        r"statistic 's' has an extent, so it needs one axis, not \(\)",
    ),
    "view raises": (probe(views=lambda t, _: t[1]), r"view\(\) raises at Linear: IndexError: tuple index out of range"),
    "view type": (
        probe(views=lambda t, _: t[0]),
        r"view\(\) gives Tensor at Linear, expected a tuple of tensors or None",
    ),
    "view entries": (
        probe(views=lambda t, _: (1.0,)),
        r"view\(\) gives tuple at Linear, expected a tuple of tensors or None",
    ),
    "changes": (probe(views=changing), r"view\(\) or its terms change the tensors they are shown at Linear"),
    "keeps": (
        probe(views=keeping),
        r"view\(\) or its terms keep a tensor they were shown at Linear: memory would grow",
    ),
    "terms keep": (probe(statistic(sums(kept_of))), r"view\(\) or its terms keep a tensor"),
    "draws": (probe(views=drawing), r"view\(\) or its terms draw random numbers at Linear"),
    "draws in Python": (probe(views=drawing_python), r"view\(\) or its terms draw random numbers at Linear"),
    "reads": (probe(views=reading), r"view\(\) or its terms read a value at Linear \(item\(\), .*wait for the device"),
    "masks": (probe(views=masking), r"view\(\) or its terms read a value at Linear"),
    "item": (probe(statistic(sums(lambda x: torch.tensor([float(x.sum())]).double()))), r"read a value at Linear"),
    "terms raise": (
        probe(statistic(sums(half_only))),
        r"the terms 'mine' raise on torch.float16 \[4, 6, 8\]: TypeError: no half",
    ),
    "terms type": (probe(statistic(sums(lambda x: 1.0))), r"the terms 'mine' give float, expected torch.float64 \[1\]"),
    "terms shape": (
        probe(statistic(sums(lambda x: x.double().sum()))),
        r"give torch.float64 \[\], expected torch.float64 \[1\]",
    ),
    "terms dtype": (
        probe(statistic(sums(lambda x: x.sum().reshape(1)))),
        r"give torch.float32 \[1\], expected torch.float64",
    ),
    "finish raises": (probe(statistic(MOMENTS)), r"finish of 's' raises KeyError: 'a'"),
    "finish shape": (
        probe(statistic(sums(total), lambda t: np.stack([t["a"]] * 2))),
        r"'s' gives \[2\] for terms \[1\], expected \[\]",
    ),
    "finish of several": (
        probe(statistic(sums(total), lambda t: t["a"].sum())),
        r"'s' gives \[\] for terms \[3, 1\], expected \[3\]",
    ),
    "merge law": (
        probe(statistic(sums(lambda x: x.double().sum().square().reshape(1)))),
        r"'s' breaks of\(a \+\+ b\) == merge\(of\(a\), of\(b\)\) at Linear: two parts give .*; a statistic",
    ),
    "mean of means": (
        probe(statistic(Terms("m", ("a",), lambda x: x.double().mean().reshape(1), lambda a, b: (a + b) / 2))),
        r"breaks of\(a \+\+ b\) == merge",
    ),
    "merge raises": (
        probe(statistic(Terms("m", ("a",), total, lambda a, b: a.nothing))),
        r"merge of the terms 'm' raises AttributeError",
    ),
    "loss scale": (
        probe(statistic(sums(lambda x: x.double().abs().sum().reshape(1))), tap=Tap.OUTPUT_GRADIENT),
        r"'s' keeps the loss scale of mixed precision at Linear .*; give the terms 'mine' their degrees, or a rescale",
    ),
    "wrong degrees": (
        probe(
            replace(statistic(SQUARES, lambda t: t["squares"]), terms=replace(SQUARES, degrees=(0, 1))),
            tap=Tap.PARAMETER_GRADIENT,
        ),
        r"keeps the loss scale of mixed precision",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_said(kind):
    wrong, message = WRONG[kind]
    try:
        with pytest.raises(ProbeError, match=message) as caught:
            check_probe(wrong)
        assert str(caught.value).count("\n") <= 1
    finally:
        KEPT.clear()


def test_random_state_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    check_probe(Plain())
    assert torch.equal(before, torch.get_rng_state())


def test_a_statistic_that_cannot_merge_says_so():
    squared = statistic(sums(lambda x: x.double().sum().square().reshape(1)), mergeable=False)
    check_probe(probe(squared))
