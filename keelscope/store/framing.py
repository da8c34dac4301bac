"""A run as one pandas table. Used by `reader.Run.to_frame`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from keelscope.store.longform import COLUMNS, LongBlock, ReadableRun, long_blocks
from keelscope.store.optional import needed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["to_frame"]


def to_frame(run: ReadableRun, keys: Iterable[str]) -> pd.DataFrame:
    """Read series of a run into a long table.

    Args:
        run: the run.
        keys: the series.

    Returns:
        One row per observed number; texts are categories.

    Raises:
        UsageError: if pandas is not installed.
    """
    pandas = needed("pandas", "frame")
    everything = {name: np.arange(len(spec.sites)) for name, spec in run.groups.items()}
    frames = [_frame(pandas, block) for block in long_blocks(run, keys, everything)]
    if not frames:
        return pandas.DataFrame({name: [] for name in COLUMNS})
    texts = {name: pandas.api.types.union_categoricals([frame[name] for frame in frames]) for name in COLUMNS[1:-1]}
    numbers = {name: np.concatenate([frame[name] for frame in frames]) for name in (COLUMNS[0], COLUMNS[-1])}
    return pandas.DataFrame({name: (texts | numbers)[name] for name in COLUMNS})


def _frame(pandas: Any, block: LongBlock) -> dict[str, Any]:
    def category(codes: Any, names: Iterable[str]) -> Any:
        known = list(dict.fromkeys(names))
        place = np.array([known.index(name) for name in names], np.intp)
        return pandas.Categorical.from_codes(place[codes], known)

    zeros = np.zeros(len(block.steps), np.intp)
    return {
        "step": block.steps,
        "group": category(zeros, [block.group]),
        "statistic": category(zeros, [block.statistic]),
        "site": category(block.site, block.sites),
        "part": category(block.part, block.parts),
        "value": block.values,
    }
