"""Schemes with more than one stream: two_streams and many_streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keelscope import models
from keelscope.models.schemes.many_streams import sinkhorn

TOKENS = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))
SMALL = {"depth": 8, "width": 16, "heads": 2}


def test_residual_dual_equation(run, rms):
    def formula(_, state, F):
        x, r = state
        return rms(x + F(x)), r + 0.5 * F(x)

    model, logits, (x, r) = run("residual_dual", formula, start=lambda x: (x, x), scale=0.5)
    torch.testing.assert_close(logits, model.head(x + rms(r)))


def test_siamese_norm_equation(run, rms):
    def formula(index, state, F):
        x, y = state
        output = F(rms(x + rms(y)))
        return rms(x + output / (index + 1) ** 0.5), y + output

    model, logits, (x, y) = run("siamese_norm", formula, start=lambda x: (x, x))
    torch.testing.assert_close(logits, model.head(x + rms(y)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_hyper_connections_equation(run, rms, dynamic):
    generator = torch.Generator().manual_seed(0)

    def prepare(model):
        for sublayer in model.sublayers:
            for name, parameter in sublayer.named_parameters(recurse=False):
                del name
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4

    def formula(index, state, F):
        layer = sublayers[index]
        read, mix, write = layer.read, layer.mix, layer.write  # [stream], [stream, stream], [stream]
        streams = len(read)
        if dynamic:
            shared = torch.tanh(rms(state) @ layer.dynamic)
            read = layer.read + layer.dynamic_scale[0] * shared[..., 0]
            write = layer.write + layer.dynamic_scale[2] * shared[..., 1]
        reading = sum(read[..., i, None] * state[..., i, :] for i in range(streams))
        output = F(rms(reading))
        new = []
        for i in range(streams):
            row = sum(
                (mix[i, j] + (layer.dynamic_scale[1] * shared[..., j, 2 + i, None] if dynamic else 0))
                * state[..., j, :]
                for j in range(streams)
            )
            new.append(row + write[..., i, None] * output)
        return torch.stack(new, -2)

    sublayers = []
    model, logits, state = run(
        "hyper_connections",
        formula,
        start=lambda x: torch.stack([x] * 3, -2),
        prepare=lambda model: (prepare(model), sublayers.extend(model.sublayers)),
        streams=3,
        dynamic=dynamic,
    )
    torch.testing.assert_close(logits, model.head(rms(state.sum(-2))))


@pytest.mark.parametrize("dynamic", [False, True])
def test_mhc_equation(run, rms, dynamic):
    generator = torch.Generator().manual_seed(0)
    sublayers = []

    def prepare(model):
        sublayers.extend(model.sublayers)
        for sublayer in sublayers:
            for _, parameter in sublayer.named_parameters(recurse=False):
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4

    def formula(index, state, F):
        layer = sublayers[index]
        read, write, mix = layer.read, layer.write, layer.mix
        if dynamic:
            shared = rms(state.flatten(-2)) @ layer.dynamic  # [batch, position, 3 + 3 + 9]
            read = read + layer.dynamic_scale[0] * shared[..., :3]
            write = write + layer.dynamic_scale[1] * shared[..., 3:6]
            mix = mix + layer.dynamic_scale[2] * shared[..., 6:].reshape(*shared.shape[:-1], 3, 3)
        matrix = mix.exp()
        for _ in range(20):
            matrix = matrix / matrix.sum(-2, keepdim=True)
            matrix = matrix / matrix.sum(-1, keepdim=True)
        reading = sum(state[..., i, :] / (1 + (-read[..., i, None]).exp()) for i in range(3))
        output = F(rms(reading))
        rows = [sum(matrix[..., i, j, None] * state[..., j, :] for j in range(3)) for i in range(3)]
        return torch.stack([row + 2 / (1 + (-write[..., i, None]).exp()) * output for i, row in enumerate(rows)], -2)

    start = {"start": lambda x: torch.stack([x] * 3, -2), "prepare": prepare}
    model, logits, state = run("mhc", formula, **start, streams=3, dynamic=dynamic)
    torch.testing.assert_close(logits, model.head(rms(state.sum(-2))))


def test_hyper_connections_and_mhc_start_as_pre_ln_in_every_stream():
    expected = models.build("pre_ln", **SMALL, epsilon=0.0).double()(TOKENS)
    for scheme, tolerance in (("hyper_connections", 1e-12), ("mhc", 1e-6)):
        for dynamic in (False, True):
            model = models.build(scheme, **SMALL, epsilon=0.0, dynamic=dynamic).double()
            torch.testing.assert_close(model(TOKENS), expected, rtol=tolerance, atol=tolerance)


def test_hyper_connections_read_one_stream_in_turn():
    model = models.build("hyper_connections", **SMALL, streams=3)
    assert [layer.read.argmax().item() for layer in model.sublayers] == [0, 1, 2, 0, 1, 2, 0, 1]


def stream_gradients(scheme):
    kept = []

    def keep(_, __, output):
        output.retain_grad()
        kept.append(output)

    model = models.build(scheme, **SMALL, epsilon=0.0).double()
    for layer in model.sublayers:
        layer.register_forward_hook(keep)
    model(TOKENS).logsumexp(-1).sum().backward()
    return [tensor.grad for tensor in kept]


@pytest.mark.parametrize("scheme", ["hyper_connections", "mhc"])
def test_the_gradient_summed_over_streams_is_that_of_pre_ln(scheme):
    """At init all streams are equal, so their gradients add up to the gradient of the one Pre-LN stream."""
    for one, many in zip(stream_gradients("pre_ln"), stream_gradients(scheme), strict=True):
        torch.testing.assert_close(many.sum(-2), one, rtol=1e-6, atol=1e-6)


def test_sinkhorn_rows_and_columns_sum_to_one_and_products_stay_bounded():
    generator = torch.Generator().manual_seed(0)
    matrices = sinkhorn(torch.randn(60, 4, 4, generator=generator, dtype=torch.float64))
    torch.testing.assert_close(matrices.sum(-1), torch.ones(60, 4, dtype=torch.float64))
    torch.testing.assert_close(matrices.sum(-2), torch.ones(60, 4, dtype=torch.float64), rtol=1e-3, atol=1e-3)
    product = torch.linalg.multi_dot(list(matrices))
    assert product.abs().max() <= 1.0
    torch.testing.assert_close(product, torch.full((4, 4), 0.25, dtype=torch.float64), rtol=0.01, atol=0.01)


def test_sinkhorn_does_not_overflow():
    assert torch.isfinite(sinkhorn(torch.tensor([[1e4, 0.0], [0.0, -1e4]]))).all()


@pytest.mark.parametrize("steps", [1, 20])
def test_mhc_weights_are_what_they_say(steps):
    layer = models.build("mhc", depth=2, width=8, heads=2, streams=3, dynamic=False, steps=steps).sublayers[0]
    read, mix, write = layer._weights(torch.zeros(1, 1, 3, 8))
    torch.testing.assert_close(read, torch.full((3,), 1 / 3))
    torch.testing.assert_close(write, torch.ones(3))
    torch.testing.assert_close(mix.sum(-1), torch.ones(3))
    assert (mix.diagonal() > 0.9).all()


def test_attn_res_equation(rms):
    model = models.build("attn_res", **SMALL).double()
    generator = torch.Generator().manual_seed(0)
    attentions = [layer.depth_attention for layer in model.sublayers[1:]] + [model.closing.attention]
    for attention in attentions:
        attention.query.data = torch.randn(16, generator=generator, dtype=torch.float64)
    values = [model.embedding.weight[TOKENS]]

    def read(query):
        scores = torch.stack([(query * rms(value)).sum(-1) for value in values], -1).softmax(-1)
        return sum(scores[..., i, None] * value for i, value in enumerate(values))

    for index, layer in enumerate(model.sublayers):
        h = values[0] if index == 0 else read(attentions[index - 1].query)
        values.append(layer.branch(rms(h)))
    torch.testing.assert_close(model(TOKENS), model.head(rms(read(attentions[-1].query))))


def test_attn_res_with_zero_queries_is_pre_ln():
    logits, gradients = [], []
    for scheme in ("attn_res", "pre_ln"):
        model = models.build(scheme, **SMALL, epsilon=1e-300).double()
        logits.append(model(TOKENS))
        logits[-1].logsumexp(-1).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if ".branch." in n or "embedding" in n})
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-12, atol=1e-12)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-10, atol=1e-12)


# Gradient flow. Measured values: residual-scheme reference, with unit gain.


@pytest.mark.parametrize(("depth", "kept"), [(16, 0.73), (64, 0.25), (256, 0.12)])
def test_residual_dual_has_a_floor_where_post_ln_decays(flow, depth, kept):
    late = flow("residual_dual", depth=depth).late
    assert late[0] / late[-1] == pytest.approx(kept, rel=0.3)
    post = flow("post_ln", depth=depth).late
    assert post[0] / post[-1] < late[0] / late[-1] / 2


@pytest.mark.parametrize("seed", [0, 1])
def test_siamese_norm_is_nearly_flat_at_late_tokens_and_doubles_the_logits(flow, seed):
    assert abs(flow("siamese_norm", depth=64, seed=seed).slope("late")) < 0.005
    model = models.build("siamese_norm", depth=64, seed=seed)
    reference = models.build("pre_ln", depth=64, seed=seed)
    assert model(TOKENS).var() / reference(TOKENS).var() > 1.6


def test_mhc_is_as_flat_as_pre_ln(flow):
    ours, reference = flow("mhc", depth=64), flow("pre_ln", depth=64)
    assert np.log10(ours.late[6:58]).std() == pytest.approx(np.log10(reference.late[6:58]).std(), rel=0.1)
    assert ours.slope("late") == pytest.approx(reference.slope("late"), rel=0.1)
