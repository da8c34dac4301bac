from __future__ import annotations

import pytest
import torch

from keelscope import models
from keelscope.models.config import ModelConfig
from keelscope.models.moe import MixtureOfExperts

CONFIG = ModelConfig(depth=2, width=8, heads=2, experts=4, experts_per_token=2)


def test_each_token_is_the_weighted_sum_of_its_best_experts():
    torch.manual_seed(0)
    branch = MixtureOfExperts(CONFIG).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for b in range(3):
        for t in range(5):
            scores = branch.router(x[b, t]).tolist()
            best = sorted(range(4), key=scores.__getitem__, reverse=True)[:2]
            weights = torch.tensor([scores[e] for e in best], dtype=torch.float64).softmax(0)
            expected[b, t] = sum(w * branch.experts[e](x[b, t]) for w, e in zip(weights, best, strict=True))
    torch.testing.assert_close(branch(x), expected)


def test_an_expert_without_tokens_gets_a_gradient_of_zero_and_not_none():
    torch.manual_seed(0)
    branch = MixtureOfExperts(CONFIG)
    branch.router.weight.data[:2] = 0.1
    branch.router.weight.data[2:] = -0.1
    branch(torch.rand(1, 5, 8)).sum().backward()
    sizes = [expert.output.weight.grad.abs().sum().item() for expert in branch.experts]
    assert sizes[0] > 0
    assert sizes[1] > 0
    assert sizes[2:] == [0, 0]


@pytest.mark.parametrize("scheme", models.SCHEMES)
def test_every_scheme_takes_experts(scheme):
    model = models.build(scheme, depth=2, width=8, heads=2, experts=3)
    assert type(model.sublayers[1].branch).__name__ == "MixtureOfExperts"
    model(torch.arange(8).view(1, 8)).logsumexp(-1).sum().backward()
    model.after_step()


def test_init_rules_reach_every_expert():
    model = models.build("deepnorm", depth=8, experts=3, init="scaled")
    plain = models.build("deepnorm", depth=8, experts=3, init="normal")
    for ours, base in zip(model.sublayers[3].branch.experts, plain.sublayers[3].branch.experts, strict=True):
        torch.testing.assert_close(ours.output.weight, base.output.weight / 4)
        assert torch.equal(ours.hidden.weight, base.hidden.weight)
        assert ours.hidden.weight.std().item() == pytest.approx(0.02 * 32**-0.25, rel=0.03)


def test_keel_with_experts_is_flat(flow):
    measured = flow("keel", depth=64, experts=4)
    assert abs(measured.slope("whole", skip=2)) < 1e-3
    assert abs(measured.slope("late", skip=2)) < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": -1}, "experts = -1 cannot be used: give a whole number, 0 or more"),
        (
            {"experts": 4, "experts_per_token": 0},
            "experts_per_token = 0 cannot be used: give a whole number, 1 or more",
        ),
        ({"experts": 2, "experts_per_token": 3}, "experts_per_token = 3 is more than experts = 2: give fewer"),
    ],
)
def test_experts_that_cannot_be_built(options, message):
    with pytest.raises(ValueError, match=r".") as caught:
        models.build("keel", **options)
    assert str(caught.value) == message
