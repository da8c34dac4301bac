"""Products with Jacobians on live graphs: exact, without any hook running, and with the graph left whole."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from keelscope.jacobian.linearised import Entry, NotLinearisableError, _check_callable, _made_after, linearised


class Chunked(nn.Module):
    """Several results of one node, broadcasting, a detour over another type, and an input that is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.scale = nn.Linear(6, 12), nn.Parameter(torch.rand(6, dtype=torch.float64))

    def forward(self, x):
        gate, value = self.wide(x).chunk(2, dim=-1)
        return x * self.scale + (F.silu(gate) * value).double() + x.mean(dim=1, keepdim=True) - 2 * x


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        y += x
        y[:, 0] *= 2.0
        return F.relu(y, inplace=True)


class Swapped(nn.Module):
    """The input is the second factor of a product."""

    def forward(self, x):
        return torch.ones(3, 5, dtype=x.dtype) @ (x.mT @ x)[0, :5]


MODULES = {
    "chunked": lambda: (Chunked(), (2, 5, 6)),
    "in place": lambda: (InPlace(), (2, 5, 6)),
    "swapped": lambda: (Swapped(), (1, 4, 6)),
    "identity": lambda: (nn.Identity(), (2, 3)),
    "linear on 3-D": lambda: (nn.Linear(6, 4), (2, 5, 6)),
    "linear without bias": lambda: (nn.Linear(6, 4, bias=False), (5, 6)),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 5, 8)),
    "convolution": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU()), (2, 3, 6, 6)),
    "recurrent": lambda: (nn.GRU(4, 3, batch_first=True), (2, 5, 4)),
    "dropout": lambda: (nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), (4, 6)),
}


def called(module, x):
    output = module(x)
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_exact(name, leaf):
    torch.manual_seed(0)
    module, shape = MODULES[name]()
    module = module.double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    x = x if leaf else x * 1
    entry = Entry.of(x)
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        y = called(module, x)
    y = y if y is not x else x
    root = y.grad_fn if y.grad_fn is not None else entry.node
    operator = linearised(root, y.output_nr, entry)
    assert (operator.inputs, operator.outputs, operator.dtype) == (x.shape, y.shape, torch.float64)
    for _ in range(2):
        u, v = torch.randn_like(y), torch.randn_like(x)
        (wanted,) = torch.autograd.grad(y, x, u, retain_graph=True)
        product = operator.vjp(u)
        torch.testing.assert_close(product, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close((operator.jvp(v) * u).sum(), (v * wanted).sum(), rtol=1e-10, atol=1e-10)
        assert not product.requires_grad


@pytest.mark.parametrize("scheme", ["pre_ln", "post_ln", "keel"])
def test_blocks(scheme, block, random):
    one = block(scheme)
    operator = one.operator()
    r = random(256)
    torch.testing.assert_close(operator.vjp(r.reshape(1, 8, 32)).flatten(), one.jacobian.T @ r, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(operator.jvp(r.reshape(1, 8, 32)).flatten(), one.jacobian @ r, atol=1e-12, rtol=1e-12)


def test_a_block_of_gpt2(random, operators):
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=8, attn_implementation="sdpa")).double()
    block = model.eval().h[1]

    def forward(x):
        output = block(x)
        return output[0] if isinstance(output, tuple) else output

    x = random(1, 8, 32).requires_grad_()
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        jacobian = torch.autograd.functional.jacobian(forward, x).reshape(256, 256)
        entry = Entry.of(x)
        y = forward(x)
    operator = linearised(y.grad_fn, y.output_nr, entry)
    u = random(1, 8, 32, seed=1)
    torch.testing.assert_close(operator.vjp(u).flatten(), jacobian.T @ u.flatten(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(operator.jvp(u).flatten(), jacobian @ u.flatten(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_as_autograd_would_in_any_precision(dtype):
    torch.manual_seed(0)
    module = Chunked().to(dtype) if dtype is torch.float32 else nn.Sequential(nn.Linear(6, 6), nn.GELU()).to(dtype)
    x = torch.randn(2, 5, 6, dtype=dtype, requires_grad=True)
    entry = Entry.of(x)
    y = module(x)
    u = torch.randn_like(y)
    product = linearised(y.grad_fn, y.output_nr, entry).vjp(u)
    assert product.dtype is dtype
    torch.testing.assert_close(product, torch.autograd.grad(y, x, u)[0], atol=1e-6, rtol=1e-6)


def test_mixed_precision():
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)), torch.randn(5, 6, requires_grad=True)
    entry = Entry.of(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = x + module(x)
    u = torch.randn_like(y)
    product = linearised(y.grad_fn, y.output_nr, entry).vjp(u)
    assert product.dtype is torch.float32
    assert torch.equal(product, torch.autograd.grad(y, x, u)[0])


class Hooked(nn.Module):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(6, 6), nn.Linear(6, 6), seen

    def forward(self, x):
        hidden = self.first(x).tanh()
        hidden.register_hook(lambda gradient: self.seen.append("tensor"))
        hidden.grad_fn.register_hook(lambda *_: self.seen.append("node"))
        hidden.retain_grad()
        return x + self.second(hidden)


def test_no_hook_runs_and_the_graph_stays_whole():
    torch.manual_seed(0)
    seen: list[str] = []
    module = Hooked(seen)
    x = torch.randn(4, 6, requires_grad=True)
    x.register_hook(lambda gradient: seen.append("input"))
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: seen.append("parameter"))
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    entry = Entry.of(x)
    y = module(x)
    operator = linearised(y.grad_fn, y.output_nr, entry)
    before = torch.get_rng_state()
    for _ in range(3):
        operator.jvp(operator.vjp(torch.ones_like(y)))
    assert seen == []
    assert torch.equal(before, torch.get_rng_state())
    assert x.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())
    y.square().sum().backward()
    assert sorted(set(seen)) == ["accumulated", "input", "node", "parameter", "tensor"]
    twin, x2 = copy.deepcopy(module), x.detach().clone().requires_grad_()
    twin.zero_grad()
    twin(x2).square().sum().backward()
    assert torch.equal(x.grad, x2.grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), twin.parameters(), strict=True))


