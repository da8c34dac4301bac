"""Parameters, their gradients of a whole step, and what the optimizer made of them.

No single place sees every gradient: post-accumulate hooks miss optimizers that run inside backward, leaf hooks miss
FSDP2, and ``.grad`` is gone after ``zero_grad``. So ``.grad`` is measured at the end of each backward pass, for all
parameters together, until the parameter's optimizer steps (what a GAN's discriminator gets later belongs to another
loss); what reached the leaf stands in where ``.grad`` never appears.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from keelscope.board import Slot
from keelscope.calls import ParameterRecord, StepRecord, TermSlots, terms_of
from keelscope.containment import contained, warn_once
from keelscope.entries import is_unsummed, on_this_rank
from keelscope.probe import Axis, Probe, Tap, sees_everything
from keelscope.sites import WatchedParameter
from keelscope.statistics import Terms

__all__ = ["ParameterHooks"]


class ParameterHooks:
    """Hooks over the parameters of one model, filling the record of the open step."""

    def __init__(self, parameters: Sequence[WatchedParameter], probes: Sequence[Probe], *, leaf_always: bool) -> None:
        self._parameters = [weakref.ref(watched.parameter) for watched in parameters]
        self._owners = [weakref.ref(watched.owner) for watched in parameters]
        self._index = {id(watched.parameter): i for i, watched in enumerate(parameters)}
        self._probes = [
            tuple(p for p in probes if p.tap.axis is Axis.PARAMETER and p.fits(w.owner)) for w in parameters
        ]
        self._note_probes()
        self._by_tap = {tap: [probe for probe in probes if probe.tap is tap] for tap in Tap}
        self._leaf_always = leaf_always
        self._handles = ExitStack()
        self.hooked: set[int] = set()
        self._reached: set[int] = set()
        self._task, self._in_closure = -1, False
        self._before: dict[int, Tensor] = {}
        self._covered: set[int] = set()
        self._states: dict[int, tuple[int, int]] = {}
        self._step = StepRecord()
        self.every: Callable[[Probe], bool] = _always
        """Whether a probe records on this step."""
        self.on_backward: Callable[[], None] = _ignore
        """Called when a backward pass reaches the first parameter."""
        self.unsummed: set[int] = set()
        """Parameters whose gradient is a sum that the ranks had not added up."""
        self.seconds = 0.0

    def cover(self, optimizers: Iterable[Optimizer]) -> None:
        """Tell which parameters have an optimizer, whose step shows their final gradient."""
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        self._covered = {self._index[id(p)] for group in groups for p in group["params"] if id(p) in self._index}

    def show(self, probes: Sequence[Probe], indices: Iterable[int]) -> None:
        """Show probes some parameters, whatever their owner, and no others.

        Args:
            probes: of parameters; those of an earlier call with the same names are replaced.
            indices: the parameters.
        """
        names, wanted = {probe.name for probe in probes}, set(indices)
        for i, found in enumerate(self._probes):
            others = tuple(probe for probe in found if probe.name not in names)
            self._probes[i] = (*others, *(probes if i in wanted else ()))
        for tap, several in self._by_tap.items():
            self._by_tap[tap] = [p for p in several if p.name not in names] + [p for p in probes if p.tap is tap]
        self._note_probes()

    def _note_probes(self) -> None:
        """Note which taps somebody looks at, and which probes look at every parameter."""
        self._taps = {probe.tap for found in self._probes for probe in found}
        counts = Counter(id(probe) for found in self._probes for probe in found)
        self._everywhere = {probe for probe, count in counts.items() if count == len(self._probes)}

    def attach(self) -> None:
        """Hook every trainable parameter; doing so twice changes nothing."""
        if Tap.PARAMETER_GRADIENT not in self._taps:
            return
        for reference in self._parameters:
            parameter = reference()
            if parameter is not None and id(parameter) not in self.hooked:
                self._hook(parameter)

    @property
    def is_complete(self) -> bool:
        """Whether no parameter is left that `attach_owner` could hook."""
        return len(self.hooked) == len(self._parameters)

    def attach_owner(self, module: nn.Module) -> None:
        """Hook parameters of a module that were unfrozen or materialised since `attach`."""
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in self.hooked and id(parameter) in self._index:
                self._hook(parameter)

    def detach(self) -> None:
        """Give every handle back."""
        self._handles.close()
        self.hooked.clear()
        self._before.clear()

    def begin(self, step: StepRecord) -> None:
        """Start a step; what follows goes to its record."""
        self._step = step
        self._states.clear()

    @contained
    def before_step(self, optimizer: Optimizer, *, closure: bool = False) -> None:
        """Fix the gradient of the optimizer's parameters: what arrives later belongs to another loss.

        Args:
            optimizer: about to step.
            closure: whether the step itself runs forward and backward; gradients seen now are those of the step before.
        """
        start = time.perf_counter()
        self._in_closure = closure
        owned = list(self._of(optimizer))
        self._weigh(i for i, _ in owned)
        records, unseen = self._step.parameters, []
        for i, parameter in owned if not closure else ():
            gradient = parameter.grad
            if gradient is not None:
                record = records.get(i) or self._record(i)
                if not record.stepped and not record.accumulated:
                    unseen.append((i, gradient))
                record.stepped = True
        self._keep_gradients(unseen)
        if Tap.STEP_GRADIENT in self._taps and not closure:
            self._measure_used([(i, p.grad) for i, p in owned if p.grad is not None])
        if Tap.UPDATE in self._taps:
            self._before |= {i: parameter.detach().clone() for i, parameter in owned}
        self.seconds += time.perf_counter() - start

    @contained
    def after_step(self, optimizer: Optimizer) -> None:
        """Measure what the optimizer added."""
        if not self._in_closure and not self._before:
            return
        start = time.perf_counter()
        for i, parameter in self._of(optimizer):
            self._record(i).stepped |= parameter.grad is not None
            before = self._before.pop(i, None)
            if before is not None:
                update = (parameter.detach() - before, before)
                record = self._record(i)
                record.update = (record.update or {}) | self._observe(i, Tap.UPDATE, update)
        self.seconds += time.perf_counter() - start

    def rewritten(self, optimizer: Optimizer) -> bool:
        """Whether gradients of the optimizer changed since the last backward pass: unscaled or clipped."""
        for i, parameter in self._of(optimizer):
            state = self._states.get(i)
            if state is not None and state != _state(parameter):
                return True
        return False

    def still_accumulating(self) -> bool:
        """Whether gradients of the last backward pass are untouched, so that the next forward belongs to the step."""
        for i, state in self._states.items():
            parameter = self._parameters[i]()
            if parameter is not None and parameter.grad is not None:
                return state == _state(parameter)
            return False
        return False

    def measure_weights(self) -> None:
        """Measure parameters no backward pass has reached, at the end of a step."""
        self._weigh(range(len(self._parameters)))

    def _hook(self, parameter: nn.Parameter) -> None:
        trainable = parameter.requires_grad and not isinstance(parameter, UninitializedParameter)
        if not trainable or not parameter.is_leaf or id(parameter) in self.hooked:
            return
        self.hooked.add(id(parameter))
        i = self._index[id(parameter)]
        reference = weakref.ref(self)
        handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            partial(_on_accumulated, reference, i)
        )
        self._handles.callback(handle.remove)
        if self._leaf_always or i not in self._covered:
            handle = parameter.register_hook(partial(_on_leaf, reference, i))  # type: ignore[no-untyped-call]
            self._handles.callback(handle.remove)

    @contained
    def _on_leaf(self, i: int, gradient: Tensor) -> None:
        self._expect_end(i)
        slots = self._observe(i, Tap.PARAMETER_GRADIENT, (gradient,))
        if slots:
            record = self._record(i)
            record.leaf = [*record.leaf, slots]

    def _expect_end(self, i: int) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:  # a new backward pass, also after one that raised half-way
            self._task = task
            self.on_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._last_gradient)
        self._reached.add(i)

    def _last_gradient(self) -> None:
        """Wait for what is queued already: data-parallel wrappers put averaged gradients in place there."""
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    @contained
    def _end_backward(self) -> None:
        """Once per backward pass: the running gradient of every parameter it reached."""
        start = time.perf_counter()
        reached, self._reached = sorted(self._reached), set()
        self._weigh(reached)
        records, running = self._step.parameters, []
        for i in reached:
            parameter = self._parameters[i]()
            if parameter is None:
                continue
            gradient = parameter.grad
            if gradient is not None and not (i in records and records[i].stepped):
                running.append((i, gradient))
                self._states[i] = id(gradient), gradient._version + parameter._version
        self._keep_gradients(running)
        self.seconds += time.perf_counter() - start

    def _keep_gradients(self, gradients: list[tuple[int, Tensor]]) -> None:
        """Measure running gradients, all together."""
        self.unsummed |= {i for i, gradient in gradients if type(gradient) is not Tensor and is_unsummed(gradient)}
        records = self._step.parameters
        for (i, _), slots in zip(gradients, self._observe_many(Tap.PARAMETER_GRADIENT, gradients), strict=True):
            if i in records:
                records[i].accumulated = slots
            else:
                records[i] = ParameterRecord(accumulated=slots)

    def _measure_used(self, gradients: list[tuple[int, Tensor]]) -> None:
        for (i, _), slots in zip(gradients, self._observe_many(Tap.STEP_GRADIENT, gradients), strict=True):
            self._record(i).used = slots

    def _weigh(self, indices: Iterable[int]) -> None:
        """Measure parameters not yet measured on this step."""
        if not any(self.every(probe) for probe in self._by_tap[Tap.PARAMETER]):
            return
        fresh = [(i, p) for i in indices if (p := self._parameters[i]()) is not None and not self._record(i).weight]
        ready = [(i, p.detach()) for i, p in fresh if not isinstance(p, UninitializedParameter)]
        for (i, _), slots in zip(ready, self._observe_many(Tap.PARAMETER, ready), strict=True):
            self._record(i).weight = slots

    def _observe_many(self, tap: Tap, tensors: Sequence[tuple[int, Tensor]]) -> list[TermSlots]:
        """Slots of each tensor, computed together for each probe and terms."""
        found: list[TermSlots] = [{} for _ in tensors]
        here, slots = tensors, found
        if any(type(tensor) is not Tensor for _, tensor in tensors):  # distributed: none of them, or nearly all
            own = [(k, i, view[0]) for k, (i, t) in enumerate(tensors) if (view := on_this_rank((t,)))]
            here, slots = [(i, tensor) for _, i, tensor in own], [found[k] for k, _, _ in own]
        for probe in self._by_tap[tap]:
            if self.every(probe):
                try:
                    self._observe_all(probe, here, slots)
                except Exception as error:  # one probe's fault costs the others nothing
                    warn_once(self, error, probe.name)
        return found

    def _observe_all(self, probe: Probe, tensors: Sequence[tuple[int, Tensor]], found: list[TermSlots]) -> None:
        views = self._views(probe, tensors)
        for terms in terms_of(probe) if views else ():
            key = (probe.name, terms)
            slots = self._put_all(terms, [view for _, view in views])
            for (k, _), slot in zip(views, slots, strict=True):
                found[k][key] = slot

    def _views(self, probe: Probe, tensors: Sequence[tuple[int, Tensor]]) -> list[tuple[int, tuple[Tensor, ...]]]:
        """What a probe measures of each tensor, with its place; those that it does not look at are left out."""
        if sees_everything(probe) and id(probe) in self._everywhere:
            return [(k, (tensor,)) for k, (_, tensor) in enumerate(tensors)]
        return [(k, view) for k, (i, tensor) in enumerate(tensors) if (view := self._view(probe, i, tensor))]

    def _put_all(self, terms: Terms, views: list[tuple[Tensor, ...]]) -> list[Slot]:
        if all(len(view) == 1 for view in views):
            return self._step.board.put_many(terms, [view[0] for view in views])
        return [self._step.board.put(terms, view) for view in views]

    def _view(self, probe: Probe, i: int, tensor: Tensor) -> tuple[Tensor, ...] | None:
        owner = self._owners[i]()
        return probe.view((tensor.detach(),), owner) if owner is not None and probe in self._probes[i] else None

    def _observe(self, i: int, tap: Tap, tensors: tuple[Tensor, ...]) -> TermSlots:
        owner = self._owners[i]()
        slots: TermSlots = {}
        own = on_this_rank(tuple(tensor.detach() for tensor in tensors))
        for probe in self._probes[i] if own is not None else ():
            if owner is not None and probe.tap is tap and self.every(probe):
                try:
                    view = probe.view(own or (), owner)
                    if view is not None:
                        board = self._step.board
                        slots |= {(probe.name, terms): board.put(terms, view) for terms in terms_of(probe)}
                except Exception as error:
                    warn_once(self, error, probe.name)
        return slots

    def _record(self, i: int) -> ParameterRecord:
        record = self._step.parameters.get(i)
        if record is None:
            record = self._step.parameters[i] = ParameterRecord()
        return record

    def _of(self, optimizer: Optimizer) -> Iterable[tuple[int, nn.Parameter]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                i = self._index.get(id(parameter))
                if i is not None:
                    yield i, parameter


def _on_leaf(owner: weakref.ref[ParameterHooks], i: int, gradient: Tensor) -> None:
    hooks = owner()
    if hooks is not None:
        hooks._on_leaf(i, gradient)


def _on_accumulated(owner: weakref.ref[ParameterHooks], i: int, _: Tensor) -> None:
    hooks = owner()
    if hooks is not None:
        hooks._expect_end(i)


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    """Changes when the gradient or the parameter is replaced or written in place."""
    gradient = parameter.grad
    return id(gradient), (-1 if gradient is None else gradient._version) + parameter._version


def _always(_: Probe) -> bool:
    return True


def _ignore() -> None:
    """Nobody asked."""
