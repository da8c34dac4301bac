"""The hooks on every module by which `keelscope.structure` listens to a forward.

They are put on for one look, and stay on from step to step where each is looked at.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from keelscope import kernel_calls
from keelscope.containment import NO_OP, Unscriptable
from keelscope.stacks import find_stacks
from keelscope.topology.hearing import Hearing
from keelscope.topology.listener import Listener

__all__ = ["Ear", "Ears", "Hears"]


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


_task: Callable[[], int] = torch._C._current_graph_task_id
_is_compiling: Callable[[], bool] = torch.compiler.is_compiling


@dataclass(slots=True, eq=False)
class Ear(Unscriptable):
    """Hook before and after one module; a copy of the module carries a no-op in its place.

    There is one for every module of the model, so that it is one object, under a number that all have in common.
    """

    owner: weakref.ref[Hears]
    path: str
    module: weakref.ref[nn.Module]
    is_refused: bool = False
    """Whether the module takes no hooks: a scripted one, and what it does is unknown."""
    hears_beginning: bool = True
    """Whether it is a hook before the module too."""

    def __call__(self, module: nn.Module, args: object, *others: object) -> None:
        """Note that the module starts; with keyword arguments and output, what it took and gave."""
        look = None if _is_compiling() else self.owner()
        if look is None:
            return
        listener = look.listener
        heard = 0 if listener is None else listener.hear(self.path, module, args, others)
        if heard:
            if heard > 1:
                look.ended(others[1])
        elif not others:
            self._before(look, module)
        elif len(others) > 1:
            self._after(look, module, args, *others)
        # else a hook that another hook of the same call has just taken off, called once more without keyword arguments

    def _before(self, look: Hears, module: nn.Module) -> None:
        listener = look.listener
        if listener is not None and _task() == -1:
            listener.before(self.path)
        else:
            look.starts(self.path, module)

    def _after(self, look: Hears, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        """Note what the module took and gave, by the nodes of its tensors."""
        listener = look.listener
        if listener is None or not self.path or _task() != -1:
            look.ends(self.path, module, (args, kwargs), output)
            return
        look.took(listener, self.path, module, (args, kwargs), output)
        if not listener.is_inside:
            listener.outermost.add(self.path)
            look.ended(output)

    def __reduce__(self) -> tuple[object, ...]:
        return NO_OP

    def hang(self, number: int, *, on: bool) -> None:
        """Put the hook on, or take it off.

        Args:
            number: what it goes under, on every module.
            on: whether to put it on.
        """
        module = self.module()
        if module is None or self.is_refused:
            return
        if on:
            if self.hears_beginning:
                module._forward_pre_hooks[number] = self
            module._forward_hooks[number] = self
            module._forward_hooks_with_kwargs[number] = True
        else:
            for hooks in _places(module):
                hooks.pop(number, None)


class Ears:
    """The hooks on the modules of one model.

    Args:
        modules: with their paths.
        owner: what is told.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], owner: weakref.ref[Hears]) -> None:
        self._modules: Sequence[tuple[str, nn.Module]] = ()
        """While they are on."""
        self.wrappers = frozenset(above for path in find_stacks(modules)[1] for above in _above(path))
        """Paths of modules around stacks."""
        self._ears = [
            Ear(owner, path, weakref.ref(module), is_refused=not _takes_hooks(module)) for path, module in modules
        ]
        self._chosen = self._ears
        self.hearing: Hearing | None = None
        """The modules that are listened to; None for all."""
        self._number = RemovableHandle(OrderedDict()).id  # no other hook of the process has it

    def are_on(self, modules: Sequence[tuple[str, nn.Module]]) -> bool:
        """Whether these are the modules."""
        return modules is self._modules or [(ear.path, ear.module()) for ear in self._ears] == list(modules)

    def choose(self, hearing: Hearing | None) -> None:
        """Choose what is listened to, while none is on.

        Args:
            hearing: the modules; None for all.
        """
        self.hearing = hearing
        self._chosen = [ear for ear in self._ears if hearing is None or ear.path in hearing]
        for ear in self._chosen:
            ear.hears_beginning = hearing is None or ear.path in hearing.begun

    def heed(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        """Remember, as long as they are on, what they are on."""
        self._modules = modules

    def refused(self) -> set[int]:
        """Identity of the modules that take no hooks."""
        return {id(ear.module()) for ear in self._ears if ear.is_refused}

    def hang(self, *, on: bool) -> None:
        """Put the hooks on, or take them off."""
        self._modules = ()
        if not kernel_calls.hang_hooks(self._chosen, self._number, on=on):
            for ear in self._chosen:
                ear.hang(self._number, on=on)

    def take_off(self) -> None:
        """Take them off for good: dictionaries that are empty then give back the room for entries, which pop keeps."""
        self.hang(on=False)
        for ear in self._ears:
            module = ear.module()
            for hooks in () if module is None or ear.is_refused else _places(module):
                if not hooks:
                    hooks.clear()


def _above(path: str) -> Iterator[str]:
    """The paths of the modules around one."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _places(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_with_kwargs


def _takes_hooks(module: nn.Module) -> bool:
    """Whether hooks can be registered on a module; asked only of one that has a way of its own to do so."""
    registers = type(module).register_forward_pre_hook, type(module).register_forward_hook
    if registers == (nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook):
        return "_forward_pre_hooks" in vars(module)
    try:
        module.register_forward_pre_hook(_ignore).remove()
        module.register_forward_hook(_ignore, with_kwargs=True).remove()
    except (RuntimeError, AttributeError):
        return False
    return True


def _ignore(*_: object) -> None:
    """Nobody asked."""
