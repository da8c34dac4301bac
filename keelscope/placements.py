"""The hooks after modules, which come and go with recorded steps.

`keelscope.hooks` puts each on its module once, by the way torch gives; it is taken off and put back by its number, all
of them at once, at a hundredth of the cost.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from keelscope import kernel_calls
from keelscope.callbacks import ForwardHook

__all__ = ["Placement", "Placements"]


class Placement(NamedTuple):
    """Where a hook has its place; the kernel reads it."""

    module: weakref.ref[nn.Module]
    number: int
    hook: ForwardHook
    earlier: dict[int, frozenset[int]]
    """Of all hooks of the watch, by number: those that were called before it when it was last taken off."""

    def put_back(self) -> None:
        """Put it where it was: behind those that came before it, before those that came later."""
        module = self.module()
        if module is not None:
            hooks = module._forward_hooks
            others = [number for number in hooks if number != self.number]
            earlier = self.earlier.get(self.number, ())
            before = [i for i, number in enumerate(others) if number < self.number or number in earlier]
            hooks[self.number] = self.hook
            module._forward_hooks_with_kwargs[self.number] = True
            for number in others[before[-1] + 1 if before else 0 :]:
                hooks[number] = hooks.pop(number)

    def take_off(self) -> None:
        """Take it off, and remember where it was."""
        module = self.module()
        if module is not None and self.number in module._forward_hooks:
            numbers = list(module._forward_hooks)
            earlier = frozenset(numbers[: numbers.index(self.number)])
            if earlier or self.number in self.earlier:
                self.earlier[self.number] = earlier
            del module._forward_hooks[self.number]
            module._forward_hooks_with_kwargs.pop(self.number, None)


class Placements:
    """The hooks of one watch, by site."""

    def __init__(self) -> None:
        self._known: dict[int, Placement] = {}
        self._alone: dict[int, Placement] = {}
        self._earlier: dict[int, frozenset[int]] = {}
        self._spared: frozenset[int] = frozenset()
        """Sites without their hook, for a while."""

    def spare(self, sites: frozenset[int]) -> None:
        """Take hooks off that nobody needs for a while, and put back those that were.

        Args:
            sites: all that nobody needs now; those whose hook does not come and go alone keep it.
        """
        if sites is self._spared or sites == self._spared:
            return
        _place([self._alone[site] for site in self._spared - sites if site in self._alone], on=True)
        self._spared = sites
        _place([self._alone[site] for site in sites if site in self._alone], on=False)

    def put(self, site: int, module: nn.Module, hook: ForwardHook, *, alone: bool) -> None:
        """Put a hook on a module.

        Args:
            site: whose it is.
            module: always the same.
            hook: what to put there the first time.
            alone: whether no other hook comes with it, so that `put_back` may do it from now on.

        Raises:
            RuntimeError: if it takes no hooks; or AttributeError.
        """
        if site not in self._known:
            number = module.register_forward_hook(hook, with_kwargs=True).id
            self._known[site] = Placement(weakref.ref(module), number, hook, self._earlier)
        else:
            _place([self._known[site]], on=True)
        if alone:
            self._alone[site] = self._known[site]

    def put_back(self) -> Collection[int]:
        """Put hooks back on their modules.

        Returns:
            The sites that it was done for.
        """
        _place(list(self._alone.values()), on=True)
        return self._alone.keys()

    def take(self, site: int) -> None:
        """Take a hook off, wherever it is."""
        if site in self._known:
            _place([self._known[site]], on=False)

    def take_all(self) -> None:
        """Take all of them off."""
        self._spared = frozenset()
        _place(list(self._known.values()), on=False)

    def forget(self, site: int) -> None:
        """Take a hook off for good."""
        self.take(site)
        self._known.pop(site, None)
        self._alone.pop(site, None)


def _place(placements: list[Placement], *, on: bool) -> None:
    for placement in kernel_calls.place_hooks(placements, on=on):
        if on:
            placement.put_back()
        else:
            placement.take_off()
