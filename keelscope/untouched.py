"""A model that runs forward and backward and is afterwards as it was.

`keelscope.oneshot` records inside it. Parameters are not copied: nothing that runs in here changes them, since hooks
that would step an optimizer inside backward are off.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer

from keelscope.unregistered import find_unregistered

__all__ = ["global_random_states", "untouched"]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Give gradients, buffers, modes and random states back as they were, also after an error.

    Args:
        model: any module.

    Yields:
        With gradients enabled and every ``.grad`` empty.
    """
    with ExitStack() as stack:
        stack.enter_context(_random_states(model))
        stack.enter_context(_gradients(model))
        stack.enter_context(_buffers(model))
        stack.enter_context(_modes(model))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def global_random_states() -> Iterator[None]:
    """Give the global generators of Python and numpy back as they were.

    Yields:
        Once.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global state users draw from
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


@contextmanager
def _random_states(model: nn.Module) -> Iterator[None]:
    """The generators of torch (on the model's devices), numpy and Python."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type not in {"cpu", "meta"}}
    kind = next(iter(devices)).type if devices else "cuda"
    numbers = [device.index or 0 for device in devices]
    with global_random_states(), torch.random.fork_rng(numbers, device_type=kind):
        yield


@contextmanager
def _gradients(model: nn.Module) -> Iterator[None]:
    """``.grad`` of every parameter, registered or not; hooks that use it up inside backward are off."""
    held = [one.tensor for one in find_unregistered(model.named_modules())]
    kept = [(p, p.grad, p._post_accumulate_grad_hooks) for p in (*model.parameters(), *held)]
    for parameter, _, _ in kept:
        parameter.grad = None
        parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameter, gradient, hooks in kept:
            parameter._post_accumulate_grad_hooks = hooks
            parameter.grad = gradient


@contextmanager
def _buffers(model: nn.Module) -> Iterator[None]:
    """Buffers changed in place, and those replaced by new tensors."""
    owned = [(module, dict(module._buffers)) for module in model.modules()]
    tensors = [buffer for _, buffers in owned for buffer in buffers.values()]
    values = [(b, b.detach().clone()) for b in tensors if b is not None and not isinstance(b, UninitializedBuffer)]
    try:
        yield
    finally:
        for module, buffers in owned:
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def _modes(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
