"""A stand-in for one module: an object of its class with random tensors, called past all hooks, to try its forward out.

`fitting` calls it on chosen rows. The module itself, its buffers, containers and hooks, and the random state
are left alone: what a forward may change is copied first. It runs on the CPU in float64; classes that insist on float32
or on their own device get that instead.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from keelscope.untouched import global_random_states

__all__ = ["Setting", "StandIn", "is_simple", "settings_for"]

Setting = tuple[torch.device, torch.dtype]
"""Where a stand-in computes, and in which type."""

_CPU = torch.device("cpu")


def is_simple(module: nn.Module) -> bool:
    """Whether a module's forward can be tried out: no parts of its own, and one tensor in.

    Args:
        module: any module; it is not called.

    Returns:
        False for containers and composite modules, and where the forward takes more than the input (a gate, a residual,
        a condition), since what it does with one argument would not be what it does in use.
    """
    if any(type(child) is not nn.Identity for child in module.children()):
        return False
    try:
        _, *parameters = inspect.signature(type(module).forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return [p.kind for p in parameters if p.kind is not p.VAR_KEYWORD] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def settings_for(module: nn.Module) -> list[Setting]:
    """Where to try a module out, best first.

    Args:
        module: the module to stand in for.

    Returns:
        The CPU in float64 and in float32, then the module's own device in float32.
    """
    devices = {p.device for p in module.parameters(recurse=False)} - {_CPU, torch.device("meta")}
    return [(_CPU, torch.float64), (_CPU, torch.float32), *((device, torch.float32) for device in devices)]


class StandIn:
    """An object of a module's class that shares its settings but none of its tensors.

    Args:
        module: the module to stand in for.
        seed: of the random tensors, which lie between 0.5 and 1.5.
        setting: where and in which type it computes.
        training: mode of the stand-in.
    """

    def __init__(
        self, module: nn.Module, seed: int, setting: Setting = (_CPU, torch.float64), *, training: bool = False
    ) -> None:
        self.setting = setting
        self.module: nn.Module = type(module).__new__(type(module))
        draw = torch.Generator().manual_seed(seed)
        state = {name: self._copied(value) for name, value in vars(module).items()}
        own = {name: None if p is None else self._random(p, draw) for name, p in module._parameters.items()}
        buffers = {
            name: self._random(b, draw) if b is not None and name.startswith("running_") else self._copied(b)
            for name, b in module._buffers.items()
        }
        vars(self.module).update(state | {"_parameters": own, "_buffers": buffers, "training": training})
        self.tensors = {name: tensor for name, tensor in own.items() if tensor is not None}

    def __call__(self, x: Tensor) -> Tensor | None:
        """The output of the class's forward in float64 on the CPU, None where there is none of the same shape."""
        device, dtype = self.setting
        with _undisturbed(device):
            try:
                output = type(self.module).forward(self.module, x.to(device, dtype))
            except Exception:
                return None  # whatever a foreign forward raises: it is not a norm of this shape
        if not isinstance(output, Tensor) or output.shape != x.shape or not output.is_floating_point():
            return None
        wide = output.to(_CPU, torch.float64)
        return wide if wide.isfinite().all() else None

    def _random(self, tensor: Tensor, draw: torch.Generator) -> Tensor:
        device, dtype = self.setting
        return (0.5 + torch.rand(tensor.shape, generator=draw, dtype=torch.float64, device=_CPU)).to(device, dtype)

    def _copied(self, value: object) -> object:
        """What a forward may change is copied; everything else is shared."""
        if isinstance(value, Tensor):
            device, dtype = self.setting
            return value.detach().to(device, dtype if value.is_floating_point() else value.dtype, copy=True)
        return value.copy() if isinstance(value, dict | list | set) else value


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast, no compilation, no warnings, and the random states as they were."""
    compiled = "torch._dynamo" in sys.modules
    with (
        global_random_states(),
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        device,
        torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
    ):
        warnings.simplefilter("ignore")
        yield
