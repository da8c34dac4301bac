"""Sentences for arguments that cannot be used, shared by `config`, `schemes` and `build`.

Each check returns the value it accepts, so that it can be used where the value is stored. The errors are plain
``ValueError``s: reference models are ordinary user models and know nothing of the rest of keelscope.
"""

from __future__ import annotations

import difflib
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["choice", "flag", "fraction", "nearest", "number", "whole"]


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error sentence: the near matches of a name, or all that exists.

    Args:
        name: What was asked for.
        known: What exists.

    Returns:
        A clause without a full stop.

    Example:
        >>> nearest("post_nl", ["keel", "post_ln", "pre_ln"])
        "did you mean 'post_ln'?"
        >>> nearest("zzz", ["keel", "post_ln"])
        'choose from keel, post_ln'
    """
    names = sorted(known)
    matches = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.6)
    if not matches:
        return f"choose from {', '.join(names)}"
    return f"did you mean {' or '.join(repr(match) for match in matches)}?"


def choice(name: str, value: object, known: Iterable[str]) -> str:
    """Accept one of a set of words.

    Args:
        name: Name of the option.
        value: What was given.
        known: The words that are accepted.

    Returns:
        The value.

    Raises:
        ValueError: If the value is none of them.
    """
    known = tuple(known)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} = {value!r} is not known: {nearest(str(value), known)}")
    return value


def whole(name: str, value: object, minimum: int) -> int:
    """Accept a whole number from a minimum on.

    Args:
        name: Name of the option.
        value: What was given.
        minimum: The smallest number that is accepted.

    Returns:
        The value.

    Raises:
        ValueError: If the value is not a whole number or is smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} = {value!r} cannot be used: give a whole number, {minimum} or more")
    return value


def number(name: str, value: object, *, above: float = -math.inf) -> float:
    """Accept a finite number above a bound.

    Args:
        name: Name of the option.
        value: What was given.
        above: The bound, not accepted itself.

    Returns:
        The value as a float.

    Raises:
        ValueError: If the value is not a finite number above the bound.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= above:
        bound = "" if above == -math.inf else f" above {above:g}"
        raise ValueError(f"{name} = {value!r} cannot be used: give a number{bound}")
    return float(value)


def fraction(name: str, value: object) -> float:
    """Accept a number from 0 to 1, both included.

    Args:
        name: Name of the option.
        value: What was given.

    Returns:
        The value as a float.

    Raises:
        ValueError: If the value is not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} = {value!r} cannot be used: give a number from 0 to 1")
    return float(value)


def flag(name: str, value: object) -> bool:
    """Accept True or False, and nothing that merely looks like it.

    Args:
        name: Name of the option.
        value: What was given.

    Returns:
        The value.

    Raises:
        ValueError: If the value is not a bool.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r} cannot be used: give True or False")  # noqa: TRY004  # as the other checks
    return value
