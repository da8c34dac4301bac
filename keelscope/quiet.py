"""Sites where a probe has nothing to say: seen in the first recorded row, neither recorded nor looked at afterwards.

`keelscope.recorder` asks when it lays the site axes; which sites are worth it, `TensorProbe.worth` knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from keelscope.board import Fetched
from keelscope.calls import StepRecord
from keelscope.duties import Duties
from keelscope.probe import Probe, TensorProbe
from keelscope.rows import module_observations, probe_values

__all__ = ["leave_out_quiet"]


def leave_out_quiet(
    duties: Duties,
    step: StepRecord,
    fetched: Fetched,
    groups: Mapping[str, Sequence[Probe]],
    sites: int,
    *,
    seen_only: bool,
) -> dict[str, frozenset[int]]:
    """Take probes off the sites that are not worth it.

    Args:
        duties: where they look at modules.
        step: the first recorded step.
        fetched: its terms.
        groups: probes by group.
        sites: number of modules.
        seen_only: keep sites that were not seen, since other ranks may see them.

    Returns:
        The sites that are left out, of groups that leave any out.
    """
    found: dict[str, frozenset[int]] = {}
    for group, probes in groups.items():
        each = [_quiet(probe, step, fetched, sites, seen_only) for probe in probes]
        for probe, quiet in zip(probes, each, strict=True):
            duties.drop(probe.name, quiet)
        if each and (everywhere := frozenset.intersection(*each)):
            found[group] = everywhere
    return found


def _quiet(probe: Probe, step: StepRecord, fetched: Fetched, sites: int, seen_only: bool) -> frozenset[int]:
    if not isinstance(probe, TensorProbe) or probe.worth is None:
        return frozenset()
    values, seen = probe_values(probe, module_observations(probe.tap, step.calls), fetched, sites)
    worth: NDArray[np.bool_] = probe.worth(values)
    quiet = ~worth & (seen | (not seen_only))
    return frozenset(int(site) for site in np.flatnonzero(quiet))