def test_only_the_modules_own_nodes_are_walked():
    """A memory that many layers computed (cross-attention) is read, but its history is not searched."""
    memory = torch.randn(3, 6, requires_grad=True)
    for _ in range(100):
        memory = memory.sin()
    x = torch.randn(3, 6, requires_grad=True) * 1
    entry = Entry.of(x)
    y = (x * memory).cos() + x
    assert len(_made_after(y.grad_fn, entry)) == 3
    u = torch.ones_like(y)
    product = linearised(y.grad_fn, 0, entry).vjp(u)
    torch.testing.assert_close(product, torch.autograd.grad(y, x, u)[0])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("run by the walk")


def never(*_):
    raise AssertionError("unpacked by the walk")


def packed(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, never):
        return x.sin()


def used_up(x):
    y = x.sin()
    y.sum().backward(retain_graph=False)
    return y


def overwritten(x):
    y = x.exp()
    z = y * 2
    with torch.no_grad():
        y.add_(1)
    return z + y.detach()


class Backward(nn.Module):
    """A module hook on the gradient puts a Python function into the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()
        self.inner.register_full_backward_hook(never)

    def forward(self, x):
        return self.inner(x * 1)


REFUSED = {
    "custom function": (Doubled.apply, "custom autograd function Doubled"),
    "module hook": (Backward(), "custom autograd function BackwardHookFunction"),
    "saved-tensor hooks": (packed, "activation checkpointing or other saved-tensor hooks"),
    "checkpoint": (lambda x: checkpoint(torch.sin, x, use_reentrant=False), "activation checkpointing"),
    "reentrant checkpoint": (lambda x: checkpoint(torch.sin, x, use_reentrant=True), "CheckpointFunction"),
    "freed": (used_up, "no saved tensors any more"),
    "overwritten": (overwritten, "changed one in place"),
    "no path": (lambda x: torch.ones(3, requires_grad=True).sin(), "does not depend on its first input"),
    "complex": (lambda x: (x * 1j).abs(), "nested or complex"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_without_a_side_effect(name):
    function, message = REFUSED[name]
    x = torch.randn(3, requires_grad=True)
    entry = Entry.of(x)
    y = function(x)
    with pytest.raises(NotLinearisableError, match=message):
        linearised(y.grad_fn, y.output_nr, entry)


def test_custom_functions_in_c():
    """Some communicate: functional collectives with gradients."""
    node = SimpleNamespace(name=lambda: "torch::autograd::CppNode<AllReduce>")
    with pytest.raises(NotLinearisableError, match="custom autograd function CppNode<AllReduce>"):
        _check_callable(node)


def test_freed_storage():
    """FSDP frees the storage of gathered weights between forward and backward."""
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    entry = Entry.of(x)
    y = x @ weight
    weight.untyped_storage().resize_(0)
    with pytest.raises(NotLinearisableError, match="FSDP"):
        linearised(y.grad_fn, 0, entry)


def test_fused_attention_has_products_from_above_only(block, random):
    operator = block("pre_ln").operator(SDPBackend.FLASH_ATTENTION)
    wanted = block("pre_ln").jacobian.T @ random(256)
    torch.testing.assert_close(operator.vjp(random(1, 8, 32)).flatten(), wanted, rtol=1e-10, atol=1e-10)
    with pytest.raises(NotLinearisableError, match=r"SDPBackend\.MATH"):
        operator.jvp(random(1, 8, 32))
