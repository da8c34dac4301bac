"""The hooks on parameters that note which of them a backward pass reaches, and come and go with recorded steps.

A late mark is called after the accumulation. torch never forgets that there was one: it looks for others at every
parameter of every later backward pass. Where steps between are not recorded, plain parameters get an early mark, before
the accumulation, of which nothing is left once it is taken off. What is noted is the same: `keelscope._kernel.Passes`
looks at gradients when the pass ends, and `accumulates` tells passes that accumulate from `torch.autograd.grad`.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from keelscope.passes import SlowPasses
from keelscope.store.worker import WRITING

if TYPE_CHECKING:
    from keelscope._kernel import Passes

__all__ = ["Marks", "accumulates"]

_graph_task = torch._C._current_graph_task_id


class Marks:
    """The marks on the parameters of one model.

    Args:
        passes: what they tell.
    """

    def __init__(self, passes: Passes | SlowPasses) -> None:
        self._passes = passes
        self._is_able = hasattr(torch._C, "_will_engine_execute_node") and not isinstance(passes, SlowPasses)
        self._are_early = False
        """Whether one of them is early."""
        self._on: list[Any] = []
        self._resting: list[Any] = []

    def may_be_early(self) -> bool:
        """Whether early marks can be put now."""
        return self._is_able and _is_free()

    def put(self, parameter: nn.Parameter, i: int, *, early: bool) -> None:
        """Put a mark on a parameter.

        Args:
            parameter: a leaf that requires a gradient.
            i: its index.
            early: whether the mark is soon to be taken off, and `may_be_early`; it is late nevertheless where others
                have hooks on the gradient of the parameter, which torch may not be made to forget.
        """
        early = early and _is_plain(parameter)
        hooks = _Hooks() if early else _hooks_of(parameter)
        mark = self._passes.mark(i, hooks, early)
        hooks[mark] = mark
        if early:
            self._are_early = True
            parameter._backward_hooks = hooks
        self._on.append(mark)

    def put_back(self, *, alone: bool) -> bool:
        """Put those back that were there before, at a tenth of the cost.

        Args:
            alone: whether there is one process; others get late marks only.

        Returns:
            Whether it was done: not where one of the parameters is no longer as it was.
        """
        may_be = bool(self._resting) and (alone or not self._are_early)
        done = may_be and self._passes.put_back(self._resting, _is_free())
        self._on, self._resting = (self._resting if done else []), []
        return done

    def take_off(self, *, rest: bool) -> None:
        """Take all of them off.

        Args:
            rest: whether they are to be put back.
        """
        if self._on:
            self._passes.take_off(self._on, _is_free())
        self._resting, self._on = (self._on if rest else []), []


def accumulates(parameter: nn.Parameter) -> bool:
    """Whether the running backward pass adds to gradients; hooks of leaves are called by `torch.autograd.grad` too.

    Args:
        parameter: a leaf that the pass has reached.

    Returns:
        The answer.
    """
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    try:
        torch._C._will_engine_execute_node(node)  # type: ignore[arg-type]
    except RuntimeError:  # it does not say so of leaves whose gradient is to be returned
        return False
    return True


class _Hooks(dict[Any, Any]):
    """What hooks of a parameter are kept in; torch makes an ordered dictionary, which takes half as much room again."""

    __slots__ = ("__weakref__",)


def _hooks_of(parameter: nn.Parameter) -> dict[Any, Any]:
    """What torch calls after an accumulation; made where there is nothing."""
    if parameter._post_accumulate_grad_hooks is None:
        if type(parameter) is nn.Parameter:
            parameter._post_accumulate_grad_hooks = _Hooks()
        else:
            parameter.register_post_accumulate_grad_hook(_ignore).remove()  # torch makes one
    hooks: dict[Any, Any] = parameter._post_accumulate_grad_hooks
    return hooks


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether nobody else has hooks on its gradient."""
    return (
        type(parameter) is nn.Parameter
        and parameter._post_accumulate_grad_hooks is None
        and parameter._backward_hooks is None
    )


def _is_free() -> bool:
    """Whether no backward pass is running: torch may not be given hooks that it is looking at, nor lose them."""
    if _graph_task() != -1:
        return False
    others = sys._current_frames()
    if len(others) == 1 + len(WRITING & others.keys()):
        return True
    del others[threading.get_ident()]
    return not any(map(_runs_backward, others.values()))


def _runs_backward(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in _BACKWARD:
            return True
        frame = frame.f_back
    return False


_BACKWARD = frozenset({"_engine_run_backward", "backward"})


def _ignore(_: object) -> None:
    """Nobody asked."""
