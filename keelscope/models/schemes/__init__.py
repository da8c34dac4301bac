"""The residual schemes, one class each, found by reading the modules of this package.

To add one, put a file here with a subclass of `keelscope.models.residual.SubLayer` that has a `name`.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Final

from keelscope.models.residual import SubLayer

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SCHEMES", "discover"]


def _classes(module: ModuleType) -> Iterator[type[SubLayer]]:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, SubLayer) and value.__module__ == module.__name__:
            yield value


def discover() -> dict[str, type[SubLayer]]:
    """Read the schemes of every module in this package.

    Returns:
        Name -> class, sorted by name.

    Raises:
        ValueError: If two classes have the same name.
    """
    found: dict[str, type[SubLayer]] = {}
    for entry in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        for scheme in _classes(importlib.import_module(entry.name)):
            if not scheme.name:
                continue
            if scheme.name in found:
                raise ValueError(f"two schemes are called {scheme.name!r}: {found[scheme.name]!r} and {scheme!r}")
            found[scheme.name] = scheme
    return dict(sorted(found.items()))


SCHEMES: Final = MappingProxyType(discover())
"""Name -> class of every scheme."""
