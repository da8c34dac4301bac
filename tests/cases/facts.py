"""Loading a hard case, and comparing numbers with its EXPECT."""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["NUMERIC", "differences", "expected", "load", "uncovered"]

NUMERIC = ("modules", "params", "total_grad_norm", "steps", "buffers", "loss")
NONFINITE = {"nan", "inf", "-inf"}


def load(path: Path) -> ModuleType:
    """A case as a module of its own, findable by pickle."""
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def expected(path: Path) -> dict[str, Any]:
    """EXPECT of a case, read without running it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EXPECT":
            return dict(ast.literal_eval(node.value))
    raise AssertionError(f"{path.name} has no EXPECT")


def differences(
    case: ModuleType,
    got: dict[str, object],
    keys: Iterable[str] = NUMERIC,
    tolerance: tuple[float, float] | None = None,
) -> list[str]:
    """Every number of EXPECT that came out otherwise."""
    wanted = {key: case.EXPECT[key] for key in keys if key in case.EXPECT}
    found: list[str] = []
    _compare(wanted, got, "", tolerance or (getattr(case, "RTOL", 1e-4), getattr(case, "ATOL", 0.0)), found)
    return found


def uncovered(want: object, got: object, where: str = "") -> list[str]:
    """Every number that `got` does not hold."""
    if isinstance(want, dict):
        inside = got if isinstance(got, dict) else {}
        found = [uncovered(value, inside.get(key), f"{where}.{key}") for key, value in want.items()]
        return [line for lines in found for line in lines]
    return [] if got is not None or want is None or _is_prose(want) else [f"{where}: not computed"]


def _compare(want: object, got: object, where: str, tolerance: tuple[float, float], found: list[str]) -> None:
    if isinstance(want, dict):
        for key, value in want.items():
            if isinstance(got, dict) and key in got:
                _compare(value, got[key], f"{where}.{key}", tolerance, found)
            elif not _is_prose(value):
                found.append(f"{where}.{key}: missing")
    elif isinstance(want, list | tuple) and isinstance(got, list | tuple) and len(want) == len(got):
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            _compare(a, b, f"{where}[{i}]", tolerance, found)
    elif not _is_prose(want) and not _equal(want, got, tolerance):
        found.append(f"{where}: {got!r} instead of {want!r}")


def _is_prose(want: object) -> bool:
    return isinstance(want, str) and want not in NONFINITE


def _equal(want: object, got: object, tolerance: tuple[float, float]) -> bool:
    want = float(want) if isinstance(want, str) else want
    if not isinstance(want, int | float) or isinstance(want, bool):
        return want == got
    if isinstance(got, bool) or not isinstance(got, int | float):
        return False
    if math.isnan(want):
        return math.isnan(got)
    return got == want or abs(got - want) <= tolerance[0] * abs(want) + tolerance[1]
