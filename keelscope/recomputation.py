"""Which call of a module a checkpointed region repeats, when the forward runs again inside a backward pass.

A reentrant checkpoint ran it without gradients first and differentiates the repetition; a non-reentrant one only wants
its saved tensors back. Where a module also ran elsewhere, what is on the stack tells the two apart.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from keelscope.calls import CallRecord

__all__ = ["repeated_call"]

_FRAMES = 400


def repeated_call(calls: Sequence[CallRecord]) -> CallRecord | None:
    """The call whose gradient arrives at the repetition.

    Args:
        calls: those of one module on one step, in order.

    Returns:
        The last one that ran without gradients and was not repeated yet; None if the repetition is of a call whose
        output is in the graph already.
    """
    left = [call for call in reversed(calls) if not call.recomputed]
    without = next((call for call in left if not call.tracked), None)
    return without if without is None or without is left[0] or _is_reentrant() else None


def _is_reentrant() -> bool:
    """Whether `torch.utils.checkpoint.CheckpointFunction.backward` is running."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        code = frame.f_code
        if code.co_name == "backward" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
