"""`Series`: one statistic of a run as a labelled array ``[step, site, ...]``, selectable by step and by path.

Produced by `keelscope.store.reader.Run`; consumed by the analysis, the figures and the user.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keelscope.errors import UnknownNameError
from keelscope.store.optional import needed
from keelscope.store.schema import Site

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Series", "united"]


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One statistic over steps and sites.

    Example:
        >>> import numpy as np
        >>> from keelscope.store.schema import Site
        >>> s = Series("gradients/rms", np.array([[1.0, 2.0]]), np.array([7]), (Site("a", "Linear"), Site("b", "ReLU")))
        >>> s.of("b").values.tolist(), s.at(step=7).tolist()
        ([[2.0]], [1.0, 2.0])
    """

    name: str
    """``group/statistic``."""
    values: NDArray[np.floating]
    """``[step, site, ...]``, or ``[step]`` for a scalar; NaN where nothing was observed."""
    steps: NDArray[np.int64]
    """``[step]``, strictly increasing."""
    sites: tuple[Site, ...] = ()
    """Labels of axis 1; empty for a scalar."""
    unit: str = ""
    doc: str = ""
    dims: tuple[str, ...] = ()
    """Names of the axes after ``[step, site]``."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Dotted path of every site, in axis order."""
        return tuple(site.path for site in self.sites)

    def at(self, step: int) -> NDArray[np.floating]:
        """Values ``[site, ...]`` of one recorded step.

        Args:
            step: a recorded step; -1 is the last one.

        Returns:
            The row, as a view.

        Raises:
            UnknownNameError: if that step was not recorded.
        """
        if step == -1 and self.steps.size:
            return np.asarray(self.values[-1])
        found = np.flatnonzero(self.steps == step)
        if found.size == 0:
            raise UnknownNameError(f"{self.name}: step {step} was not recorded; {self._recorded()}.")
        return np.asarray(self.values[int(found[0])])

    def of(self, pattern: str) -> Series:
        """The sites whose path matches a glob pattern (``blocks.3*``), in axis order.

        Args:
            pattern: shell-style pattern on the dotted path.

        Returns:
            A series with those sites only.

        Raises:
            UnknownNameError: if no site matches.
        """
        keep = [i for i, path in enumerate(self.paths) if fnmatchcase(path, pattern)]
        if not keep:
            known = ", ".join(self.paths[:3])
            raise UnknownNameError(f"{self.name}: no site matches {pattern!r}; sites are {known}, ...")
        return replace(self, values=self.values[:, keep], sites=tuple(self.sites[i] for i in keep))

    def to_frame(self) -> pd.DataFrame:
        """The series as a pandas frame (needs pandas).

        Returns:
            One row per step, one column per site path.

        Raises:
            UnknownNameError: if the series has more axes than step and site.
            UsageError: if pandas is not installed.
        """
        if self.values.ndim > 2:
            raise UnknownNameError(f"{self.name} has axes {self.dims}; select one entry of them before to_frame().")
        pandas = needed("pandas", "frame")
        columns = list(self.paths) if self.sites else [self.name.partition("/")[2]]
        rows = pandas.Index(self.steps, name="step")
        frame: pd.DataFrame = pandas.DataFrame(self.values.reshape(len(rows), -1), index=rows, columns=columns)
        return frame

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.floating]:
        return np.asarray(self.values, dtype=dtype)

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.values.shape))
        unit = f", {self.unit}" if self.unit else ""
        return f"<Series {self.name} {shape}{unit}; {self._recorded()}>"

    def _recorded(self) -> str:
        if self.steps.size == 0:
            return "no step is recorded"
        return f"{self.steps.size} steps are recorded, {self.steps[0]} to {self.steps[-1]}"


def united(sequences: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    """All steps of several rising sequences, which most often are the same.

    Args:
        sequences: ``[step]`` each, at least one.

    Returns:
        ``[step]``, rising.

    Example:
        >>> united([np.array([0, 2]), np.array([0, 2]), np.array([1])])
        array([0, 1, 2])
    """
    return reduce(_both, sequences)


def _both(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    if np.array_equal(a, b):
        return a
    steps = np.sort(np.concatenate([a, b]), kind="stable")  # merges what is in order already; np.union1d hashes it
    return steps[np.diff(steps, prepend=-1) > 0]
