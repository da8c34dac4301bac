"""`NamedProfile`: a depth profile, what it is the profile of, and whether a verdict may rest on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keelscope.analysis.profile import DepthProfile

__all__ = ["NamedProfile", "floor_remark"]


@dataclass(frozen=True, slots=True, eq=False)
class NamedProfile:
    """A depth profile and what it is the profile of."""

    key: str
    """Series it is drawn from, e.g. ``"gradients/rms"``."""
    title: str
    """As written in a sentence, e.g. ``"gradient RMS"``."""
    shape: DepthProfile
    counted: bool = True
    """Whether a verdict may rest on it."""
    remark: str = ""
    """Why it is not counted, or what was left out; one sentence."""


def floor_remark(title: str, shape: DepthProfile) -> str:
    """Said of a profile with layers under the float floor; empty without any.

    Args:
        title: of the profile.
        shape: its numbers.

    Returns:
        A sentence.
    """
    if not shape.floored:
        return ""
    share = f"{shape.floored} of {shape.levels.size} layers"
    return f"{share} lie under the float32 floor of 1e-37 in the {title} and are left out of the fit."
