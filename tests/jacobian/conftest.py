"""Blocks of the reference models with their exact Jacobians, at T = 8 positions and d = 32 features in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from keelscope.jacobian.linearised import Entry, linearised
from keelscope.jacobian.operators import Operator
from keelscope.models import build


@dataclass(frozen=True)
class Block:
    """A module, an input ``[1, 8, 32]`` and the dense Jacobian there, ``[256, 256]``."""

    module: nn.Module
    x: Tensor
    jacobian: Tensor

    def operator(self, attention: SDPBackend = SDPBackend.MATH) -> Operator:
        """The Jacobian on a live graph."""
        x = self.x.clone().requires_grad_() * 1  # not a leaf, as inside a model
        entry = Entry.of(x)
        with sdpa_kernel(attention):
            y = self.module(x)
        return linearised(y.grad_fn, y.output_nr, entry)


@functools.cache
def make_block(scheme: str, seed: int = 0) -> Block:
    """Attention and feed-forward of one block, in the middle of a stack of 64 sub-layers."""
    model = build(scheme, depth=64, width=32, heads=4, seed=seed).double()
    module = nn.Sequential(*model.sublayers[10:12])
    x = torch.randn(1, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = torch.autograd.functional.jacobian(module, x).reshape(x.numel(), x.numel())
    return Block(module, x, jacobian)


@pytest.fixture
def block() -> Callable[..., Block]:
    """Scheme and seed -> block."""
    return make_block


@pytest.fixture
def random() -> Callable[..., Tensor]:
    """Shape and seed -> normal float64 tensor."""
    return lambda *shape, seed=0: torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


@pytest.fixture
def orthogonal(random) -> Callable[..., Tensor]:
    """Size and seed -> orthogonal matrix."""
    return lambda size, seed=0: torch.linalg.qr(random(size, size, seed=seed))[0]
