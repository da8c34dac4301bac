"""Gradient-flow diagnostics for PyTorch: where gradients vanish, explode or stay flat through deep stacks, and why.

The names below are loaded on first use, so that reading a run needs no torch and ``import keelscope`` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keelscope.arming import Arm
    from keelscope.diagnosis import Report, compare, diagnose
    from keelscope.errors import KeelscopeError
    from keelscope.oneshot import report
    from keelscope.probe import Probe, Tap, TensorProbe
    from keelscope.schedule import Schedule
    from keelscope.session import Watch, watch
    from keelscope.statistics import Statistic, Terms
    from keelscope.store.pace import Pace
    from keelscope.store.reader import Run, open_run
    from keelscope.store.series import Series

__version__ = "0.1.0"

__all__ = [
    "Arm",
    "KeelscopeError",
    "Pace",
    "Probe",
    "Report",
    "Run",
    "Schedule",
    "Series",
    "Statistic",
    "Tap",
    "TensorProbe",
    "Terms",
    "Watch",
    "__version__",
    "compare",
    "diagnose",
    "open_run",
    "report",
    "watch",
]

_HOMES = {
    "Arm": "arming",
    "KeelscopeError": "errors",
    "Pace": "store.pace",
    "Probe": "probe",
    "Report": "diagnosis",
    "Run": "store.reader",
    "Schedule": "schedule",
    "Series": "store.series",
    "Statistic": "statistics",
    "Tap": "probe",
    "TensorProbe": "probe",
    "Terms": "statistics",
    "Watch": "session",
    "compare": "diagnosis",
    "diagnose": "diagnosis",
    "open_run": "store.reader",
    "report": "oneshot",
    "watch": "session",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'keelscope' has no attribute {name!r}; public names are {', '.join(sorted(_HOMES))}."
        )
    value = getattr(importlib.import_module(f"keelscope.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
