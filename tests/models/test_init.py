from __future__ import annotations

import pytest
import torch

from keelscope import models
from keelscope.models.config import INITS
from keelscope.models.init import DRAWS


def test_every_name_has_a_draw():
    assert sorted(DRAWS) == sorted(INITS)


@pytest.mark.parametrize(
    ("init", "hidden", "output", "head", "embedding"),
    [
        ("unit_gain", 64**-0.5, 256**-0.5, 1 / 8, 1.0),
        ("xavier", (2 / 320) ** 0.5, (2 / 320) ** 0.5, (2 / 320) ** 0.5, 1.0),
        ("torch", (3 * 64) ** -0.5, (3 * 256) ** -0.5, (3 * 64) ** -0.5, 1.0),
        ("normal", 0.02, 0.02, 0.02, 0.02),
        ("scaled", 0.02, 0.02 / 16**0.5, 0.02, 0.02),
        ("scale_norm", 64**-0.5, 256**-0.5, 1 / 8, 1.0),
    ],
)
def test_standard_deviations(init, hidden, output, head, embedding):
    model = models.build("pre_ln", depth=8, init=init)
    branch = model.sublayers[5].branch
    for weight, expected in [
        (branch.hidden.weight, hidden),
        (branch.output.weight, output),
        (model.head.weight, head),
        (model.embedding.weight, embedding),
    ]:
        assert weight.std().item() == pytest.approx(expected, rel=0.03)
        assert weight.mean().abs().item() < 0.05 * expected


def test_scale_norm_rows_have_length_one():
    model = models.build("pre_ln", depth=2, init="scale_norm")
    weight = model.sublayers[0].branch.query.weight
    torch.testing.assert_close(weight.norm(dim=-1), torch.ones(64))


def test_torch_init_is_uniform():
    weight = models.build("pre_ln", depth=2, init="torch").sublayers[1].branch.hidden.weight
    assert weight.abs().max() <= 1 / 8
    assert weight.abs().max() > 0.124


def test_biases_start_at_zero_and_the_embedding_std_can_be_set():
    model = models.build("pre_ln", depth=2, bias=True, embedding_std=0.3)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert sum(name.endswith("bias") for name, _ in model.named_parameters()) == 6
    assert model.embedding.weight.std().item() == pytest.approx(0.3, rel=0.03)
