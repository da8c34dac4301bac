"""`typeset`: the plain sentences of reports as they are read on a page: minus signs, times signs, powers of ten."""

from __future__ import annotations

import re

__all__ = ["typeset"]

MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
_POWERS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)e([+-]?\d+)(?![\w.]*\w)")
_FACTOR = re.compile(r"(?<![\w.])x(?=\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w|\())")
_NEGATIVE = re.compile(r"(?<![\w.)\]-])-(?=\d)")


def typeset(sentence: str) -> str:
    """A sentence with the signs that a keyboard does not have; names and paths stay as they are.

    Args:
        sentence: of a report.

    Returns:
        The same words.

    Example:
        >>> typeset("fitted x2.92e-07 over 48 sub-layers, slope -0.136, sublayers.0-2")
        'fitted ×2.92×10⁻⁷ over 48 sub-layers, slope −0.136, sublayers.0-2'
    """
    factors = _FACTOR.sub(TIMES, sentence)
    powers = _SCIENTIFIC.sub(lambda found: f"{found[1]}{TIMES}10{str(int(found[2])).translate(_POWERS)}", factors)
    return _NEGATIVE.sub(MINUS, powers)
