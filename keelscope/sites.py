"""Which modules and parameters of a model are observed, and where they stand: clean paths, stacks, aliases.

`keelscope.session` asks once, before the first recorded step, and puts the answer in execution order when that step is
complete. Nothing here runs the model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn
from torch.nn.parameter import UninitializedParameter

from keelscope.errors import UnknownNameError
from keelscope.stacks import class_name, find_stacks, is_container, is_wrapper, unwrapped
from keelscope.store.schema import Site, Stack
from keelscope.unregistered import Unregistered, find_unregistered

__all__ = [
    "SOUGHT",
    "Selector",
    "SitePlan",
    "WatchedModule",
    "WatchedParameter",
    "clean_path",
    "plan_sites",
    "relabelled",
]

Selector = str | re.Pattern[str] | type | tuple[type, ...] | Callable[[str, nn.Module], bool]

SOUGHT = "activation"
"""Role of a module that the selection leaves out and that is there for the probes that seek it."""
_WRAPPER_NAMES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})


@dataclass(frozen=True, slots=True)
class WatchedModule:
    """A module and its label."""

    module: nn.Module
    site: Site


@dataclass(frozen=True, slots=True)
class WatchedParameter:
    """A parameter, the module that owns it and its label."""

    parameter: nn.Parameter
    owner: nn.Module
    site: Site


_Watched = TypeVar("_Watched", WatchedModule, WatchedParameter)


@dataclass(frozen=True, slots=True)
class SitePlan:
    """Everything about a model that is known before it runs."""

    modules: tuple[WatchedModule, ...]
    """Selected modules, and those that a probe seeks, in registration order."""
    parameters: tuple[WatchedParameter, ...]
    """Every parameter once, under its first path."""
    everything: tuple[tuple[str, nn.Module], ...]
    """All modules with their clean path, selected or not, for the coverage."""
    stacks: tuple[Stack, ...]
    entries: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Path of each stack entry -> path of its stack, position."""
    unregistered: tuple[Unregistered, ...] = ()
    """Trainable tensors that the model holds without having registered them."""

    def place(self, path: str) -> tuple[str, int]:
        """Stack and position of the entry a path lies in, ``("", -1)`` outside every stack."""
        return _place(path, self.entries)


def clean_path(path: str) -> str:
    """A dotted path without what wrappers (compile, FSDP, checkpointing) insert.

    Args:
        path: as in ``named_modules()``.

    Returns:
        The path in the user's own model.

    Example:
        >>> clean_path("_orig_mod.blocks.0._checkpoint_wrapped_module.mlp")
        'blocks.0.mlp'
    """
    return ".".join(part for part in path.split(".") if part not in _WRAPPER_NAMES)


def plan_sites(
    model: nn.Module,
    sites: Selector | Iterable[Selector] = "auto",
    sought: Callable[[nn.Module], bool] = lambda _module: False,
) -> SitePlan:
    """Choose the sites of a model.

    Args:
        model: any module; DDP, DataParallel and torch.compile wrappers are looked through.
        sites: ``"auto"`` (stack entries, the parameter-owning modules directly inside them and every norm of the
            stacks, plus parameter-owning modules outside), ``"leaves"``, ``"all"``, a glob on the path, a compiled
            regular expression, a type or tuple of types, a callable ``(path, module) -> bool``, or several of these.
        sought: further modules, which get the role `SOUGHT`.

    Returns:
        The plan.

    Raises:
        UnknownNameError: if a selector matches no module; near matches are listed.
    """
    root = unwrapped(model)
    everything = tuple(_clean_modules(root))
    stacks, members = find_stacks(everything)
    labels = _Labels(everything, members)
    chosen = _chosen(everything, sites, labels)
    modules = tuple(
        WatchedModule(module, site if path in chosen else replace(site, role=SOUGHT))
        for path, module in everything
        if (path in chosen or sought(module)) and (site := labels.of(path, module))
    )
    unregistered = find_unregistered(everything)
    return SitePlan(modules, tuple(_parameters(root, labels)), everything, stacks, members, unregistered)


def relabelled(plan: SitePlan, model: nn.Module) -> SitePlan:
    """The same sites under labels made anew: lazy modules get their class and size with the first forward.

    Args:
        plan: the sites.
        model: the model they were chosen from.

    Returns:
        The plan.
    """
    fresh = plan_sites(model, lambda _path, _module: True)
    modules = {id(watched.module): watched.site for watched in fresh.modules}
    modules |= {id(w.module): w.site for w in plan.modules if w.site.role == SOUGHT}
    parameters = {id(watched.parameter): watched.site for watched in fresh.parameters}
    return replace(
        plan,
        modules=tuple(_under(w, modules.get(id(w.module))) for w in plan.modules),
        parameters=tuple(_under(w, parameters.get(id(w.parameter))) for w in plan.parameters),
    )


