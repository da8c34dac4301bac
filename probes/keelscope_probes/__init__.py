"""The built-in probes, one phenomenon per file.

Every module of this package is searched for probes, so that adding one touches its own file only.
"""

from __future__ import annotations

import importlib
import pkgutil

from keelscope.probe import Probe

__all__ = ["PROBES"]


def _collect() -> tuple[Probe, ...]:
    """Every probe that a module of this package lists in its ``__all__``."""
    found: list[Probe] = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        found.extend(value for name in module.__all__ if isinstance(value := getattr(module, name), Probe))
    return tuple(found)


PROBES = _collect()
