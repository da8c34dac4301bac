"""One model under observation: hooks on and off, and the values of the step that just ended.

`keelscope.session` decides when a row opens and closes; this module knows how to observe and nothing about steps, files
or optimizers' progress.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from keelscope import rows
from keelscope.board import Fetched
from keelscope.calls import Call, ParameterCalls, StepRecord
from keelscope.compiled import Eager
from keelscope.containment import warn_once
from keelscope.coverage import coverage_table
from keelscope.distributed import Ranks, is_awaiting_sync, is_sharded, survey
from keelscope.duties import usable_probes
from keelscope.gates import GateHooks
from keelscope.hooks import ModuleHooks
from keelscope.layout import AxisOrder, by_group, draw_layout, trimmed
from keelscope.lossscale import LossScale, any_scaler
from keelscope.pages import Blocks, Sheet, dense_block, no_blocks
from keelscope.parameters import ParameterHooks
from keelscope.probe import Axis, Probe, Tap, group_of, seeks
from keelscope.quiet import leave_out_quiet
from keelscope.residuals import ResidualHooks
from keelscope.rows import RowValues, total_norm
from keelscope.sightings import Sightings
from keelscope.sites import Selector, SitePlan, plan_sites, relabelled
from keelscope.store.schema import CoverageEntry, RunLayout, Site
from keelscope.structure import Look, count_sublayers, describe, sublayer_sites
from keelscope.topology import LiveGate, LiveGraph, LiveOutput, Topology

__all__ = ["Recorder"]

_log = logging.getLogger(__name__)


class Recorder:
    """Hooks, board and observations of one model.

    Args:
        model: the model.
        probes: what to observe.
        sites: where, see `keelscope.sites.plan_sites`.
        optimizers: those whose step shows final gradients.
        keep_calls: keep every call and backward pass of the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        probes: Sequence[Probe],
        sites: Selector | Iterable[Selector],
        optimizers: Sequence[Optimizer],
        *,
        keep_calls: bool,
    ) -> None:
        self.plan = plan_sites(model, sites, lambda module: any(seeks(probe, module) for probe in probes))
        owners = [w.module for w in self.plan.modules] + [w.owner for w in self.plan.parameters]
        self.probes = usable_probes(probes, owners, self)
        self.modules = ModuleHooks(self.plan.modules, self.probes, self._record_for)
        self.parameters = ParameterHooks(self.plan.parameters, self.probes, leaf_always=keep_calls)
        self.parameters.cover(optimizers)
        self.look = Look(model)
        self.residuals = ResidualHooks(dict(self.plan.everything), self.probes)
        self.look.on_read = self._observe_residuals
        self.gates = GateHooks(self.plan, self.probes, self._record_for)
        self.look.on_gates = self._observe_gates
        self.parameters.show(self.gates.gradient_probes, self.gates.parameters)
        self.timed = self.modules, self.parameters, self.gates.modules
        self.modules.on_gradient = self.look.read
        self.parameters.on_backward = self._backward_begins
        self.backward_begins: Callable[[], None] = _nothing
        """Called when a backward pass reaches a parameter, before anything of it is recorded."""
        self.admits: Callable[[bool], bool] = _always
        """Asked at each forward whether it belongs to the open row; may close that row and open the next."""
        self.current = StepRecord()
        self.following = StepRecord()
        """Forwards without gradient after the open row was complete: they belong to the next."""
        self.ranks = Ranks()
        """What this process holds of the model, known from the first row on."""
        self.axes: dict[str, NDArray[np.intp]] = {}
        """Group -> registration indices along its site axis, known after the first row."""
        self.extents: dict[str, dict[str, int]] = {}
        """Group -> lengths of the axes that the first row decides."""
        self.last_calls: Mapping[str, list[Call]] = {}
        self.last_gradients: Mapping[str, ParameterCalls] = {}
        self._keep_calls = keep_calls
        self._scale = LossScale()
        self._recorded, self._attempts, self._unused = 0, 0, False
        self._sightings = Sightings()
        self._leading, self._rate = next(iter(optimizers), None), torch.tensor(math.nan)
        self._eager = Eager(model)
        self._sharded = tuple(module for _, module in self.plan.everything if is_sharded(module))

    def open(self) -> None:
        """Start observing a step; the hooks may still be on from the one before."""
        self.current, self.following = self.following, StepRecord()
        self.parameters.begin(self.current)
        due = {probe.name for probe in self.probes if self._recorded % probe.every == 0}
        self.parameters.every = lambda probe: probe.name in due
        self.modules.every = self.residuals.every = self.gates.every = self.parameters.every
        self.modules.begin(self.current)
        self.residuals.begin()
        self.gates.begin(self.current)
        self.attach()
        self.modules.on_module = None if self.parameters.is_complete else self.parameters.attach_owner
        if not self._recorded or self.residuals.is_due:
            self.look.listen(self.plan.everything, keep=self.residuals.is_due)

    def attach(self) -> None:
        """Put hooks on the model; doing so twice changes nothing."""
        self._eager.begin()
        for hooks in (self.modules, self.gates.modules, self.parameters):
            hooks.attach()

    def rest(self, *, pause: bool) -> None:
        """The step is complete: what comes belongs to the next one, which may not be recorded (pause)."""
        self.modules.hold()
        if pause:
            self.pause()

    def pause(self) -> None:
        """Take every hook off the model."""
        self.look.stop()
        self.residuals.end()
        self.gates.end()
        for hooks in (self.modules, self.gates.modules, self.parameters):
            hooks.detach()
        self._eager.end()

    def before_step(self, optimizer: Optimizer, *, closure: bool) -> None:
        """An optimizer is about to step; with a closure, forward and backward are still to come."""
        self.modules.hold()
        if not closure:
            self.gates.snapshot()
        if optimizer is self._leading:  # now: schedulers change it before the row ends
            self._rate = torch.as_tensor(optimizer.param_groups[0].get("lr", math.nan), dtype=torch.float64).clone()
        self._scale.note(optimizer, changed=partial(self.parameters.rewritten, optimizer))
        self.parameters.before_step(optimizer, closure=closure)

    def still_accumulating(self) -> bool:
        """Whether the gradients of the last backward pass still wait for more, or for those of other ranks."""
        return self.parameters.still_accumulating() or is_awaiting_sync(self._sharded)

    def discard(self) -> None:
        """Begin the step anew: the gradients of its passes were cleared unused, as where a scaler skips a step."""
        self.look.stop()
        self._attempts += 1
        self.open()

    def take(self) -> RowValues:
        """Values of the closing row by group and statistic, ``[site, ...]`` along `axes`."""
        self.parameters.measure_weights()
        self._unused = not self.parameters.has_stepped
        step, self.current = self.current, StepRecord()
        self.parameters.begin(self.current)
        self.modules.close_page()
        self.modules.is_paged = not self._keep_calls
        sheet = Sheet(step, self.modules.watched_by)
        self.look.stop()  # before the first row: it may complete what was read
        self.gates.settle(self.look.topology)
        self.gates.measure(step.board)
        fetched = step.board.fetch()
        factor = 1.0 / self._scale.take()
        if not self.axes:
            if not step.has_calls and self._eager.is_late(self.plan.everything[0][1]):
                late = dict.fromkeys(range(len(self.plan.modules)), "inside a model compiled after watch() began")
                self.modules.lost = late | self.modules.lost
            self.ranks = survey(self.plan)
            self.parameters.show(self.gates.gradient_probes, self.gates.parameters)
            self.axes = self._lay_axes(step, fetched)
        due = [probe for probe in self.probes if self.parameters.every(probe)]
        row = RowValues({group_of(probe): {} for probe in due}, {})
        for probe in due:
            try:
                found, seen = self._values(probe, step, sheet, fetched, factor)
            except Exception as error:  # one probe's fault costs the others nothing
                warn_once(self, error, probe.name)
                continue
            group, axis = group_of(probe), self.axes[group_of(probe)]
            row.values[group] |= {key: values[axis] for key, values in found.items()}
            if probe.tap.axis is Axis.PARAMETER:
                row.observed[group] = seen[axis] | row.observed.get(group, False)
        if step.saw_forward and not self._keep_calls:
            self.modules.untracked = self.modules.missed or any(call.recomputed for call in step.calls)
            self.modules.missed = False
        self._sightings.note(self.plan, step, sheet, self.parameters.hooked)
        if self._keep_calls:
            self.last_calls = rows.module_calls(self.plan.module_paths, step.calls, self.probes, fetched)
            self.last_gradients = rows.parameter_calls(self.plan.parameter_paths, step.parameters, fetched)
        self.residuals.end()
        self._recorded += 1
        return row

    def _lay_axes(self, step: StepRecord, fetched: Fetched) -> dict[str, NDArray[np.intp]]:
        """The site axis of every group that has sites; probes of the others are let go of."""
        found = {axis: len(sites) for axis, sites in self._found_sites().items()}
        attending = {call.site for call in step.calls if call.attention}
        order = AxisOrder(self.plan, [call.site for call in step.calls], found, attending)
        groups = by_group(self.probes)
        axes = {group: order.of(self.plan, probes) for group, probes in groups.items()}
        several = self.ranks.size > 1
        quiet = leave_out_quiet(groups, self.modules, step, fetched, order.modules.size, seen_only=several)
        axes |= {group: axes[group][[i not in sites for i in axes[group]]] for group, sites in quiet.items()}
        empty = {
            g for g, probes in groups.items() if found.get(probes[0].tap.axis) == 0 or (g in quiet and not len(axes[g]))
        }
        for group in empty:
            _log.info("%s are not recorded: none was found in the first recorded step", group)
        self.probes = tuple(probe for probe in self.probes if group_of(probe) not in empty and self._can_record(probe))
        kept = {group_of(probe) for probe in self.probes}
        return {group: axis for group, axis in axes.items() if group in kept}

    def _can_record(self, probe: Probe) -> bool:
        """Whether anything of the probe can be recorded on this rank."""
        return any(self.ranks.records(statistic, probe.tap) for statistic in probe.statistics)

    def _found_sites(self) -> dict[Axis, tuple[Site, ...]]:
        """The axes that are no part of the module tree."""
        return {Axis.SUBLAYER: sublayer_sites(self.look.topology, self.plan), Axis.GATE: self.gates.sites()}

    def _observe_gates(self, topology: Topology, live: Sequence[LiveGate | LiveOutput]) -> None:
        self.gates.observe(topology, live, self.current.board)
        self.parameters.show(self.gates.gradient_probes, self.gates.parameters)

    def _observe_residuals(self, topology: Topology, live: LiveGraph) -> None:
        self.residuals.observe(topology, live, self.current.board)

    def coverage(self) -> tuple[CoverageEntry, ...]:
        """What the recorded steps have shown of every module and parameter."""
        taps = {probe.tap for probe in self.probes}
        lost, refused, unsummed = self.modules.lost, self.modules.jacobians.refused, self.parameters.unsummed
        sightings = self._sightings.with_open(self.plan, self.current)
        seen = sightings.seen(self.plan, taps, lost, refused, unsummed)
        return coverage_table(self.plan, seen)

    def release(self) -> None:
        """Let go of the model."""
        self.plan = SitePlan((), (), (), self.plan.stacks)
        self.residuals = ResidualHooks({}, ())
        self.gates.release()
        self._sharded = ()
        self.current, self.following = StepRecord(), StepRecord()
        self.parameters.begin(self.current)

    def layout(self, model: nn.Module, *, title: str | Path | None, config: Mapping[str, object]) -> RunLayout:
        """The layout of the run, without scalars, once the first row is complete.

        Args:
            model: the watched model.
            title: see `keelscope.layout.draw_layout`.
            config: JSON values to store.

        Returns:
            The layout.
        """
        self.plan = relabelled(self.plan, model)
        found = self._found_sites()
        layout = draw_layout(
            model, self.plan, self.probes, self.axes, found, title=title, config=config, ranks=self.ranks
        )
        layout = self.gates.completed(trimmed(layout, self.extents))
        stacks = count_sublayers(layout.info.stacks, self.look.topology, self.plan)
        info = replace(layout.info, stacks=stacks, sublayers=describe(self.look.topology, self.gates.gates))
        return replace(layout, info=info, coverage=self.coverage())

    def scalars(self, row: RowValues) -> dict[str, float]:
        """What the watch itself logs beside a row: the learning rate and, where it is known, the norm of all gradients.

        Args:
            row: the values of the step.

        Returns:
            Name -> number.
        """
        found = {} if self._leading is None else {"lr": float(self._rate)}
        found |= {} if self._scale.skipped is None else {"skipped": self._scale.skipped}
        groups = {group_of(probe) for probe in self.probes if probe.tap is Tap.PARAMETER_GRADIENT}
        gradients = [group for group in groups if "norm" in row.values.get(group, {})]
        if gradients and self.ranks.reduce in {"", "replica"}:
            found["grad_norm_total"] = total_norm(row, gradients[0])
        attempts, self._attempts = float(self._attempts), 0
        if self._scale.is_known or (attempts and any_scaler()):  # from row 0 on: late names cost a part each
            found |= {"skipped_attempts": attempts, "skipped": max(found.get("skipped", 0.0), float(self._unused))}
        return found

    def _backward_begins(self) -> None:
        self.modules.hold()
        self.look.read()
        self.backward_begins()
        self.gates.snapshot()

    def _record_for(self, grad_enabled: bool | None) -> StepRecord:
        if grad_enabled is not None and not self.admits(grad_enabled):
            return self.following
        if grad_enabled and not self.current.has_calls:
            self.parameters.attach()  # again, for parameters unfrozen since the step began
        return self.current

    def _values(
        self, probe: Probe, step: StepRecord, sheet: Sheet, fetched: Fetched, factor: float
    ) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.bool_]]:
        observations: rows.Observations
        blocks: Blocks = no_blocks
        if probe.tap.axis is Axis.SUBLAYER:
            topology = self.look.topology
            observations, sites = self.residuals.along(topology), len(topology) if topology is not None else 0
        elif probe.tap.axis is Axis.GATE:
            observations, sites = self.gates.along(probe.tap, step), len(self.gates.gates)
        elif probe.tap.of_module:
            sites = len(self.plan.modules)
            observations = rows.module_observations(probe.tap, step.calls, step.arrivals, trained=step.trained)
            blocks = sheet.block
        else:
            records, summed = step.parameters, step.summed() if probe.tap is Tap.PARAMETER_GRADIENT else ()
            observations, sites = rows.parameter_observations(probe.tap, records, summed), len(self.plan.parameters)
            blocks = dense_block(step.dense)
        lengths = self.extents.setdefault(group_of(probe), {})
        if not self._recorded:
            for dim, length in rows.probe_extents(probe, observations, fetched).items():
                lengths[dim] = max(length, lengths.get(dim, 1))
        unscaled = not probe.tap.of_gradient or (probe.tap is Tap.STEP_GRADIENT and not self._scale.in_step)
        scale = 1.0 if unscaled else factor * self.ranks.share(probe.tap)
        found, seen = rows.probe_values(
            probe, observations, fetched, sites, factor=scale, extents=lengths, blocks=blocks
        )
        self.ranks.whole(probe, found, seen, self.gates.indices)
        return found, seen


def _always(_: bool) -> bool:
    return True


def _nothing() -> None:
    """Nobody asked."""
