"""Weights on shortcut and branch: every way of writing them, their kind, value and parameter."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from keelscope.topology import Coefficient

GATED = ("highway", "keel_gate")


def weights(record):
    return [(c.kind, None if c.value is None else round(c.value, 4), c.parameter) for c in (record.alpha, record.beta)]


ONE = ("one", 1.0, None)


def fixed(value):
    return ("constant", value, None)


def learned(value, name="alpha", kind="learnable scalar"):
    return (kind, value, f"blocks.1.{name}")


CASES = {
    "number": (lambda b, x: 7.0 * x + b.branch(x), "a x + F(x)", fixed(7.0), ONE),
    "number as tensor": (lambda b, x: torch.tensor(7.0) * x + b.branch(x), "a x + F(x)", fixed(7.0), ONE),
    "one as number": (lambda b, x: 1.0 * x + b.branch(b.norm(x)), "x + F(n x)", ONE, ONE),
    "buffer": (lambda b, x: x * b.fixed + b.branch(x), "a x + F(x)", ("buffer", 3.0, "blocks.1.fixed"), ONE),
    "parameter": (lambda b, x: x + b.alpha * b.branch(b.norm(x)), "x + b F(n x)", ONE, learned(0.75)),
    "vector": (lambda b, x: x + b.scale * b.branch(x), "x + b F(x)", ONE, learned(0.5, "scale", "learnable vector")),
    "softplus": (
        lambda b, x: x + F.softplus(b.alpha) * b.branch(b.norm(x)),
        "x + b F(n x)",
        ONE,
        learned(round(math.log1p(math.exp(0.75)), 4)),
    ),
    "complement": (
        lambda b, x: (1 - b.alpha) * x + b.alpha * b.branch(b.norm(x)),
        "a x + b F(n x)",
        learned(0.25),
        learned(0.75),
    ),
    "division": (lambda b, x: x + b.branch(b.norm(x)) / b.alpha, "x + b F(n x)", ONE, learned(1.3333)),
    "division by a number": (lambda b, x: x + b.branch(b.norm(x)) / 4, "x + b F(n x)", ONE, fixed(0.25)),
    "add alpha": (lambda b, x: torch.add(x, b.branch(b.norm(x)), alpha=0.3), "x + b F(n x)", ONE, fixed(0.3)),
    "minus": (lambda b, x: x - b.branch(b.norm(x)), "x + b F(n x)", ONE, fixed(-1.0)),
    "sub alpha": (lambda b, x: torch.sub(x, b.branch(x), alpha=2), "x + b F(x)", ONE, fixed(-2.0)),
    "rsub": (lambda b, x: torch.rsub(b.branch(x), x, alpha=2), "x + b F(x)", ONE, fixed(-2.0)),
    "negative": (lambda b, x: -x + b.branch(x), "a x + F(x)", fixed(-1.0), ONE),
    "sum scaled": (lambda b, x: (x + b.branch(x)) / 2, "a x + b F(x)", fixed(0.5), fixed(0.5)),
    "lerp": (lambda b, x: torch.lerp(x, b.branch(x), 0.25), "a x + b F(x)", fixed(0.75), fixed(0.25)),
    "lerp by a tensor": (
        lambda b, x: torch.lerp(x, b.branch(x), torch.tensor(0.25)),
        "a x + b F(x)",
        fixed(0.75),
        fixed(0.25),
    ),
    "lerp by a parameter": (
        lambda b, x: torch.lerp(x, b.branch(b.norm(x)), b.alpha),
        "a x + b F(n x)",
        learned(0.25),
        learned(0.75),
    ),
    "addcmul": (
        lambda b, x: torch.addcmul(x, b.scale, b.branch(b.norm(x)), value=0.5),
        "x + b F(n x)",
        ONE,
        learned(0.25, "scale", "learnable vector"),
    ),
    "difference": (
        lambda b, x: x + b.scale * (b.branch(x) - x),
        "a x + b F(x)",
        learned(0.5, "scale", "learnable vector"),
        learned(0.5, "scale", "learnable vector"),
    ),
    "in place": (lambda b, x: F.relu(b.branch(b.norm(x))).add_(x), "x + F(n x)", ONE, ONE),
    "in place, weighted": (lambda b, x: F.relu(b.branch(b.norm(x))).add_(x, alpha=3), "a x + F(n x)", fixed(3.0), ONE),
}


@pytest.mark.parametrize("name", CASES)
def test_kind_and_value(name, middle):
    equation, form, alpha, beta = CASES[name]
    record = middle(equation)
    assert record.form == form
    assert weights(record) == [alpha, beta]


def in_place(block, x):
    x = x.clone()
    z = block.fall(F.gelu(block.rise(block.norm(x))))  # a view of what addmm made
    z += x
    return z


def in_place_alpha(block, x):
    return block.fall(block.rise(block.norm(x))).sub_(x, alpha=2)


@pytest.mark.parametrize(
    ("equation", "form", "alpha"), [(in_place, "x + F(n x)", 1), (in_place_alpha, "a x + F(n x)", -2)]
)
def test_in_place_on_a_view(equation, form, alpha, middle):
    """Only the gradients tell a sum from a product."""
    record = middle(equation)
    assert record.addition == "torch::autograd::CopySlices"
    assert (record.form, record.alpha.value, record.branch) == (form, pytest.approx(alpha, rel=1e-5), "blocks.1.fall")


def test_in_place_product_on_a_view_is_no_sum(middle):
    def gated(block, x):
        z = block.fall(block.rise(block.norm(x)))
        z *= x
        return z

    record = middle(gated)
    assert (record.form, record.alpha.kind, record.schemes) == ("unknown", "unknown", ())


@pytest.mark.parametrize("full", [False, True])
def test_gates_that_read_the_stream(full, middle):
    def highway(block, x):
        gate = torch.sigmoid((block.gates if full else block.gate)(x))
        return gate * block.branch(block.norm(x)) + (1 - gate) * x

    record = middle(highway)
    assert (record.form, record.alpha.kind, record.beta.kind) == ("a x + b F(n x)", "gate (token)", "gate (token)")
    assert record.alpha.value + record.beta.value == pytest.approx(1)
    assert record.beta.parameter.startswith("blocks.1.gates." if full else "blocks.1.gate.")
    assert record.schemes == GATED


def test_value_of_a_gate_is_its_mean(look, stack, tokens):
    seen = []

    def gated(block, x):
        gate = torch.sigmoid(block.gate(x))
        seen.append(float(gate.detach().mean()))
        return x + gate * block.branch(block.norm(x))

    found = look(stack(gated), tokens)
    assert [record.beta.value for record in found.sublayers] == pytest.approx(seen)


def test_frozen_parameter_is_a_fixed_tensor(look, stack, tokens):
    model = stack(lambda b, x: b.alpha * x + b.branch(x))
    model.blocks[1].alpha.requires_grad_(requires_grad=False)
    kinds = [record.alpha.kind for record in look(model, tokens).sublayers]
    assert kinds == ["learnable scalar", "buffer", "learnable scalar"]


def test_values_that_are_gone_are_unknown(look, stack, tokens):
    """FSDP frees whole parameters after the forward of a block, while the graph keeps the tensors."""

    class Freed(stack):
        """Frees the weights of the branches at the end of its forward."""

        def forward(self, tokens):
            output = super().forward(tokens)
            for block in self.blocks:
                block.scale.untyped_storage().resize_(0)
            return output

    found = look(Freed(lambda b, x: x + b.scale * b.branch(b.norm(x))), tokens)
    assert {(r.form, r.beta.kind, r.beta.value) for r in found.sublayers} == {
        ("x + b F(n x)", "learnable vector", None)
    }
    assert found.schemes == (("layerscale",),)


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize("rate", [0.3, 0.9])
def test_dropout_is_no_weight(module, rate, middle):
    def dropped(block, x):
        drop = torch.nn.Dropout(rate) if module else lambda t: F.dropout(t, rate)
        return block.norm(x + drop(block.branch(x)))

    record = middle(dropped)
    assert (record.form, record.beta, record.branch) == ("n(x + F(x))", Coefficient(), "blocks.1.fall")


def test_stochastic_depth_is_no_weight(middle):
    def dropped(block, x):
        keep = torch.zeros(len(x), 1, 1)
        keep[0] = 4.0
        return x + keep * block.branch(block.norm(x))

    assert middle(dropped).form == "x + F(n x)"


def test_dropout_on_the_stream(middle):
    record = middle(lambda b, x: F.dropout(x + b.branch(b.norm(x)), 0.4))
    assert (record.form, record.alpha.is_one) == ("x + F(n x)", True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_casts_are_seen_through(dtype, middle):
    def mixed(block, x):
        branch = block.branch(block.norm(x).float()).to(dtype)
        return (2.0 * x.to(dtype) + branch).float()

    assert weights(middle(mixed)) == [fixed(2.0), ONE]


def test_autocast(look, stack, tokens):
    model = stack(lambda b, x: b.norm(b.alpha * x + F.dropout(b.branch(x), 0.2)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = look(model, tokens)
    assert found.forms() == {"n(a x + F(x))": 3}
    assert [record.alpha.value for record in found.sublayers] == [0.75] * 3


def test_views_are_seen_through(middle):
    def turned(block, x):
        return (
            2.0 * x.transpose(0, 1).contiguous() + block.branch(x.reshape(-1, 8)).view(4, 6, 8).mT.mT.permute(1, 0, 2)
        ).mT.mT.transpose(0, 1)

    assert weights(middle(turned)) == [fixed(2.0), ONE]


def test_product_and_sum_of_weights(middle):
    record = middle(lambda b, x: b.fixed * (b.alpha * (x + 2.0 * b.branch(x))))
    assert weights(record) == [
        ("learnable scalar", 2.25, "blocks.1.alpha"),
        ("learnable scalar", 4.5, "blocks.1.alpha"),
    ]


def test_parallel_branches_are_one_sum_or_two(look, stack, tokens):
    after_each_other = look(stack(lambda b, x: x + b.branch(b.norm(x)) + b.gates(b.norm(x))), tokens)
    together = look(stack(lambda b, x: b.branch(b.norm(x)) + b.gates(b.norm(x)) + x), tokens)
    assert after_each_other.forms() == {"x + F(n x)": 6}
    assert together.forms() == {"x + F(n x)": 3}
    assert {record.stream for record in (*after_each_other.sublayers, *together.sublayers)} == {0}


def test_sum_inside_a_product(middle):
    def fused(block, x):
        hidden = F.gelu(block.rise(block.norm(x))).flatten(0, 1)
        return torch.addmm(x.flatten(0, 1), hidden, block.fall.weight.mT, beta=2).view_as(x)

    record = middle(fused)
    assert (record.form, record.alpha.value, record.addition) == ("a x + F(n x)", 2.0, "AddmmBackward0")
