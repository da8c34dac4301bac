"""How numbers are written in reports: three significant digits, and zero, NaN, Inf and "not observed" told apart.

Shared by the findings, the text and Markdown reports and the terminal, so that one number looks the same everywhere.
"""

from __future__ import annotations

import math

__all__ = ["NOT_OBSERVED", "count", "decades", "number", "times"]

NOT_OBSERVED = "–"  # noqa: RUF001  # the dash that reports show where nothing was observed


def number(value: float | None) -> str:
    """A value with three significant digits, scientific outside 0.01 .. 1000.

    Args:
        value: any float; None for not observed.

    Returns:
        Its text.

    Example:
        >>> [number(v) for v in (None, 0.0, 0.0123, 12.5, 123456.0, float("nan"), float("-inf"))]
        ['–', '0', '0.0123', '12.5', '1.23e+05', 'NaN', '-Inf']
    """
    if value is None:
        return NOT_OBSERVED
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    if value == 0:
        return "0"
    rounded = float(f"{value:.2e}")
    if 0.01 <= abs(rounded) < 1000:
        return f"{rounded:.{2 - math.floor(math.log10(abs(rounded)))}f}"
    return f"{value:.2e}"


def decades(value: float | None) -> str:
    """A distance in decades, with its sign, to two places (a factor of 1.02): finer is noise in a slope.

    Args:
        value: the distance; None for not observed.

    Returns:
        Its text; ``0`` only for exactly 0.

    Example:
        >>> decades(4.4512), decades(-13.278), decades(-0.0696), decades(0.0), decades(1e-5)
        ('+4.45', '-13.3', '-0.07', '0', '0.00')
    """
    if value is None or value == 0 or not math.isfinite(value):
        return f"+{number(value)}" if value == math.inf else number(value)
    if abs(value) < 0.005:
        return "0.00"
    return f"{value:+.2f}" if abs(value) < 10 else f"{'+' if value > 0 else ''}{number(value)}"


def times(exponent: float) -> str:
    """A number of decades as a factor.

    Args:
        exponent: the decades.

    Returns:
        The factor with an x before it.

    Example:
        >>> times(0.3), times(-4.0), times(-400.0)
        ('x2.00', 'x1.00e-04', 'x1e-400')
    """
    if math.isnan(exponent) or abs(exponent) > 300:
        return "NaN" if math.isnan(exponent) else f"x1e{exponent:+.0f}"
    return f"x{number(10.0**exponent)}"


def count(n: float, noun: str, plural: str = "") -> str:
    """A number of things.

    Args:
        n: how many.
        noun: the thing.
        plural: several of them, where that is not `noun` with an s (or -ies).

    Returns:
        For example ``64 sub-layers``.

    Example:
        >>> count(1, "step"), count(64, "sub-layer"), count(4, "entry"), count(2, "bias", "biases")
        ('1 step', '64 sub-layers', '4 entries', '2 biases')
    """
    if n == 1:
        return f"1 {noun}"
    return f"{n:g} {plural or (f'{noun[:-1]}ies' if noun.endswith('y') else f'{noun}s')}"
