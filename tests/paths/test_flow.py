"""Both parts of every gradient, and what shortcuts alone carry, against plain autograd."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from keelscope.models import SCHEMES, build
from keelscope.onepass import loss_of

WRITER = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "write_topology.py"))
REAL = [name for name in WRITER["MODELS"] if name != "multi-layer perceptron"]
FUNCTIONAL = {"GPT-NeoX, parallel branches (transformers)"}  # two branches in one sum: no one module is the branch


def next_token(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(-1))


def reference(scheme: str, depth: int = 8, **options) -> nn.Module:
    model = build(scheme, depth=depth, width=16, heads=2, vocabulary=64, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # away from the zeros and ones of the start
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 and "query" not in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def check(found, distance, *, sums: float, alone: float) -> None:
    assert found.gradients.keys() == found.entering.keys() == set(range(len(found.topology)))
    for index, parts in found.gradients.items():
        assert distance(parts.entering, found.entering[index]) <= sums
        assert distance(parts.shortcut + parts.branch, found.entering[index]) <= sums
        assert distance(parts.shortcut_only, found.detached[index]) <= alone
        assert parts.leaving is not None


DEEP_IN_CI = {"keel", "post_ln", "pre_ln", "highway", "siamese_norm"}
CASES = [
    pytest.param(scheme, depth, marks=[pytest.mark.slow] if depth == 64 and scheme not in DEEP_IN_CI else [])
    for depth in (8, 64)
    for scheme in SCHEMES
]


@pytest.mark.parametrize(("scheme", "depth"), CASES)
def test_parts_add_up_and_shortcuts_alone_equal_detached_branches(scheme, depth, split, distance):
    found = split(reference(scheme, depth), next_token, branches={f"sublayers.{i}.branch" for i in range(depth)})
    assert found.obstacles == ()
    check(found, distance, sums=1e-5, alone=1e-6)


@pytest.mark.parametrize("scheme", ["keel", "post_ln", "pre_ln", "highway", "layerscale", "dyt"])
def test_the_local_parts_are_what_the_equation_says(scheme, split, distance):
    """Shortcut part = a J_n^T g', from the operands and the gradient at the sum."""
    found = split(reference(scheme).double(), next_token)
    for index, parts in found.gradients.items():
        met = found.operands[index]
        weight = met.shortcut / met.stream
        assert distance(parts.shortcut, parts.total * weight) < 1e-9


@pytest.mark.parametrize("gate", ["scalar", "vector", "token"])
@pytest.mark.parametrize("scheme", ["keel_gate", "highway"])
def test_gates(scheme, gate, split, distance):
    check(split(reference(scheme, gate=gate), next_token), distance, sums=1e-5, alone=1e-6)


@pytest.mark.parametrize("name", REAL)
def test_real_models(name, split, distance, operators):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = WRITER["MODELS"][name]()
    found = split(model, lambda model: loss_of(model, batch, WRITER["mean_square"]))
    assert found.gradients.keys() == found.entering.keys()
    assert len(found.gradients) == len(found.topology)
    last = found.topology.sublayers[-1].stream
    for record in found.topology.sublayers:
        parts, index = found.gradients[record.index], record.index
        assert distance(parts.shortcut + parts.branch, found.entering[index]) < 1e-5
        if record.stream != last:  # it begins with the real gradient, which has passed later branches
            assert parts.shortcut_only.norm() > 0
        elif name not in FUNCTIONAL:
            assert distance(parts.shortcut_only, found.detached[index]) < 1e-5


