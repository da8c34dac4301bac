"""What the norms of a stack do to a gradient together: the product of their gains from the output side down.

Arrays in, arrays out. The gains come from the group ``norms`` of a run; the dashboard draws the product beside what the
measured branch power predicts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from keelscope.store.schema import SublayerInfo

__all__ = ["cumulative", "shortcut_weights"]


def cumulative(gains: ArrayLike) -> NDArray[np.float64]:
    """log10 of the product of all gains from the output side down to each entry.

    ``C_l = sum over k >= l of log10(gain_k)``: what is left, in decades, of a gradient that enters at the output.

    Args:
        gains: ``[..., entry]``, not negative, input side first. NaN is an entry that was not observed: it adds
            nothing to the entries below and stays NaN itself.

    Returns:
        ``[..., entry]`` in decades; ``-inf`` from an exact 0 down.

    Example:
        >>> cumulative([10.0, float("nan"), 0.1, 0.01]).tolist()
        [-2.0, nan, -3.0, -2.0]
    """
    with np.errstate(divide="ignore"):
        steps = np.log10(np.asarray(gains, dtype=np.float64))
    known = np.where(np.isnan(steps), 0.0, steps)
    sums = np.flip(np.cumsum(np.flip(known, axis=-1), axis=-1), axis=-1)
    return np.where(np.isnan(steps), np.nan, sums)


def shortcut_weights(sublayers: Iterable[SublayerInfo]) -> dict[str, float]:
    """The norms that lie on the shortcut, that is on the sum: only their gains multiply along the depth.

    In ``n(a x + F(x))`` the shortcut passes a times the gain of n. With the weight left out, a large ``a`` that the
    norm takes back would look like a loss.

    Args:
        sublayers: of a run.

    Returns:
        Weight ``a`` of the shortcut by the path of its norm, 1 where it is not one number; empty where every norm lies
        in a branch, or where the structure is not known.

    Example:
        >>> from keelscope.store.schema import SublayerInfo
        >>> shortcut_weights([SublayerInfo("n(a x + F(x))", norm_after="0.norm", alpha=4.0), SublayerInfo("x + F(x)")])
        {'0.norm': 4.0}
    """
    return {one.norm_after: 1.0 if one.alpha is None else one.alpha for one in sublayers if one.norm_after}
