"""Every sub-layer of every reference scheme, with its form, weights and names, at depths 4, 64 and 1,024."""

from __future__ import annotations

import math

import pytest
import torch

from keelscope.models import SCHEMES, build

PRE = ("gpt2_scaled_init", "pre_ln")

# Per scheme: forms of the sub-layers (the last one repeats), a and b of the last one, names of the whole stream.
EXPECTED = {
    "attn_res": (["F(n c v)"], None, None, ("attn_res",)),
    "completep": (["x + b F(n x)"], 1, lambda depth: 2 / depth, ("completep",)),
    "deepnorm": (["n(a x + F(x))"], lambda depth: depth**0.25, 1, ("deepnorm",)),
    "depth_mup": (["x + b F(n x)"], 1, lambda depth: math.sqrt(2 / depth), ("depth_mup",)),
    "dyt": (["x + F(d x)"], 1, 1, ("dyt",)),
    "fixup": (["x + b F(x + c)"], 1, 1, ("fixup",)),
    "gpt2_scaled_init": (["x + F(n x)"], 1, 1, PRE),
    "highway": (["a x + b F(n x)"], 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2)), ("highway", "keel_gate")),
    "hybrid_norm": (["n(x + F(x))", "x + F(x)"], 1, 1, ("hybrid_norm",)),
    "hyper_connections": (["A x + b F(n c x)"], None, None, ("hyper_connections", "mhc")),
    "keel": (["x + F(n x)", "n(x + F(n x))", "n(a x + F(n x))"], float, 1, ("keel",)),
    "keel_ablation": (["n(a x + F(x))"], float, 1, ("keel_ablation",)),
    "keel_gate": (["n(a x + b F(n x))"], lambda d: d / (d + 1), lambda d: 1 / (d + 1), ("keel_gate",)),
    "layerscale": (["x + b F(n x)"], 1, lambda d: 0.1 if d <= 36 else 1e-5 if d <= 48 else 1e-6, ("layerscale",)),
    "ln_scaling": (["x + F(n x)", "x + F(n x)", "x + F(c n x)"], 1, 1, ("ln_scaling",)),
    "mhc": (["A x + b F(n c x)"], None, None, ("hyper_connections", "mhc")),
    "mix_ln": (None, 1, 1, ("mix_ln",)),
    "ngpt": (["n(a x + b n(F(x)))"], 0.95, 0.05, ("ngpt",)),
    "normformer": (["x + n(F(n x))", "x + W n(F(n x))"], 1, 1, ("normformer",)),
    "peri_ln": (["x + n(F(n x))"], 1, 1, ("peri_ln", "sandwich_ln")),
    "post_ln": (["n(x + F(x))"], 1, 1, ("post_ln",)),
    "pre_ln": (["x + F(n x)"], 1, 1, PRE),
    "residual_dual": (["n(x + F(x)), y + F"], 1, 1, ("residual_dual",)),
    "rezero": (["x + b F(x)"], 1, 0, ("rezero", "skipinit")),
    "sandwich_ln": (["x + n(F(n x))"], 1, 1, ("peri_ln", "sandwich_ln")),
    "siamese_norm": (["n(x + F(n x)), y + F", "n(x + b F(n x)), y + F"], 1, lambda d: d**-0.5, ("siamese_norm",)),
    "skipinit": (["x + b F(x)"], 1, 0, ("rezero", "skipinit")),
    "sub_ln": (["x + W n(F(n x))"], 1, 1, ("sub_ln",)),
}
DEEP_IN_CI = {"keel"}
DEPTHS = [
    pytest.param(name, depth, marks=[pytest.mark.slow] if depth == 1024 and name not in DEEP_IN_CI else [])
    for depth in (4, 64, 1024)
    for name in SCHEMES
]
ALTERNATING = {"hybrid_norm", "normformer"}


