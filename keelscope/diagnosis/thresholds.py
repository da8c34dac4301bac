"""Every threshold of the verdict by name, with its default, and how a user changes some of them.

Rules and headline read `Evidence.thresholds`; nobody else compares with a number of their own. A file in TOML or
``--threshold NAME=VALUE`` changes them for one report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from keelscope.errors import UnknownNameError, UsageError

__all__ = ["DEFAULTS", "THRESHOLDS", "Threshold", "parsed", "read_thresholds", "thresholds_with"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """One number that a verdict depends on."""

    name: str
    value: float
    unit: str
    meaning: str


THRESHOLDS = (
    Threshold("vanishing", 2.0, "decades", "S above it vanishes."),
    Threshold("exploding", 2.0, "decades", "-S above it explodes."),
    Threshold("drifting", 1.0, "decades", "abs(S) above it drifts."),
    Threshold("knee", 1.0, "decades", "Change between two neighbours above it is a knee."),
    Threshold("uniformly_small", 1e-8, "1", "RMS of nine parameter gradients of ten below it: Adam's epsilon."),
    Threshold(
        "variance_growth", 10.0, "1", "Growth of the output variance above it is named; L times it is a warning."
    ),
    Threshold("shortcut_attenuated", 2.0, "decades", "Loss along shortcuts alone above it."),
    Threshold("residual_absorbed", 0.25, "1", "Share of entries that rounding leaves unchanged above it."),
    Threshold("idle_depth", 0.01, "1", "Size of an aligned branch against the stream below it."),
    Threshold("norm_kills_gradient", 0.01, "1", "Scale-free gain of a norm below it."),
    Threshold("norm_swamped", 1.0, "decades", "What a norm on a sum takes from the shortcut above it."),
    Threshold("rank_collapse", 0.99, "1", "Cosine similarity of tokens above it."),
    Threshold("gate_closed", 0.02, "1", "Weight that a gate leaves to its branch below it."),
    Threshold("saturated", 0.5, "1", "Share of saturated entries of a gate or activation above it."),
    Threshold("dead_units", 0.75, "1", "Share of units that are 0 for every sample above it."),
    Threshold("spike", 10.0, "1", "Total gradient norm over the median of the steps before above it."),
    Threshold("dominated", 0.9, "1", "Share of one parameter in the squared gradient norm above it."),
    Threshold("update_ratio", 0.1, "1", "Median change of the weights in a step, against their size, above it."),
    Threshold("zero_grad_stuck", 9.0, "steps", "Optimizer steps asleep from which on a branch is stuck."),
)
"""Each threshold, in the order of the rules."""
DEFAULTS: Mapping[str, float] = MappingProxyType({threshold.name: threshold.value for threshold in THRESHOLDS})
"""Threshold by name."""


def thresholds_with(changes: Mapping[str, float] | None) -> Mapping[str, float]:
    """The defaults with some of them changed.

    Args:
        changes: new value by name; None for none.

    Returns:
        Every threshold by name.

    Raises:
        UnknownNameError: if there is no threshold of a name.
        UsageError: if a value is not a finite number above 0.

    Example:
        >>> thresholds_with({"vanishing": 3})["vanishing"], thresholds_with(None)["vanishing"]
        (3.0, 2.0)
    """
    if not changes:
        return DEFAULTS
    return MappingProxyType({**DEFAULTS, **{name: _sound(name, value) for name, value in changes.items()}})


def parsed(settings: Iterable[str]) -> dict[str, float]:
    """Thresholds as they are given on the command line.

    Args:
        settings: ``NAME=VALUE`` each.

    Returns:
        Value by name.

    Raises:
        UsageError: if one is not of that form.

    Example:
        >>> parsed(["vanishing=3", "knee=1.5"])
        {'vanishing': 3.0, 'knee': 1.5}
    """
    found = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        try:
            found[name.strip()] = float(text)
        except ValueError:
            wrong = f"{text!r} is no number" if equals else "it has no ="
            raise UsageError(f"--threshold {setting}: {wrong}; write NAME=VALUE, e.g. vanishing=3.") from None
    return found


def read_thresholds(path: Path) -> dict[str, float]:
    """Thresholds from a TOML file: the table ``[thresholds]``, or ``[tool.keelscope.thresholds]`` of a pyproject.toml.

    Args:
        path: the file.

    Returns:
        Value by name.

    Raises:
        UsageError: if the file cannot be read, is no TOML, or holds no such table.
    """
    import tomllib

    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"thresholds cannot be read from {path}: {error}.") from error
    own = content.get("tool", {}).get("keelscope", {}) if "tool" in content else content
    table = own.get("thresholds")
    if not isinstance(table, dict):
        raise UsageError(f"{path} holds no table [thresholds]; write one, e.g. vanishing = 3.0 in it.")
    return dict(table)


def _sound(name: str, value: object) -> float:
    if name not in DEFAULTS:
        near = get_close_matches(name, DEFAULTS, n=3) or list(DEFAULTS)
        raise UnknownNameError(f"there is no threshold {name!r}; use {', '.join(near)}.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"threshold {name} = {value!r} cannot be used: give a number above 0.")
    return float(value)
