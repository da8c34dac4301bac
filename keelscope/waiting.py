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

__all__ = ["Frame", "WaitingGroup", "may_wait"]

_OURS = ("keelscope.", "keelscope_probes.")
_said = SimpleNamespace()


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What a group has in common on all rows of the same probes."""

    probes: tuple[Probe, ...]
    axis: NDArray[np.intp]
    """``[site]``: indices of the group's sites among all that there are."""
    sites: int
    """How many those are."""
    extents: Mapping[str, int]
    """Axis -> how many of its coordinates are kept."""
    total: str = ""
    """See `keelscope.store.schema.Later.total`."""

    @property
    def key(self) -> Hashable:
        """Groups with the same one can be finished together."""
        return self.sites, id(self.axis), tuple(map(id, self.probes)), *self.extents.items()


@dataclass(slots=True, eq=False)
class WaitingGroup:
    """One group of one row, before its statistics are finished."""

    frame: Frame
    blocks: Blocks
    """What the kernel saw."""
    factors: tuple[float, ...]
    """What the tensors of each probe are to be multiplied by."""

    @property
    def key(self) -> Hashable:
        """Groups with the same one can be finished together."""
        return self.frame.key

    @property
    def total(self) -> str:
        """The scalar that is the norm over all sites, known when the group is finished; or empty."""
        return self.frame.total

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
        frame = self.frame
        observed = np.zeros((len(several), len(frame.axis)), dtype=np.bool_)
        for place, probe in enumerate(frame.probes):
            try:
                found, seen = _finished(probe, [(each.blocks, each.factors[place]) for each in several], frame.sites)
            except Exception as error:  # one probe's fault costs the others nothing
                warn_once(_said, error, probe.name)
                continue
            values |= {name: self._kept(probe, name, block) for name, block in found.items()}
            observed |= seen[:, frame.axis]
        is_of_parameters = any(probe.tap.axis is Axis.PARAMETER for probe in frame.probes)
        return values, observed if is_of_parameters else None

    def total_norm(self, probe: Probe) -> float | None:
        """Norm over all sites that one of the probes saw, see `keelscope.rows.total_norm`."""
        for terms in terms_of(probe) if probe in self.frame.probes else ():
            block = self.blocks(probe, terms) if "squares" in terms.columns else None
            if block is not None:
                squares = block.rows[:, terms.columns.index("squares")]
                factor = self.factors[self.frame.probes.index(probe)]
                return math.sqrt(np.add.reduce(squares)) * abs(factor) if len(squares) else math.nan
        values, seen = self.together([self])
        return float(np.sqrt(np.square(values["norm"][seen]).sum())) if "norm" in values and seen is not None else None

    def _kept(self, probe: Probe, name: str, block: NDArray[np.float64]) -> NDArray[np.float64]:
        (dims,) = (statistic.dims for statistic in probe.statistics if statistic.name == name)
        return block[:, self.frame.axis][:, :, *(slice(self.frame.extents.get(dim)) for dim in dims)]


def may_wait(probe: Probe) -> bool:
    """Whether every statistic of a probe is one of ours, which are finished site by site, from terms of the kernel."""
    own = all(getattr(s.finish, "__module__", "").startswith(_OURS) for s in probe.statistics)
    packed = probe.tap.axis is Axis.SUBLAYER
    return own and all(terms.routine is not None or (packed and terms.packs is not None) for terms in terms_of(probe))


def _finished(
    probe: Probe, taken: Sequence[tuple[Blocks, float]], sites: int
) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.bool_]]:
    """Statistic -> ``[row, site, ...]``, NaN where a site was not observed; and ``[row, site]``, whether it was."""
    observed = np.zeros(len(taken) * sites, dtype=np.bool_)
    values: dict[str, NDArray[np.float64]] = {}
    for terms in terms_of(probe):
        blocks = [block for blocks_of, _ in taken if (block := blocks_of(probe, terms)) is not None]
        places = np.concatenate([block.sites + row * sites for row, block in enumerate(blocks)])
        observed[places] = True
        with np.errstate(all="ignore"):
            rows = [terms.rescaled(block.rows, factor) for block, (_, factor) in zip(blocks, taken, strict=True)]
            columns = terms.named(np.concatenate(rows))
            for statistic in probe.statistics:
                if statistic.terms is terms:
                    extra = (len(statistic.coords[dim]) for dim in statistic.dims)
                    spread = np.full((len(taken) * sites, *extra), np.nan)
                    spread[places] = statistic.finish(columns) if len(places) else np.nan
                    values[statistic.name] = spread.reshape(len(taken), sites, *spread.shape[1:])
    return values, observed.reshape(len(taken), sites)