class Block(nn.Module):
    """A residual block written in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.branch = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "post, checkpoint":
            return checkpoint(self.post, x, use_reentrant=False)
        if self.kind == "pre, checkpoint":
            return checkpoint(self.pre, x, use_reentrant=False)
        if self.kind == "in place":
            z = self.branch(self.norm(x))
            z += x
            return z
        return self.pre(x) if self.kind == "pre" else self.post(x)

    def pre(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(self.norm(x))

    def post(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(3.0 * x + self.branch(x))


def stack(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), *[Block(kind) for _ in range(4)], nn.Linear(8, 20))


def mean_square(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(12).reshape(2, 6)).square().mean()


def test_addition_in_place(split, distance):
    """Setting a branch's gradient to zero does not work here, so that the same sum out of place is the reference."""
    found, plain = split(stack("in place"), mean_square), split(stack("pre"), mean_square)
    assert found.gradients.keys() == plain.gradients.keys() == set(range(4))
    for index, parts in found.gradients.items():
        assert distance(parts.shortcut + parts.branch, plain.entering[index]) < 1e-6
        assert distance(parts.shortcut_only, plain.detached[index]) < 1e-6


def test_checkpoints_are_never_run_again(split, distance):
    runs = []
    model = stack("post, checkpoint")
    for block in model[1:-1]:
        block.branch.register_forward_hook(lambda *_: runs.append(1))
    found = split(model, mean_square, oracle=False)
    assert len(runs) == 2 * 4  # the forward, and the recomputation that the user asked for
    assert "NativeLayerNorm" in found.obstacles[0]
    assert found.gradients[3].shortcut_only is None
    assert found.gradients[0].shortcut_only is None
    plain = split(stack("post"), mean_square)
    for index, parts in found.gradients.items():  # the local split needs nothing that was saved
        assert distance(parts.branch, plain.gradients[index].branch) == 0
        assert distance(parts.shortcut, plain.gradients[index].shortcut) == 0


def test_shortcuts_without_norm_pass_checkpoints(split, distance):
    found = split(stack("pre, checkpoint"), mean_square, oracle=False)
    plain = split(stack("pre"), mean_square)
    assert found.obstacles == ()
    for index in range(4):
        assert distance(found.gradients[index].shortcut_only, plain.detached[index]) <= 1e-6


class Identity(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Identity.runs += 1
        return gradient


def test_functions_of_the_user_are_not_called(split):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.blocks = nn.Embedding(20, 8), nn.ModuleList(Block("pre") for _ in range(3))

        def forward(self, x):
            x = self.embedding(x)
            for block in self.blocks:
                x = Identity.apply(block(x))
            return x

    Identity.runs = 0
    torch.manual_seed(0)
    found = split(Model(), mean_square, oracle=False)
    assert Identity.runs == 3
    assert "Identity" in found.obstacles[0]
    assert found.gradients[2].shortcut_only is not None  # the function lies between this sub-layer and the one before
    assert found.gradients[1].shortcut_only is None
    assert found.gradients[0].shortcut_only is None
    assert found.gradients[0].branch is not None


def test_a_second_backward_pass_changes_nothing(split):
    model = stack("pre")
    kept = {}

    def twice(model):
        kept["loss"] = mean_square(model)
        return kept["loss"]

    found = split(model, twice)
    first = {index: parts.entering.clone() for index, parts in found.gradients.items()}
    assert all(torch.equal(first[index], parts.entering) for index, parts in found.gradients.items())
    assert len(first) == 4


class Rounded(nn.Module):
    """A residual block that adds in bfloat16, whatever it is given and gives."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm, self.branch = kind, nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = self.branch(x.float())
        if self.kind == "inline casts":
            return self.norm((512 * x.bfloat16() + f.bfloat16()).float())
        if self.kind == "cast of the sum":
            return (512 * x + f).bfloat16()
        return self.norm(512 * x + f)


@pytest.mark.parametrize("kind", ["inline casts", "cast of the sum", "float32"])
def test_operands_are_in_the_type_of_the_sum(kind, split):
    """Shares of entries that rounding leaves alone, counted by hand in the model's own types."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 64), *[Rounded(kind) for _ in range(3)])
    found = split(model, lambda model: model(torch.arange(20).reshape(2, 10)).float().square().mean(), oracle=False)
    for met in found.operands.values():
        assert met.shortcut.dtype == (torch.float32 if kind == "float32" else torch.bfloat16)
        share = ((met.shortcut + met.branch == met.shortcut) & (met.branch != 0)).float().mean()
        assert (share > 0.5) == (kind != "float32")