def forms(name, depth):
    """The form of each sub-layer as the scheme's equation says."""
    if name == "mix_ln":
        post = 2 * int(0.25 * (depth // 2))
        return ["n(x + F(x))"] * post + ["x + F(n x)"] * (depth - post)
    first = EXPECTED[name][0]
    if name in ALTERNATING:
        return (first * depth)[:depth]
    return (first + first[-1:] * depth)[:depth]


def value(expected, depth):
    return expected(depth) if callable(expected) else expected


@pytest.mark.parametrize(("name", "depth"), DEPTHS)
def test_every_sublayer_is_found_and_named(name, depth, look):
    model = build(name, depth=depth, width=8, heads=2)
    found = look(model, torch.randint(0, 256, (2, 5), generator=torch.Generator().manual_seed(0)))
    assert [record.form for record in found.sublayers] == forms(name, depth)
    assert [record.index for record in found.sublayers] == list(range(depth))
    assert {record.stream for record in found.sublayers} == {0}
    _, alpha, beta, schemes = EXPECTED[name]
    last = found.sublayers[-1]
    for coefficient, expected in ((last.alpha, value(alpha, depth)), (last.beta, value(beta, depth))):
        assert (coefficient.value is None) == (expected is None)
        assert expected is None or coefficient.value == pytest.approx(expected, rel=1e-5)
    exceptions = {"mix_ln": PRE, "completep": ("completep", "depth_mup")} if depth == 4 else {}
    assert found.schemes == (exceptions.get(name, schemes),)
    assert found.unknown == ()


def test_every_scheme_has_an_expectation():
    assert set(EXPECTED) == set(SCHEMES)


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - {"attn_res", "hyper_connections", "mhc"}))
def test_sites_are_those_of_the_model(name, look):
    """Each sub-layer is one entry of the stack; its stream comes from the entry before."""
    found = look(build(name, depth=6, width=8, heads=2), torch.ones(2, 5, dtype=torch.int64)).sublayers
    for index, record in enumerate(found):
        entry = f"sublayers.{index}"
        assert record.branch == (record.branch_norm or f"{entry}.branch")
        assert all(path.startswith(entry) for path in record.branch_sites)
        assert f"{entry}.branch.output" in record.branch_sites
        if name != "hybrid_norm":
            assert record.site == entry
            assert record.norm_after in {
                None,
                *(f"{entry}.{norm}" for norm in ("norm", "outer_norm", "norm_x", "unit")),
            }
        if index and name != "hybrid_norm":
            assert record.shortcut == f"sublayers.{index - 1}"


@pytest.mark.parametrize(
    ("name", "options", "form", "kind"),
    [
        ("keel", {"alpha_learnable": True}, "n(a x + F(n x))", "learnable scalar"),
        ("keel_gate", {"gate": "vector"}, "n(a x + b F(n x))", "learnable vector"),
        ("keel_gate", {"gate": "token"}, "n(a x + b F(n x))", "gate (token)"),
        ("keel_gate", {"outer_norm": False}, "a x + b F(n x)", "learnable scalar"),
        ("keel_gate", {"activation": "clamp"}, "n(a x + b F(n x))", "learnable scalar"),
        ("highway", {"gate": "token"}, "a x + b F(n x)", "gate (token)"),
        ("keel_ablation", {"stage": 2}, "n(a x + F(c x))", "constant"),
        ("keel_ablation", {"stage": 3}, "n(a x + F(c n x))", "constant"),
        ("keel_ablation", {"stage": 4}, "n(a x + F(n x))", "constant"),
        ("normformer", {"residual_scale": True}, "a x + W n(F(n x))", "learnable vector"),
        ("keel", {"experts": 4}, "n(a x + F(n x))", "constant"),
        ("pre_ln", {"experts": 4}, "x + F(n x)", "one"),
        ("post_ln", {"feed_forward": "swiglu"}, "n(x + F(x))", "one"),
    ],
)
@pytest.mark.parametrize("norm", ["rms", "layer", "scale"])
def test_options(name, options, form, kind, norm, look):
    model = build(name, depth=6, width=8, heads=2, norm=norm, dropout=0.1, **options)
    found = look(model, torch.randint(0, 256, (2, 5), generator=torch.Generator().manual_seed(0)))
    last = found.sublayers[-1]
    assert len(found) == 6
    assert (last.form, last.alpha.kind) == (form, kind)
    assert name in last.schemes or name == "normformer"


def test_gates_are_found_where_they_are_computed(look):
    found = look(build("highway", depth=2, width=8, heads=2, gate="token"), torch.ones(1, 4, dtype=torch.int64))
    assert [record.beta.site for record in found.sublayers] == ["sublayers.0.gate", "sublayers.1.gate"]
    assert all(record.beta.parameter.startswith(f"sublayers.{record.index}.gate.") for record in found.sublayers)


def test_first_block_of_keel(look):
    found = look(build("keel", depth=6, width=8, heads=2, first_block="v1"), torch.ones(1, 4, dtype=torch.int64))
    assert [record.form for record in found.sublayers][:3] == ["x + F(n x)", "x + F(n x)", "n(a x + F(n x))"]
    assert found.schemes == (("keel",),)


def test_a_final_norm_belongs_to_no_sublayer(look):
    batch = torch.ones(1, 4, dtype=torch.int64)
    for name in ("post_ln", "pre_ln", "rezero"):
        forms = [
            look(build(name, depth=4, width=8, heads=2, final_norm=wanted), batch).forms() for wanted in (True, False)
        ]
        assert forms[0] == forms[1]


def test_second_stream(look):
    found = look(build("residual_dual", depth=4, width=8, heads=2, scale=0.5), torch.ones(1, 4, dtype=torch.int64))
    assert found.sublayers[0].form == "n(x + F(x)), y + b F"
    assert [record.part_of for record in found.further] == [0, 1, 2, 3]
    assert {(record.form, record.beta.value, record.branch) for record in found.further[1:2]} == {
        ("y + b F", 0.5, "sublayers.1.branch")
    }
