"""Which parameters backward passes reach, and whether their gradients are as a pass left them, without the kernel.

The compiled `keelscope._kernel.Passes` does the same work and is preferred, see `make_passes`.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from keelscope import kernel

if TYPE_CHECKING:
    from keelscope._kernel import Passes

__all__ = ["SlowPasses", "make_passes"]

_graph_task = torch._C._current_graph_task_id


@dataclass(frozen=True, slots=True, eq=False)
class SlowMark:
    """Notes one parameter."""

    passes: SlowPasses
    index: int
    hooks: dict[Hashable, Hashable]
    """Of the parameter, where it has its place."""

    def __call__(self, _: Tensor) -> None:
        """A gradient has been accumulated; as `SlowPasses.note`, without a call more at every parameter."""
        passes = self.passes
        if _graph_task() != passes._pass:
            passes._begin_pass()
        passes._reached.add(self.index)


class SlowPasses:
    """One step of backward passes over the parameters of a model.

    Args:
        owner: its ``_backward_begins()`` is called when a pass reaches the first parameter.
        parameters: by index.
    """

    def __init__(self, owner: weakref.ref[Any], parameters: list[weakref.ref[nn.Parameter]]) -> None:
        self._owner, self._parameters = owner, parameters
        self._pass = -1
        self._reached: set[int] = set()
        self._stepped: set[int] = set()
        self._states: dict[int, tuple[int, int]] = {}
        self._weight = -1

    seconds = 0.0
    """Time spent on sums."""

    summing = 0
    """Whether gradients may be summed when they arrive, which only the kernel does."""

    def begin(self) -> None:
        """A step begins; what a running pass has reached belongs to it."""
        self._stepped.clear()
        self._states.clear()

    def note(self, index: int) -> None:
        """The running pass has reached a parameter."""
        if _graph_task() != self._pass:
            self._begin_pass()
        self._reached.add(index)

    def _begin_pass(self) -> None:
        """A new backward pass, also after one that raised half-way."""
        self._pass = _graph_task()
        owner = self._owner()
        if owner is not None:
            owner._backward_begins()

    def mark(self, index: int, hooks: dict[Hashable, Hashable], _: bool) -> SlowMark:
        """What notes a parameter, to be put among its hooks.

        Args:
            index: the parameter.
            hooks: what torch calls after an accumulation, of which there may be others.

        Returns:
            The hook.
        """
        return SlowMark(self, index, hooks)

    def put_back(self, marks: list[SlowMark], _: bool) -> bool:
        """Put marks among the hooks of their parameters again.

        Args:
            marks: taken off before.

        Returns:
            Whether it was done: not where one of the parameters is no longer hooked, or keeps its hooks elsewhere.
        """
        if not all(self._fits(mark) for mark in marks):
            return False
        for mark in marks:
            mark.hooks[mark] = mark
        return True

    def take_off(self, marks: list[SlowMark], _: bool) -> None:
        """Take marks from among the hooks of their parameters."""
        for mark in marks:
            mark.hooks.pop(mark, None)

    def _fits(self, mark: SlowMark) -> bool:
        parameter = self._parameters[mark.index]()
        if parameter is None or not parameter.requires_grad or not parameter.is_leaf:
            return False
        return parameter._post_accumulate_grad_hooks is mark.hooks

    def take(self) -> tuple[bytes, bytearray, bytearray, list[int], list[Tensor]]:
        """What was reached since the last time.

        Returns:
            A flag of each parameter, whether it was reached; whether its gradient was summed, and packed
            ``[parameter, (count, squares)]``, where any was; and indices and running gradients of the other reached
            ones whose optimizer has not stepped.
        """
        reached, self._reached = self._reached, set()
        running, gradients = [], []
        states, stepped, parameters, first = self._states, self._stepped, self._parameters, self.first
        for i in sorted(reached):
            parameter = parameters[i]()
            gradient = None if parameter is None or i in stepped else parameter.grad
            if parameter is not None and gradient is not None:
                running.append(i)
                gradients.append(gradient)
                states[i] = id(gradient), gradient._version
                first = i if first < 0 else first
                if i == first:
                    self._weight = parameter._version
        flags = bytearray(len(parameters))
        for i in reached:
            flags[i] = 1
        return bytes(flags), bytearray(), bytearray(), running, gradients

    def stepping(self, indices: list[int]) -> tuple[list[int], list[Tensor], bool]:
        """The optimizer of these parameters is about to step.

        Args:
            indices: of the parameters.

        Returns:
            Indices and gradients of those that no pass has shown; whether any has a gradient.
        """
        unseen, gradients, has_any = [], [], False
        for i in indices:
            if i not in self._stepped and i not in self._states:  # what a pass has shown has a gradient
                parameter = self._parameters[i]()
                gradient = None if parameter is None else parameter.grad
                if gradient is None:
                    continue
                unseen.append(i)
                gradients.append(gradient)
            has_any = True
            self._stepped.add(i)
        return unseen, gradients, has_any

    def rewritten(self, indices: list[int]) -> bool:
        """Whether a gradient of these was replaced or written in place since the last pass: unscaled or clipped."""
        for i in indices:
            parameter = self._parameters[i]() if i in self._states else None
            if parameter is not None and self._states[i] != _state(parameter):
                return True
        return False

    @property
    def first(self) -> int:
        """The first noted parameter of the step; negative where there is none."""
        return next(iter(self._states), -1)

    def untouched(self) -> bool:
        """Whether the first gradient of the step, and its parameter, are as the last pass left them."""
        for i, state in self._states.items():
            parameter = self._parameters[i]()
            if parameter is None or parameter.grad is None or parameter._version != self._weight:
                return False
            return state == _state(parameter)
        return False


def make_passes(owner: weakref.ref[Any], parameters: list[weakref.ref[nn.Parameter]]) -> Passes | SlowPasses:
    """The compiled form where there is one.

    Args:
        owner: see `SlowPasses`.
        parameters: by index.

    Returns:
        The record of passes.
    """
    return kernel.passes(owner, parameters) or SlowPasses(owner, parameters)


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    """Changes when the gradient is replaced or written in place."""
    gradient = parameter.grad
    return id(gradient), -1 if gradient is None else gradient._version