def _under(watched: _Watched, site: Site | None) -> _Watched:
    """The same under another label; itself where nothing has changed, and where it stands at another path by now."""
    if site is None or site == watched.site or site.path != watched.site.path:
        return watched
    return replace(watched, site=site)


def _clean_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in root.named_modules():
        parametrization = path == "parametrizations" or ".parametrizations" in f".{path}"
        if not is_wrapper(module) and not parametrization:
            yield clean_path(path), module


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer, by its class name (LayerNorm, LlamaRMSNorm, BatchNorm2d, ...)."""
    return "norm" in type(module).__name__.lower() and not is_container(module) and not any(module.children())


class _Labels:
    """Turns paths into `Site`s: role, stack position, size and aliases."""

    def __init__(self, everything: tuple[tuple[str, nn.Module], ...], members: dict[str, tuple[str, int]]) -> None:
        self.members = members
        self.aliases = _module_aliases(everything[0][1]) if everything else {}

    def of(self, path: str, module: nn.Module) -> Site:
        stack, position = self.place(path)
        numel = sum(_numel(p) for p in module.parameters(recurse=False))
        return Site(
            path, class_name(module), self.role(path, module), stack, position, numel, self.aliases.get(path, ())
        )

    def role(self, path: str, module: nn.Module) -> str:
        if path in self.members:
            return "layer"
        if is_norm(module):
            return "norm"
        return "branch" if self.place(path)[0] else "other"

    def place(self, path: str) -> tuple[str, int]:
        return _place(path, self.members)


def _place(path: str, entries: Mapping[str, tuple[str, int]]) -> tuple[str, int]:
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        found = entries.get(".".join(parts[:end]))
        if found:
            return found
    return "", -1


def _module_aliases(root: nn.Module) -> dict[str, tuple[str, ...]]:
    """First path -> other paths, for modules registered more than once."""
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        if id(module) in first and first[id(module)] != clean_path(path):
            others.setdefault(first[id(module)], []).append(clean_path(path))
        first.setdefault(id(module), clean_path(path))
    return {path: tuple(paths) for path, paths in others.items()}


def _numel(parameter: nn.Parameter) -> int:
    return 0 if isinstance(parameter, UninitializedParameter) else parameter.numel()


def _parameters(root: nn.Module, labels: _Labels) -> Iterator[WatchedParameter]:
    """Every parameter once, under its first path, with the other paths as aliases."""
    seen: dict[int, WatchedParameter] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            path = clean_path(f"{prefix}.{name}" if prefix else name)
            known = seen.get(id(parameter))
            if known is None:
                stack, position = labels.place(path)
                site = Site(path, "Parameter", "parameter", stack, position, _numel(parameter))
                seen[id(parameter)] = WatchedParameter(parameter, module, site)
            elif path != known.site.path:
                aliases = (*known.site.aliases, path)
                seen[id(parameter)] = replace(known, site=replace(known.site, aliases=aliases))
    return iter(seen.values())


def _chosen(
    everything: tuple[tuple[str, nn.Module], ...], sites: Selector | Iterable[Selector], labels: _Labels
) -> set[str]:
    selectors = list(sites) if isinstance(sites, Iterable) and not isinstance(sites, str | tuple) else [sites]
    chosen: set[str] = set()
    for selector in selectors:
        test = _predicate(selector, labels)
        found = {path for path, module in everything if test(path, module)}
        if not found and selector not in {"auto", "leaves", "all"}:
            raise UnknownNameError(_nothing_matches(selector, [path for path, _ in everything]))
        chosen |= found
    return chosen


def _predicate(selector: Selector, labels: _Labels) -> Callable[[str, nn.Module], bool]:
    if isinstance(selector, str):
        return _named_predicate(selector, labels)
    if isinstance(selector, re.Pattern):
        return lambda path, _: selector.search(path) is not None
    if isinstance(selector, type | tuple):
        return lambda _, module: isinstance(module, selector)
    return selector


def _named_predicate(name: str, labels: _Labels) -> Callable[[str, nn.Module], bool]:
    named = {
        "auto": lambda path, module: _is_auto(path, module, labels),
        "leaves": lambda _, module: not is_container(module) and not any(module.children()),
        "all": lambda _, module: not is_container(module) or isinstance(module, nn.Sequential),
    }
    return named.get(name, lambda path, _: fnmatchcase(path, name))


def _is_auto(path: str, module: nn.Module, labels: _Labels) -> bool:
    stack, _ = labels.place(path)
    if not stack:
        return any(True for _ in module.parameters(recurse=False))
    if path in labels.members or is_norm(module):
        return True
    inside = path.rpartition(".")[0] in labels.members
    return inside and not is_container(module) and any(True for _ in module.parameters())


def _nothing_matches(selector: object, paths: list[str]) -> str:
    near = difflib.get_close_matches(str(selector), paths, n=3, cutoff=0.4) or paths[1:4]
    return f"sites={selector!r} matches no module; module paths look like {', '.join(map(repr, near))}."
