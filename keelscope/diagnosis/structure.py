"""The residual structure of a run in words and as JSON values: which equation its sub-layers follow, and how often."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keelscope.formatting import count
from keelscope.store.schema import SublayerInfo

__all__ = ["Form", "forms_of", "structure_note"]

_MOST_FORMS = 4
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Form:
    """Sub-layers that follow one equation with one weight on the shortcut."""

    equation: str
    schemes: tuple[str, ...]
    """Every scheme of that form; empty if none has it."""
    alpha: float | None
    number: int

    def __str__(self) -> str:
        weight = f", a = {self.alpha:.4g}" if self.alpha is not None and "a x" in self.equation else ""
        names = "/".join(self.schemes[:_MOST_NAMES]) or "no named scheme"
        return f"{self.number} x [{self.equation}]{weight} ({names})"


def forms_of(sublayers: Iterable[SublayerInfo]) -> tuple[Form, ...]:
    """Sub-layers grouped by form, the most frequent first.

    Args:
        sublayers: of a run, in execution order.

    Returns:
        One entry per equation, schemes and shortcut weight.

    Example:
        >>> [str(form) for form in forms_of([SublayerInfo("n(x + F(x))", ("post_ln",))] * 2)]
        ['2 x [n(x + F(x))] (post_ln)']
    """
    counts: dict[tuple[str, tuple[str, ...], float | None], int] = {}
    for sublayer in sublayers:
        key = (sublayer.form, sublayer.schemes, sublayer.alpha)
        counts[key] = counts.get(key, 0) + 1
    forms = [Form(equation, schemes, alpha, number) for (equation, schemes, alpha), number in counts.items()]
    return tuple(sorted(forms, key=lambda form: -form.number))


def structure_note(sublayers: Iterable[SublayerInfo]) -> str:
    """One sentence on the residual structure, empty where none is known.

    Args:
        sublayers: of a run.

    Returns:
        For example ``Residual structure: 62 x [n(a x + F(n x))], a = 64 (keel); 2 x ...``.
    """
    forms = forms_of(sublayers)
    if not forms:
        return ""
    rest = len(forms) - _MOST_FORMS
    more = f"; and {count(rest, 'other form')}" if rest > 0 else ""
    return f"Residual structure: {'; '.join(map(str, forms[:_MOST_FORMS]))}{more}."
