"""The reader leaves the model, the random state and the graph as they are, and keeps nothing."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from keelscope.models import build
from keelscope.topology import GraphReader, find


def listened(model, tokens, reader):
    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, path=path: reader.before_module(path)))
        handles.append(
            module.register_forward_hook(
                lambda module, inputs, output, path=path: reader.on_module(path, module, inputs, output)
            )
        )
    output = model(tokens)
    for handle in handles:
        handle.remove()
    return output


@pytest.fixture
def model():
    return build("post_ln", depth=4, width=8, heads=2, dropout=0.2)


def test_gradients_are_bit_identical(model, tokens):
    plain, read = copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(1)
    plain(tokens).square().mean().backward()
    torch.manual_seed(1)
    reader = GraphReader(read)
    loss = listened(read, tokens, reader).square().mean()
    assert len(reader.read(loss)) == 4
    loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), read.parameters(), strict=True))


def test_reading_needs_no_output(model, tokens):
    reader = GraphReader(model)
    listened(model, tokens, reader)
    assert len(reader.read()) == 4


def test_nothing_is_kept(model, tokens):
    class Same(torch.autograd.Function):
        """A node that a weak reference can point to."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    nodes = []

    def through(_module, _inputs, output):
        output = Same.apply(output)
        nodes.append(weakref.ref(output.grad_fn))
        return output

    model.embedding.register_forward_hook(through)
    reader = GraphReader(model)
    found = reader.read(listened(model, tokens, reader))
    gc.collect()
    assert len(found) == 4
    assert [node() for node in nodes] == [None]
    assert len(reader.read()) == 0


def test_find_leaves_everything_as_it_was(model, tokens):
    model.eval()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    find(model, tokens, lambda output, batch: output.mean())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(module.training for module in model.modules())


def test_calls_without_a_beginning(model, tokens):
    """Forward hooks alone: the structure is found, only functional norms cannot be placed."""
    reader = GraphReader(model)
    for path, module in model.named_modules():
        module.register_forward_hook(
            lambda module, inputs, output, path=path: reader.on_module(path, module, inputs, output)
        )
    found = reader.read(model(tokens))
    assert [record.form for record in found.sublayers][:3] == ["n(x + F(x))"] * 3


def test_no_modules_at_all(model, tokens):
    """Nothing but the graph: sums and weights are there, sites are not."""
    found = GraphReader(model).read(model(tokens))
    assert len(found) == 4
    assert {(record.site, record.branch) for record in found.sublayers} == {(None, None)}


def test_modules_that_raise_do_not_confuse_the_order(model, tokens):
    class Fails(nn.Module):
        """Raises."""

        def forward(self, x):
            raise ValueError("no")

    reader = GraphReader(model)
    reader.before_module("sublayers.0")
    reader.before_module("sublayers.0.branch")
    found = reader.read(listened(model, tokens, reader))
    assert [record.norm_after for record in found.sublayers] == [f"sublayers.{i}.norm" for i in range(4)]


def test_deep_models_need_no_deep_stack(look):
    """The walk is iterative."""
    import sys

    model = build("pre_ln", depth=128, width=8, heads=2)
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(400)
        assert len(look(model, torch.ones(1, 3, dtype=torch.int64))) == 128
    finally:
        sys.setrecursionlimit(limit)


def test_data_parallel_wrapper_is_looked_through(model, tokens, look):
    found = look(nn.DataParallel(model), tokens)
    assert found.sublayers[0].site == "sublayers.0"
