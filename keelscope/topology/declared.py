"""Residual sub-layers that a model declares itself, where the graph shows no sum of shortcut and branch.

A module may have an attribute or method ``residual_topology``: one mapping per sub-layer, in execution order, with
plain values and paths relative to the module. What it declares replaces what the graph shows inside that module::

    def residual_topology(self):
        return [{"form": "A x + b F(n a x)", "schemes": ["mhc"], "branch": "branch", "norm_before": "norm"}]

Keys: ``form`` (required), ``schemes``, ``site`` (default: the module itself), ``branch``, ``norm_before``,
``norm_after``, ``branch_norm``, ``inner_norm``, ``alpha`` and ``beta`` (a number or the path of a parameter).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from keelscope.topology.coefficients import UNKNOWN, Coefficient
from keelscope.topology.readable import mean
from keelscope.topology.records import Sublayer

__all__ = ["Declaration", "declarations"]

_PATHS = ("branch", "norm_before", "norm_after", "branch_norm", "inner_norm")
_KEYS = frozenset({"form", "schemes", "site", "alpha", "beta", *_PATHS})


@dataclass(frozen=True, slots=True)
class Declaration:
    """What one module declares."""

    path: str
    sublayers: tuple[Sublayer, ...] = ()
    problem: str = ""
    """Why it cannot be used, or empty."""

    def covers(self, sublayer: Sublayer) -> bool:
        """Whether a sub-layer that the graph shows lies in the module."""
        inside = f"{self.path}." if self.path else ""
        places = (*sublayer.branch_sites, sublayer.branch, sublayer.site, sublayer.norm_before, sublayer.norm_after)
        return not self.problem and any(path is not None and path.startswith(inside) for path in places)


def declarations(model: nn.Module) -> Iterator[Declaration]:
    """What the modules of a model declare.

    Args:
        model: the model; its methods ``residual_topology`` are called.

    Yields:
        One declaration per module that has one.

    Example:
        >>> class Block(nn.Module):
        ...     residual_topology = ({"form": "x + F(x)", "branch": "f"},)
        >>> [(d.path, d.sublayers[0].branch) for d in declarations(nn.Sequential(Block()))]
        [('0', '0.f')]
    """
    for path, module in model.named_modules():
        declared = getattr(module, "residual_topology", None)
        if declared is not None:
            yield _declaration(path, module, declared)


def _declaration(path: str, module: nn.Module, declared: object) -> Declaration:
    named = path or "the model"
    try:
        items: Any = declared() if callable(declared) else declared
        return Declaration(path, tuple(_sublayer(path, module, item) for item in items))
    except Exception as error:  # the user's own code and values: whatever goes wrong is said, not raised
        return Declaration(
            path, problem=f"{named}: residual_topology cannot be used ({type(error).__name__}: {error})."
        )


def _sublayer(path: str, module: nn.Module, item: Mapping[str, object]) -> Sublayer:
    extra = sorted(set(item) - _KEYS)
    if extra or "form" not in item:
        raise KeyError(f"{extra[0]} is no key of a sub-layer" if extra else "form is missing")
    paths = {key: _path(path, item.get(key)) for key in _PATHS}
    return Sublayer(
        0,
        "declared",
        None,
        paths["branch"],
        _weight(path, module, item.get("alpha")),
        _weight(path, module, item.get("beta")),
        paths["norm_before"],
        paths["norm_after"],
        paths["branch_norm"],
        _path(path, item.get("site", "")),
        () if paths["branch"] is None else (paths["branch"],),
        str(item["form"]),
        tuple(sorted(str(name) for name in _names(item.get("schemes", ())))),
        inner_norm=paths["inner_norm"],
        entry=UNKNOWN,
    )


def _names(names: object) -> list[object]:
    return [names] if isinstance(names, str) else list(names) if isinstance(names, list | tuple) else []


def _path(path: str, relative: object) -> str | None:
    if relative is None:
        return None
    return ".".join(part for part in (path, str(relative)) if part)


def _weight(path: str, module: nn.Module, value: object) -> Coefficient:
    if value is None:
        return UNKNOWN
    if isinstance(value, str):
        parameter = module.get_parameter(value)
        kind = "learnable scalar" if parameter.numel() == 1 else "learnable vector"
        return Coefficient(kind, mean(parameter.detach()), _path(path, value))
    number = float(value)  # type: ignore[arg-type]
    return Coefficient() if number == 1 else Coefficient("constant", number)
