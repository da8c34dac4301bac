"""A model that changes while it is watched: a head swapped, an adapter added, parameters put in place of others.

A site is a path, so that what stands at a path now takes over its column; new paths come after those there were.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.nn.parameter import UninitializedParameter

from keelscope import kernel
from keelscope.sites import SitePlan, WatchedModule, WatchedParameter

__all__ = ["Gone", "Tree", "left", "merged"]

_Entries = tuple[list[Any], ...]
"""Of all modules: how many children and parameters each has, the children, and identities of the parameters."""


class Gone(nn.Identity):
    """Stands in a plan where a module was that has left the model."""


class Tree:
    """What a model consisted of when it was last looked at.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._known = _entries(self._modules)

    def changed(self, model: nn.Module) -> bool:
        """Whether a module or parameter came, went or was replaced since; asked at every recorded step.

        Args:
            model: the model.

        Returns:
            The answer.
        """
        is_same = kernel.is_tree(self._modules, self._known)
        if is_same or (is_same is None and _entries(self._modules) == self._known):
            return False
        modules = list(model.modules())
        if any(map(_holds_other_tensors, modules)):
            return False
        self._modules, self._known = modules, _entries(modules)
        return True


def _holds_other_tensors(module: nn.Module) -> bool:
    """Whether something stands in for parameters during a forward, as under `torch.func.functional_call`."""
    return any(p is not None and not isinstance(p, nn.Parameter) for p in module._parameters.values())


def merged(plan: SitePlan, fresh: SitePlan) -> SitePlan:
    """A plan that grows into another one: what stays keeps its index, what is new or replaced comes behind.

    Args:
        plan: as it was.
        fresh: the plan of the model as it is now.

    Returns:
        The plan. What is no longer there keeps its index and nothing else.
    """
    held = {(watched.site.path, id(watched.parameter)) for watched in fresh.parameters}
    known = {(watched.site.path, id(watched.module)) for watched in plan.modules}
    owned = {(watched.site.path, id(watched.parameter)) for watched in plan.parameters}
    paths = {(watched.site.path, id(watched.module)) for watched in fresh.modules}
    modules = [w if (w.site.path, id(w.module)) in paths else WatchedModule(Gone(), w.site) for w in plan.modules]
    parameters = [w if (w.site.path, id(w.parameter)) in held else _gone(w) for w in plan.parameters]
    return replace(
        fresh,
        modules=(*modules, *(w for w in fresh.modules if (w.site.path, id(w.module)) not in known)),
        parameters=(*parameters, *(w for w in fresh.parameters if (w.site.path, id(w.parameter)) not in owned)),
        stacks=plan.stacks,
    )


def left(plan: SitePlan, grown: SitePlan) -> list[int]:
    """Indices of modules that are no longer at their path, though they may live on under another one.

    Args:
        plan: as it was.
        grown: what it has become.

    Returns:
        Rising.
    """
    pairs = zip(plan.modules, grown.modules, strict=False)
    return [i for i, (was, now) in enumerate(pairs) if was.module is not now.module]


def _gone(watched: WatchedParameter) -> WatchedParameter:
    """A place without its parameter, which is let go of; nothing is asked of one that has no shape."""
    nothing = cast(nn.Parameter, UninitializedParameter(requires_grad=False))
    return WatchedParameter(nothing, Gone(), watched.site)


def _entries(modules: list[nn.Module]) -> bytes | _Entries:
    packed = kernel.tree_of(modules)
    return _listed(modules) if packed is None else packed


def _listed(modules: list[nn.Module]) -> _Entries:
    """What they consist of in a few long lists: they are made and compared in half the time of one per module."""
    below, own = [module._modules for module in modules], [module._parameters for module in modules]
    children = [child for several in below if several for child in several.values()]
    parameters = [id(parameter) for several in own if several for parameter in several.values()]
    return list(map(len, below)), list(map(len, own)), children, parameters
