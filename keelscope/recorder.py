"""One model under observation: hooks on and off, and the values of the step that just ended.

`keelscope.session` decides when a row opens and closes; this module knows nothing of steps, files or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from keelscope.agenda import Agenda, Agendas
from keelscope.assembly import ClosingRow
from keelscope.axes import lay_axes, longer, usable
from keelscope.board import Fetched
from keelscope.calls import Call, ParameterCalls, StepRecord
from keelscope.changes import Tree, left, merged
from keelscope.compiled import Eager
from keelscope.containment import contained
from keelscope.coverage import Coverage, compact, coverage_table
from keelscope.distributed import Ranks, is_awaiting_sync, is_sharded, survey
from keelscope.gates import GateHooks
from keelscope.hooks import ModuleHooks
from keelscope.layout import draw_layout, trimmed
from keelscope.lossscale import LossScale
from keelscope.ownscalars import OwnScalars
from keelscope.pages import Sheet
from keelscope.parameters import ParameterHooks
from keelscope.probe import Axis, Probe, fits_site, seeks
from keelscope.quiet import leave_out_quiet
from keelscope.residuals import ResidualHooks
from keelscope.rows import RowValues, module_calls, parameter_calls
from keelscope.sightings import Sightings
from keelscope.sites import Selector, SitePlan, plan_sites, relabelled
from keelscope.sparing import Sparing
from keelscope.store.schema import RunLayout, Site
from keelscope.structure import Look
from keelscope.sublayeraxis import count_sublayers, describe, sublayer_sites
from keelscope.topology import LiveGate, LiveOutput, Topology
from keelscope.unwinding import give_up_dead

__all__ = ["Recorder"]


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
        self._draw = partial(plan_sites, model, sites, lambda module: any(seeks(probe, module) for probe in probes))
        self._tree = Tree(model)
        self.on_growth: Callable[[], None] = lambda: None
        """Called when the model has got other modules or parameters than it had."""
        self.plan = self._draw()
        self.probes = usable(probes, self.plan, self)
        self.modules = ModuleHooks(self.plan.modules, self.probes, self._record_for)
        self._keep_calls, self._optimizers = keep_calls, tuple(optimizers)
        self.parameters = self._over_parameters()
        self.look, self._paths = Look(model), dict(self.plan.everything)
        self.residuals = ResidualHooks(self._paths, self.probes)
        self.look.on_read = lambda topology, live: self.residuals.observe(topology, live, self.current.board)
        self.gates = GateHooks(self.plan, self.probes, self._record_for)
        self.look.on_gates = self._observe_gates
        self.parameters.show(self.gates.gradient_probes, self.gates.parameters)
        self.modules.on_gradient = self.look.read
        self.backward_begins: Callable[[], None] = lambda: None  # called before anything of a backward pass is recorded
        self.admits: Callable[[bool], bool] = lambda _: True
        """Asked at each forward whether it belongs to the open row; may close that row and open the next."""
        self._nowhere = StepRecord()  # of what comes between rows, which nobody reads
        self.current, self.following = StepRecord(), StepRecord()
        """Of the open row; and forwards without gradient after that was complete, which belong to the next."""
        self.ranks = Ranks()
        """What this process holds of the model, known from the first row on."""
        self.axes: dict[str, NDArray[np.intp]] = {}
        """Group -> registration indices along its site axis, known after the first row."""
        self.extents: dict[str, dict[str, int]] = {}
        """Group -> lengths of the axes that the first row decides."""
        self.last_calls: Mapping[str, list[Call]] = {}
        self.last_gradients: Mapping[str, ParameterCalls] = {}
        self._scale, self._sightings, self._eager = LossScale(), Sightings(), Eager(model)
        self._recorded, self._grown, self._is_ahead = 0, 0, False  # ahead: the row is open, its forward has not begun
        self.is_fleeting = False  # hooks are taken off again after the step that is opened next
        self._agenda: Agenda | None = None
        self._agendas, self._own = Agendas(self.probes), OwnScalars(self._optimizers)
        self._sparing = Sparing(self.modules.placements, probes, is_told=bool(optimizers) and not keep_calls)
        self._sharded = tuple(module for _, module in self.plan.everything if is_sharded(module))

    def open(self) -> None:
        """Start observing a step; the hooks may still be on from the one before."""
        self._follow()
        self._is_ahead = True
        self.current, self.following = self.following, StepRecord()
        agenda = self._agendas.at(self._recorded)
        if agenda is not self._agenda:
            self._agenda = agenda
            self.parameters.every = self.modules.duties.every = self.residuals.every = self.gates.every = agenda.every
        self.parameters.begin(self.current)
        self.parameters.choose(fleeting=self.is_fleeting and not self._eager.is_compiled and not self._sharded)
        self.modules.begin(self.current)
        self.residuals.begin()
        self.gates.begin(self.current)
        self.attach()
        self.modules.on_module = None if self.parameters.is_complete else self.parameters.attach_owner
        if not self._recorded or self.residuals.is_due:
            self.look.listen(self.plan.everything, keep=self.residuals.is_due)

    def _follow(self) -> bool:
        """Whether the model has changed; then what it consists of now is watched."""
        changed = not self._sharded and self._tree.changed(self._paths[""])
        if not changed or any(map(is_sharded, self._paths.values())):  # fully_shard, since: it swaps parameters often
            return False
        self._grow()
        return True

    @contained
    def _grow(self) -> None:
        """The model has changed: watch what it consists of now, and give what is new a place."""
        self._grown += 1
        self.look.hear_all()
        self._agenda, self._agendas = None, Agendas(self.probes)
        old, self.plan = self.plan, merged(self.plan, self._draw())
        self._paths.clear()
        self._paths |= dict(self.plan.everything)
        for site in left(old, self.plan):
            self.modules.forget(site)
        for new in self.plan.modules[len(old.modules) :]:
            self.modules.add(new, [probe for probe in self.probes if fits_site(probe, new.module, new.site.role)])
        self.parameters.detach()
        self.parameters = self._over_parameters()
        self.ranks = survey(self.plan)
        self.parameters.show(self.gates.gradient_probes, self.gates.parameters)
        if self.axes:
            self.axes = longer(self.axes, self.plan, self.probes, len(old.modules), len(old.parameters))
        self._sharded = tuple(module for _, module in self.plan.everything if is_sharded(module))
        self.on_growth()

    def _over_parameters(self) -> ParameterHooks:
        hooks = ParameterHooks(self.plan.parameters, self.probes, leaf_always=self._keep_calls)
        hooks.cover(self._optimizers)
        hooks.on_backward = self._backward_begins
        return hooks

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
        else:
            due = self._agendas.at(self._recorded + 1).has_sublayers and bool(self.residuals.probes)
            self.look.expect(self.plan.everything, due=due)
            self._sparing.choose(self.plan, self._sightings.called, self.look.fringe)

    def pause(self) -> None:
        """Take every hook off the model."""
        ends = self.look.stop, self.residuals.end, self.gates.end
        for end in (*ends, self.modules.detach, self.gates.modules.detach, self.parameters.detach, self._eager.end):
            end()

    def before_step(self, optimizer: Optimizer, *, closure: bool) -> None:
        """An optimizer is about to step; with a closure, forward and backward are still to come."""
        self.modules.hold()
        if not closure:
            if not self._recorded:  # most was looked at; it would stay while the optimizer takes room of its own
                give_up_dead()
            self.gates.snapshot()
        self._own.note(optimizer)
        self._scale.note(optimizer, changed=partial(self.parameters.rewritten, optimizer))
        self.parameters.before_step(optimizer, closure=closure)

    def still_accumulating(self) -> bool:
        """Whether the gradients of the last backward pass still wait for more, or for those of other ranks."""
        return self.parameters.still_accumulating() or is_awaiting_sync(self._sharded)

    @property
    def has_trained(self) -> bool:
        """Whether a closed row had a gradient."""
        return bool(self._sightings.parameters or self._sightings.with_gradient)

    def discard(self) -> None:
        """Begin the step anew: the gradients of its passes were cleared unused, as where a scaler skips a step."""
        self.look.stop()
        self._scale.attempts += 1
        self.open()

    def take(self) -> RowValues:
        """Values of the closing row by group and statistic, ``[site, ...]`` along `axes`."""
        self.parameters.measure_weights()
        step, self.current = self.current, self._nowhere.while_blank()
        factor = 1.0 / self._scale.take(stepped=self.parameters.has_stepped)
        self.parameters.begin(self.current)
        self.modules.close_page(self.current)
        self.modules.is_paged = not self._keep_calls
        sheet = Sheet(step, self.modules.duties.watched_by)
        self.look.finish()  # before the first row: it may complete what was read
        agenda, beside = self._agenda if factor == 1.0 else None, (self.residuals, self.look.topology)
        row = (agenda and agenda.close(step, sheet, beside)) or self._assemble(step, sheet, factor)
        if step.saw_forward and not self._keep_calls:
            self.modules.untracked = self.modules.missed or any(call.recomputed for call in step.calls)
            self.modules.missed = False
        changes = self._grown, self.parameters.hookings
        self._sightings.note_like(self.plan, step, sheet, self.parameters.hooked, changes)
        self.residuals.end()
        self._recorded += 1
        return row

    def _assemble(self, step: StepRecord, sheet: Sheet, factor: float) -> RowValues:
        """The row of any step."""
        self.gates.settle(self.look.topology)
        self.gates.measure(step.board)
        fetched = step.board.fetch()
        if not self.axes:
            if not step.has_calls and self._eager.is_late(self._paths[""]):
                late = dict.fromkeys(range(len(self.plan.modules)), "inside a model compiled after watch() began")
                self.modules.lost = late | self.modules.lost
            self.ranks = survey(self.plan)
            self.parameters.show(self.gates.gradient_probes, self.gates.parameters)
            self._lay_axes(step, fetched)
        beside = self.residuals, self.gates, self.look.topology
        observed = self._scale, self.ranks, self.plan, beside, self.axes, self.extents
        closing = ClosingRow(step, sheet, fetched, factor, *observed, is_first=not self._recorded)
        row = closing.finish(list(filter(self.parameters.every, self.probes)), self, at_once=self._keep_calls)
        if self._keep_calls:
            modules, parameters = ([w.site.path for w in s] for s in (self.plan.modules, self.plan.parameters))
            self.last_calls = module_calls(modules, step.calls, self.probes, fetched)
            self.last_gradients = parameter_calls(parameters, step.parameters, fetched)
        elif self._recorded and self.ranks.size == 1 and self._agenda is not None:
            self._agenda.learn(row)
        return row

    def _lay_axes(self, step: StepRecord, fetched: Fetched) -> None:
        """Decide the site axis of every group that has sites, and let go of the probes of others."""
        quiet = partial(leave_out_quiet, self.modules.duties, step, fetched, seen_only=self.ranks.size > 1)
        found = {axis: len(sites) for axis, sites in self._found_sites().items()}
        self.axes, self.probes = lay_axes(self.plan, self.probes, step, found, self.ranks, quiet)
        self._agenda, self._agendas = None, Agendas(self.probes)

    def _found_sites(self) -> dict[Axis, tuple[Site, ...]]:
        """The axes that are no part of the module tree."""
        return {Axis.SUBLAYER: sublayer_sites(self.look.topology, self.plan), Axis.GATE: self.gates.sites()}

    def _observe_gates(self, topology: Topology, live: Sequence[LiveGate | LiveOutput], is_all: bool) -> None:
        is_heard = any(probe.tap.axis is Axis.MODULE for probe in self.probes)  # else the modules of gates tell of rows
        self.gates.observe(topology, live, self.current.board, is_all=is_all and is_heard)
        self.parameters.show(self.gates.gradient_probes, self.gates.parameters)

    def coverage(self) -> Coverage:
        """What the recorded steps have shown of every module and parameter."""
        missing = self.modules.lost, self.modules.jacobians.refused, self.parameters.unsummed
        sheet = Sheet(self.current, self.modules.duties.watched_by)
        noted = self._sightings.with_open(self.plan, self.current, sheet, self.parameters.hooked())
        seen = noted.seen(self.plan, {probe.tap for probe in self.probes}, *missing)
        return coverage_table(self.plan, replace(seen, ran=self.look.ran))

    def release(self) -> None:
        """Let go of the model."""
        self.plan = SitePlan((), (), (), self.plan.stacks)
        self.residuals, self._sharded = ResidualHooks({}, ()), ()
        self._tree, self._paths, self._draw = Tree(nn.Identity()), {}, partial(plan_sites, nn.Identity())
        self.gates.release()
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
        shape = self.plan, self.probes, self.axes, self._found_sites()
        layout = draw_layout(model, *shape, title=title, config=config, ranks=self.ranks)
        layout = self.gates.completed(trimmed(layout, self.extents))
        stacks = count_sublayers(layout.info.stacks, self.look.topology, self.plan)
        info = replace(layout.info, stacks=stacks, sublayers=describe(self.look.topology, self.gates.gates))
        return replace(layout, info=info, coverage=compact(self.coverage()))

    def scalars(self, row: RowValues, *, at_once: bool) -> dict[str, float | None]:
        """What the watch itself logs beside a row.

        Args:
            row: the values of the step.
            at_once: whether no number may wait until the row is written.

        Returns:
            Name -> number; None of one that a group of the row will tell.
        """
        has_total = self.ranks.reduce in {"", "replica"}
        return self._own.of(row, self.probes, at_once=at_once, has_total=has_total) | self._scale.logged

    def milliseconds(self) -> float:
        """Host time spent in hooks since the last call, in milliseconds."""
        modules, parameters, gates = self.modules, self.parameters, self.gates.modules
        seconds = modules.seconds + parameters.seconds + gates.seconds
        modules.seconds = parameters.seconds = gates.seconds = 0.0
        return 1e3 * seconds

    def _backward_begins(self) -> None:
        self.modules.hold()
        self.look.read()
        self.backward_begins()
        self.gates.snapshot()

    def _record_for(self, grad_enabled: bool | None) -> StepRecord:
        was_ahead = self._is_ahead
        if grad_enabled is not None and not self.admits(grad_enabled):
            return self.following
        if grad_enabled and self._is_ahead:
            if was_ahead and self._follow():
                self.pause()
                self.open()
            self._is_ahead = False
        if grad_enabled and not self.current.has_calls and not self.parameters.is_complete:
            self.parameters.attach()  # again, for parameters unfrozen since the step began
        return self.current
