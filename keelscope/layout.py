"""The layout of a run file, drawn up when the first recorded step is complete.

Joins what `keelscope.sites` knows about the model with the order in which its modules ran.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from keelscope.probe import Probe, Tap
from keelscope.sites import SitePlan
from keelscope.store.schema import CoverageEntry, GroupSpec, RunInfo, RunLayout, Site

__all__ = ["AxisOrder", "draw_layout"]

_SCALE = "as backward produced it; divided by the loss scale when a GradScaler of the watched optimizer is in use"
_PROVENANCE: Mapping[Tap, Mapping[str, str]] = {
    Tap.OUTPUT_GRADIENT: {"scale": _SCALE, "merge": "over calls and micro-batches"},
    Tap.PARAMETER_GRADIENT: {"scale": _SCALE, "clip": "before clipping", "merge": "accumulated over the whole step"},
    Tap.PARAMETER: {"when": "before the optimizer step"},
    Tap.UPDATE: {"when": "after minus before the optimizer step"},
}


class AxisOrder:
    """Places of modules and parameters on their site axes: in the order they first ran, the others after them.

    Args:
        plan: the sites in registration order.
        ran: indices into ``plan.modules``, in the order of their first call.
    """

    def __init__(self, plan: SitePlan, ran: Sequence[int]) -> None:
        seen = list(dict.fromkeys(ran))
        self.modules: NDArray[np.intp] = _completed(seen, len(plan.modules))
        rank = {id(plan.modules[i].module): place for place, i in enumerate(seen)}
        last = len(seen)
        keys = []
        for i, watched in enumerate(plan.parameters):
            last = rank.get(id(watched.owner), last if i else len(seen))
            keys.append((last, i))
        self.parameters: NDArray[np.intp] = np.array([i for _, i in sorted(keys)], dtype=np.intp)

    def of(self, probe: Probe) -> NDArray[np.intp]:
        """Registration indices in axis order, for the axis the probe uses."""
        return self.modules if probe.tap.of_module else self.parameters


def _completed(first: list[int], length: int) -> NDArray[np.intp]:
    rest = sorted(set(range(length)) - set(first))
    return np.array([*first, *rest], dtype=np.intp)


def draw_layout(
    model: nn.Module,
    plan: SitePlan,
    probes: Sequence[Probe],
    order: AxisOrder,
    *,
    title: str | Path | None,
    config: Mapping[str, object],
) -> RunLayout:
    """Everything but the scalars and the coverage of a run's layout.

    Args:
        model: the watched model.
        plan: its sites.
        probes: what is recorded; one group each.
        order: places on the site axes.
        title: run name or path; its stem is kept, nothing of the folder.
        config: JSON values to store.

    Returns:
        The layout, with neither scalars nor coverage.
    """
    first = next((p for p in model.parameters()), None)
    info = RunInfo(
        title=Path(title).stem if title else type(model).__name__,
        run_id=str(uuid.uuid4()),
        created_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        model_class=type(model).__name__,
        n_parameters=sum(watched.site.numel for watched in plan.parameters),
        device=first.device.type if first is not None else "",
        training_library=f"torch {torch.__version__}",
        seed=_storable(torch.initial_seed()),
        stacks=plan.stacks,
        config=dict(config),
    )
    return RunLayout(info, tuple(_group(probe, _sites(plan, probe, order)) for probe in probes))


def _storable(seed: int) -> int:
    """Seeds are unsigned in torch; those beyond int64 were drawn, not chosen."""
    return seed if seed < 1 << 63 else -1


def _sites(plan: SitePlan, probe: Probe, order: AxisOrder) -> tuple[Site, ...]:
    watched = plan.modules if probe.tap.of_module else plan.parameters
    return tuple(watched[i].site for i in order.of(probe))


def _group(probe: Probe, sites: tuple[Site, ...]) -> GroupSpec:
    package = type(probe).__module__.partition(".")[0]
    return GroupSpec(
        probe.name,
        tuple(statistic.spec() for statistic in probe.statistics),
        sites,
        probe=f"{package}:{probe.name}",
        probe_version=probe.version,
        provenance=_PROVENANCE.get(probe.tap, {}),
    )


def with_coverage(layout: RunLayout, scalars: tuple[str, ...], coverage: tuple[CoverageEntry, ...]) -> RunLayout:
    """The layout with what is known once the first row is complete."""
    return RunLayout(layout.info, layout.groups, scalars, coverage)
