"""Values of ordinary steps that are finished when they are written: many rows together cost little more than one.

Where the kernel saw all that a group's probes look at, `keelscope.assembly` hands over its terms in place of values,
and `keelscope.store.rows.settle` has them finished in the writer thread.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from keelscope.calls import terms_of
from keelscope.containment import warn_once
from keelscope.pages import Blocks
from keelscope.probe import Axis, Probe

__all__ = ["Taken", "WaitingGroup", "may_wait"]

_OURS = ("keelscope.", "keelscope_probes.")
_said = SimpleNamespace()


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What the kernel saw for one probe on one step."""

    probe: Probe
    blocks: Blocks
    factor: float
    """What the tensors are to be multiplied by."""


@dataclass(frozen=True, slots=True, eq=False)
class WaitingGroup:
    """One group of one row, before its statistics are finished."""

    taken: tuple[Taken, ...]
    axis: NDArray[np.intp]
    """``[site]``: indices of the group's sites among all that there are."""
    sites: int
    """How many those are."""
    extents: Mapping[str, int]
    """Axis -> how many of its coordinates are kept."""

    @property
    def key(self) -> Hashable:
        """Groups with the same one can be finished together."""
        return self.sites, id(self.axis), tuple(id(taken.probe) for taken in self.taken), *self.extents.items()

    def together(
        self, several: Sequence[WaitingGroup]
    ) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.bool_] | None]:
        """Finish this group of several rows.

        Args:
            several: those rows, with the same key.

        Returns:
            Statistic -> ``[row, site, ...]``; and ``[row, site]`` for groups of parameters, whether one was seen.
        """
        values: dict[str, NDArray[np.float64]] = {}
        observed = np.zeros((len(several), len(self.axis)), dtype=np.bool_)
        for place, mine in enumerate(self.taken):
            try:
                found, seen = _finished(mine.probe, [each.taken[place] for each in several], self.sites)
            except Exception as error:  # one probe's fault costs the others nothing
                warn_once(_said, error, mine.probe.name)
                continue
            values |= {name: self._kept(mine.probe, name, block) for name, block in found.items()}
            observed |= seen[:, self.axis]
        is_of_parameters = any(taken.probe.tap.axis is Axis.PARAMETER for taken in self.taken)
        return values, observed if is_of_parameters else None

    def total_norm(self, probe: Probe) -> float | None:
        """Norm over all sites that one of the probes saw, see `keelscope.rows.total_norm`."""
        for taken in self.taken:
            for terms in terms_of(probe) if taken.probe is probe else ():
                block = taken.blocks(probe, terms)
                if block is not None and "squares" in terms.columns:
                    squares = block.rows[:, terms.columns.index("squares")]
                    return float(np.sqrt(squares.sum()) * abs(taken.factor)) if len(squares) else math.nan
        values, seen = self.together([self])
        return float(np.sqrt(np.square(values["norm"][seen]).sum())) if "norm" in values and seen is not None else None

    def _kept(self, probe: Probe, name: str, block: NDArray[np.float64]) -> NDArray[np.float64]:
        (dims,) = (statistic.dims for statistic in probe.statistics if statistic.name == name)
        return block[:, self.axis][:, :, *(slice(self.extents.get(dim)) for dim in dims)]


def may_wait(probe: Probe) -> bool:
    """Whether every statistic of a probe is one of ours, which are finished site by site, from terms of the kernel."""
    own = all(getattr(s.finish, "__module__", "").startswith(_OURS) for s in probe.statistics)
    return own and all(terms.routine is not None for terms in terms_of(probe))


def _finished(
    probe: Probe, taken: Sequence[Taken], sites: int
) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.bool_]]:
    """Statistic -> ``[row, site, ...]``, NaN where a site was not observed; and ``[row, site]``, whether it was."""
    observed = np.zeros(len(taken) * sites, dtype=np.bool_)
    values: dict[str, NDArray[np.float64]] = {}
    for terms in terms_of(probe):
        blocks = [block for one in taken if (block := one.blocks(probe, terms)) is not None]
        places = np.concatenate([block.sites + row * sites for row, block in enumerate(blocks)])
        observed[places] = True
        with np.errstate(all="ignore"):
            rows = [terms.rescaled(block.rows, one.factor) for block, one in zip(blocks, taken, strict=True)]
            columns = terms.named(np.concatenate(rows))
            for statistic in probe.statistics:
                if statistic.terms is terms:
                    extra = (len(statistic.coords[dim]) for dim in statistic.dims)
                    spread = np.full((len(taken) * sites, *extra), np.nan)
                    spread[places] = statistic.finish(columns) if len(places) else np.nan
                    values[statistic.name] = spread.reshape(len(taken), sites, *spread.shape[1:])
    return values, observed.reshape(len(taken), sites)
