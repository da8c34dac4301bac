"""Where the observations of a probe on one step lie: those of modules, parameters, residual sub-layers or gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keelscope.pages import Blocks, Sheet, dense_block, no_blocks
from keelscope.probe import Axis, Probe, Tap
from keelscope.rows import Observations, module_observations, parameter_observations

if TYPE_CHECKING:
    from keelscope.calls import StepRecord
    from keelscope.gates import GateHooks
    from keelscope.residuals import ResidualHooks
    from keelscope.sites import SitePlan
    from keelscope.topology import Topology

__all__ = ["observed"]


def observed(
    probe: Probe,
    step: StepRecord,
    sheet: Sheet,
    plan: SitePlan,
    beside: tuple[ResidualHooks, GateHooks, Topology | None],
) -> tuple[Observations, int, Blocks]:
    """What was observed for a probe.

    Args:
        probe: the probe.
        step: the record of the step.
        sheet: what the kernel saw of its calls.
        plan: modules and parameters.
        beside: what observes the rest of the axes, and the residual structure.

    Returns:
        Observations, number of sites, and what the kernel saw.
    """
    residuals, gates, topology = beside
    if probe.tap.axis is Axis.SUBLAYER:
        sites = len(topology) if topology is not None else 0
        return residuals.along(topology), sites, residuals.blocks(topology)
    if probe.tap.axis is Axis.GATE:
        return gates.along(probe.tap, step), len(gates.gates), no_blocks
    if probe.tap.of_module:
        of_input = probe.tap in {Tap.INPUT, Tap.INPUT_AND_GRADIENT}
        calls = [*step.beside.values(), *step.calls] if of_input else step.calls
        found = module_observations(probe.tap, calls, step.arrivals, trained=step.trained)
        return found, len(plan.modules), sheet.block
    summed = step.summed() if probe.tap is Tap.PARAMETER_GRADIENT else ()
    return parameter_observations(probe.tap, step.parameters, summed), len(plan.parameters), dense_block(step.dense)
