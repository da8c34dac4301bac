"""The hooks on every module by which `keelscope.structure` listens to a forward, put on and taken off at each look."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

from keelscope import kernel
from keelscope.containment import NO_OP, Unscriptable
from keelscope.topology.listener import Listener

__all__ = ["AfterModule", "BeforeModule", "Ears", "Hears", "hang_all"]


class Hears(Protocol):
    """What is told of module calls."""

    listener: Listener | None
    """What takes ordinary calls, outside of backward passes."""

    def took(self, listener: Listener, path: str, module: nn.Module, inputs: object, output: object) -> None:
        """An ordinary call has ended that the kernel has not noted."""

    def ended(self, output: object) -> None:
        """A call inside no other has ended: where the beginning of a forward was missed, its end is too."""

    def starts(self, path: str, module: nn.Module) -> None:
        """Any other call starts."""

    def ends(self, path: str, module: nn.Module, inputs: object, output: object) -> None:
        """Any other call has ended, or one of the model itself."""


_NOTHING = object()
_task: Callable[[], int] = torch._C._current_graph_task_id


@dataclass(frozen=True, slots=True, eq=False)
class BeforeModule(Unscriptable):
    """Hook before one module; a copy of the module carries a no-op in its place."""

    owner: weakref.ref[Hears]
    path: str

    def __call__(self, module: nn.Module, *_: object) -> None:
        """Note that the module starts."""
        look = None if torch.compiler.is_compiling() else self.owner()
        if look is None:
            return
        listener = look.listener
        if listener is not None and _task() == -1:
            listener.before(self.path)
        else:
            look.starts(self.path, module)

    def __reduce__(self) -> tuple[object, ...]:
        return NO_OP


@dataclass(frozen=True, slots=True, eq=False)
class AfterModule(Unscriptable):
    """Hook after one module; a copy of the module carries a no-op in its place."""

    owner: weakref.ref[Hears]
    path: str

    def __call__(self, module: nn.Module, args: object, kwargs: object, output: object = _NOTHING) -> None:
        """Note what the module took and gave, by the nodes of its tensors."""
        look = None if torch.compiler.is_compiling() else self.owner()
        # A hook that another hook of the same call has just taken off is called once more, without keyword arguments.
        if look is None or output is _NOTHING:
            return
        listener = look.listener
        if listener is None or not self.path or _task() != -1:
            look.ends(self.path, module, (args, kwargs), output)
            return
        if kwargs or not listener.note(self.path, module, args, output):
            look.took(listener, self.path, module, (args, kwargs), output)
        if not listener.is_inside:
            look.ended(output)

    def __reduce__(self) -> tuple[object, ...]:
        return NO_OP


class Ears(NamedTuple):
    """The hooks on one module, by their numbers: handles take twenty times the memory."""

    module: weakref.ref[nn.Module]
    before: BeforeModule
    after: AfterModule
    first: int = -1
    second: int = -1

    @classmethod
    def on(cls, module: nn.Module, path: str, owner: weakref.ref[Hears]) -> Ears:
        """Put hooks on a module.

        Args:
            module: the module.
            path: its path.
            owner: what is told.

        Returns:
            The hooks, which are on the module now.
        """
        before, after = BeforeModule(owner, path), AfterModule(owner, path)
        try:
            first = module.register_forward_pre_hook(before).id
            second = module.register_forward_hook(after, with_kwargs=True).id
        except (RuntimeError, AttributeError):  # a scripted module takes no hooks; what it does is unknown
            return cls(weakref.ref(module), before, after)
        return cls(weakref.ref(module), before, after, first, second)

    @property
    def is_refused(self) -> bool:
        """Whether the module took no hooks."""
        return self.second < 0

    def hang(self, *, on: bool) -> None:
        """Put them on again, or take them off."""
        module = self.module()
        if module is None or self.second < 0:
            return
        if on:
            module._forward_pre_hooks[self.first] = self.before
            module._forward_hooks[self.second] = self.after
            module._forward_hooks_with_kwargs[self.second] = True
        else:
            module._forward_pre_hooks.pop(self.first, None)
            module._forward_hooks.pop(self.second, None)
            module._forward_hooks_with_kwargs.pop(self.second, None)

    def take_off(self) -> None:
        """Take them off for good: dictionaries that are empty then give back the room for entries, which pop keeps."""
        self.hang(on=False)
        module = self.module()
        if module is not None and self.second >= 0:
            for hooks in (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_with_kwargs):
                if not hooks:
                    hooks.clear()


def hang_all(ears: list[Ears], *, on: bool) -> None:
    """Put hooks on modules again, or take them off.

    Args:
        ears: the hooks.
        on: whether to put them on.
    """
    if not kernel.hang_hooks(ears, on=on):
        for each in ears:
            each.hang(on=on)
