"""What torch calls on recorded steps: the hooks on modules and on their outputs.

`keelscope.hooks` makes them and does what they ask for.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from keelscope.board import Board
from keelscope.calls import TermSlots
from keelscope.containment import NO_OP, Unscriptable
from keelscope.jacobian.passage import Span
from keelscope.leaves import Arguments, KeptInput

if TYPE_CHECKING:
    from keelscope.slowpages import AnyPage

__all__ = ["ForwardHook", "GradientHook", "InputHook", "Owner"]


class Owner(Protocol):
    """`keelscope.hooks.ModuleHooks`, as far as hooks know it."""

    attached: bool
    page: AnyPage | None
    awaited: tuple[int, ...]

    def _after_forward(self, site: int, module: nn.Module, inputs: Arguments, output: object) -> None: ...
    def _after_taken(self, site: int, module: nn.Module, inputs: Arguments, output: object) -> None: ...
    def _before_forward(self, site: int, module: nn.Module, inputs: Arguments) -> None: ...
    def _after_backward(self, hook: GradientHook, module: nn.Module, gradient: Tensor) -> None: ...


@dataclass(slots=True, eq=False)
class GradientHook:
    """The hook on one output tensor of one call; not frozen, since making a frozen one takes three times as long."""

    owner: weakref.ref[Owner]
    module: weakref.ref[nn.Module]
    site: int
    board: Board
    events: list[TermSlots]
    kept: KeptInput | None = None
    layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Size and strides of the output, where the hook sits on the tensor that the output is a view of."""
    span: Span | None = None
    """Of the call, where its Jacobian is due."""
    is_beside: bool = False
    """Whether the kernel looks at the gradient itself."""

    def __call__(self, gradient: Tensor) -> None:
        """Measure the gradient; returning None leaves it as it is."""
        hooks, module = self.owner(), self.module()
        if hooks is not None and module is not None and hooks.attached:
            hooks._after_backward(self, module, self._as_output(gradient))

    def _as_output(self, gradient: Tensor) -> Tensor:
        """The gradient in the shape of the module's output."""
        if self.layout is None:
            return gradient
        return gradient.detach().contiguous().as_strided(*self.layout)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardHook(Unscriptable):
    """The hook after one module. A copy or pickle of the module carries a standard-library no-op in its place.

    It keeps the watch alive as long as the model, also where nobody holds what ``watch()`` returned.
    """

    owner: Owner
    site: int

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        """Measure the output; returning None leaves it as it is."""
        if torch.compiler.is_compiling():
            return
        hooks = self.owner
        page = hooks.page
        if not hooks.attached:
            return
        if page is None or not page.look(self.site, module, args, kwargs, output):
            hooks._after_forward(self.site, module, (args, kwargs), output)
        elif hooks.awaited:
            hooks._after_taken(self.site, module, (args, kwargs), output)

    def __reduce__(self) -> tuple[object, ...]:
        return NO_OP


@dataclass(frozen=True, slots=True, eq=False)
class InputHook(Unscriptable):
    """The hook before one module, where a probe looks at inputs or attention. Copies like `ForwardHook`."""

    owner: Owner
    site: int

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Measure the input; returning None leaves it as it is."""
        if not torch.compiler.is_compiling() and self.owner.attached:
            self.owner._before_forward(self.site, module, (args, kwargs))

    def __reduce__(self) -> tuple[object, ...]:
        return NO_OP
