"""Float64 arithmetic for the oracles of our own cases: explicit differentiation, no hooks, no modules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]


def double(model: nn.Module) -> Weights:
    """Every parameter as a float64 leaf."""
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    """A linear layer by its name."""
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def norms(loss: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Norm of the gradient with respect to each tensor; None where the loss does not depend on it."""
    found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True, retain_graph=True)
    return {name: None if g is None else g.norm() for name, g in zip(tensors, found, strict=True)}


def params(loss: Tensor, weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor | None]]:
    """Expected gradient of each parameter."""
    return {name: {"grad_norm": norm} for name, norm in norms(loss, weights).items()}


def modules(loss: Tensor, outputs: Mapping[str, Tensor]) -> dict[str, dict[str, object]]:
    """Expected call of each module that ran once: variance and gradient of its output."""
    gradients = norms(loss, outputs)
    return {
        name: {"calls": 1, "act_var": [variance(y)], "out_grad_norms": [gradients[name]]} for name, y in outputs.items()
    }


def total(loss: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Norm over all parameters."""
    found = [norm for norm in norms(loss, weights).values() if norm is not None]
    return torch.stack(found).norm()


def variance(x: Tensor) -> Tensor:
    """Population variance of the entries."""
    return x.detach().var(unbiased=False)
