"""Parameters, their gradients of a whole step, and what the optimizer made of them.

No single place sees every gradient: post-accumulate hooks miss optimizers that run inside backward, leaf hooks miss
FSDP2, and ``.grad`` is gone after ``zero_grad``. So ``.grad`` is measured at the end of each backward pass, for all
parameters together, until the parameter's optimizer steps (what a GAN's discriminator gets later belongs to another
loss); what reached the leaf stands in where ``.grad`` never appears.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from keelscope import kernel
from keelscope.bulk import Bulk
from keelscope.calls import ParameterRecord, StepRecord, TermSlots
from keelscope.containment import contained
from keelscope.distributed import place
from keelscope.entries import is_unsummed
from keelscope.identities import Identities, Numbered
from keelscope.lossscale import any_scaler
from keelscope.marks import Marks, accumulates
from keelscope.owned import Owned
from keelscope.passes import make_passes
from keelscope.probe import Probe, Tap
from keelscope.sites import WatchedParameter
from keelscope.witnesses import Witnesses

__all__ = ["ParameterHooks"]

_queue = torch.autograd.Variable._execution_engine.queue_callback
_PLAIN = nn.Parameter  # asked by type: its metaclass answers isinstance() in Python
_SAMPLE = 8
"""Parameters looked at to tell whether all gradients of an optimizer were rewritten."""


@dataclass(frozen=True, slots=True)
class _Due:
    """What is looked at on steps of the same probes."""

    sums: bool
    """Whether sums of squares are all that is taken from gradients."""
    weights: bool
    used: bool
    """Whether gradients are measured as the optimizer uses them."""
    updates: bool
    shown: bool
    """Whether a probe is shown gradients, on this step or on others."""


class ParameterHooks:
    """Hooks over the parameters of one model, filling the record of the open step."""

    def __init__(self, parameters: Sequence[WatchedParameter], probes: Sequence[Probe], *, leaf_always: bool) -> None:
        self._parameters = [weakref.ref(watched.parameter) for watched in parameters]
        self._index = Numbered(watched.parameter for watched in parameters)
        self._bulk = Bulk(parameters, probes)
        self._passes = make_passes(weakref.ref(self), self._parameters)
        self._leaf_always = leaf_always
        self._handles, self._has_leaf_hooks = ExitStack(), False
        self._marks = Marks(self._passes)
        self._is_alone, self._is_fleeting = True, False
        self._hooked = bytearray(len(parameters))
        """Of each parameter whether it is hooked."""
        self._resting = bytearray()
        """Who is hooked where the marks of the recorded step before are put back."""
        self.hookings = 0
        """How often a parameter came to them."""
        self._due: _Due | None = None
        self._in_closure = False
        self._edited: tuple[tuple[int, int], bool] = (-1, -1), False
        """The state of a gradient that `_is_edited` has looked at, and the answer."""
        self.has_stepped = False
        """Whether an optimizer used a gradient on this step."""
        self._before: dict[int, Tensor] = {}
        self._covered = Identities()
        self._owned = Owned(self._index)
        self._witnesses = Witnesses(parameters, self._parameters)
        self._weighed: set[int] = set()
        self._step = StepRecord()
        self.on_backward: Callable[[], None] = lambda: None
        """Called when a backward pass reaches the first parameter."""
        self.unsummed: set[int] = set()
        """Parameters whose gradient is a sum that the ranks had not added up."""
        self.seconds = 0.0

    @property
    def every(self) -> Callable[[Probe], bool]:
        """Whether a probe records on this step."""
        return self._bulk.every

    @every.setter
    def every(self, every: Callable[[Probe], bool]) -> None:
        self._bulk.every, self._due = every, None

    def cover(self, optimizers: Iterable[Optimizer]) -> None:
        """Tell which parameters have an optimizer, whose step shows their final gradient."""
        self._covered = Identities(i for optimizer in optimizers for i in self._owned.of(optimizer))

    def show(self, probes: Sequence[Probe], indices: Iterable[int]) -> None:
        """Show probes some parameters, whatever their owner, and no others; see `keelscope.bulk.Bulk.show`."""
        self._bulk.show(probes, indices)
        self._due = None

    def attach(self) -> None:
        """Hook every trainable parameter, or witnesses of passes; doing so twice changes nothing."""
        if self._resting and 1 not in self._hooked and self._marks.put_back(alone=self._is_alone):
            self._hooked = self._resting
        if self.is_complete:
            return
        early = self._is_fleeting and self._is_alone and self._marks.may_be_early()
        for i in range(len(self._parameters)) if self._now.shown else self._witnesses.chosen():
            parameter = self._parameters[i]()
            if parameter is not None and not self._hooked[i]:
                self._hook(parameter, i, early=early)

    @property
    def is_complete(self) -> bool:
        """Whether no parameter is left that `attach_owner` could hook."""
        are_few = self._witnesses.are_enough and not self._now.shown
        return 0 not in self._hooked or (are_few and 1 in self._hooked)

    def hooked(self) -> Iterable[int]:
        """Identity of those that are hooked."""
        present = (reference() for reference, there in zip(self._parameters, self._hooked, strict=True) if there)
        return (id(parameter) for parameter in present if parameter is not None)

    def attach_owner(self, module: nn.Module) -> None:
        """Hook parameters of a module that were unfrozen or materialised since `attach`."""
        for parameter in module._parameters.values():
            i = -1 if parameter is None else self._index.number(id(parameter))
            if parameter is not None and i >= 0 and not self._hooked[i]:
                self._hook(parameter, i)

    def detach(self) -> None:
        """Give every handle back."""
        if 1 in self._hooked:
            self._marks.take_off(rest=not self._has_leaf_hooks)
            self._resting = bytearray() if self._has_leaf_hooks else self._hooked
            self._hooked = bytearray(len(self._parameters))
        self._handles.close()
        self._has_leaf_hooks = False
        self._before.clear()

    def begin(self, step: StepRecord) -> None:
        """Start a step; what follows goes to its record."""
        self._step = step
        self._passes.begin()
        self.has_stepped = False
        self._weighed.clear()
        self._owned.begin()

    def choose(self, *, fleeting: bool) -> None:
        """Whether to sum gradients when they arrive, and how to hook parameters: other ranks change gradients later.

        Args:
            fleeting: whether hooks are taken off again after the step.
        """
        self._is_alone, self._is_fleeting = place()[1] == 1, fleeting
        self._passes.summing = int(self._now.sums and self._is_alone)

    @property
    def _now(self) -> _Due:
        """What is due, looked up when that changes."""
        if self._due is None:
            sums = not self._leaf_always and self._bulk.is_of_squares(Tap.PARAMETER_GRADIENT)
            after = (self._bulk.has(tap) for tap in (Tap.STEP_GRADIENT, Tap.UPDATE, Tap.PARAMETER_GRADIENT))
            self._due = _Due(sums, self._bulk.is_due(Tap.PARAMETER), *after)
        return self._due

    @contained
    def before_step(self, optimizer: Optimizer, *, closure: bool = False) -> None:
        """Fix the gradient of the optimizer's parameters: what arrives later belongs to another loss.

        Args:
            optimizer: about to step.
            closure: whether the step itself runs forward and backward; gradients seen now are those of the step before.
        """
        start = time.perf_counter()
        self._in_closure = closure
        owned, due = self._owned.of(optimizer), self._now
        if due.weights:
            self._weigh(owned)
        if not closure:
            self._keep_gradients(*self._stepping(owned))
            if due.used:
                self._measure_used(owned)
        if due.updates:
            self._before |= {i: p.detach().clone() for i in owned if (p := self._parameters[i]()) is not None}
        self.seconds += time.perf_counter() - start

    @contained
    def after_step(self, optimizer: Optimizer) -> None:
        """Measure what the optimizer added."""
        if not self._in_closure and not self._before:
            return
        start = time.perf_counter()
        owned = self._owned.of(optimizer)
        self._stepping(owned)
        for i in owned:
            before, parameter = self._before.pop(i, None), self._parameters[i]()
            if before is not None and parameter is not None:
                update = (parameter.detach() - before, before)
                record = self._record(i)
                record.update = (record.update or {}) | self._bulk.observe(i, Tap.UPDATE, update, self._step)
        self.seconds += time.perf_counter() - start

    def rewritten(self, optimizer: Optimizer) -> bool:
        """Whether gradients of the optimizer changed since the last backward pass: unscaled or clipped."""
        owned = self._owned.of(optimizer)
        if len(owned) == len(self._parameters) and self._passes.untouched():
            return False  # unscaling changes all gradients of an optimizer
        return self._passes.rewritten(list(islice((i for i in owned if self._hooked[i]), _SAMPLE)))

    def still_accumulating(self) -> bool:
        """Whether gradients of the last backward pass are there still, so that the next forward belongs to the step."""
        return self._passes.untouched() or self._is_edited()

    def _is_edited(self) -> bool:
        """Whether waiting gradients were changed, as by clipping micro-batches, and not cleared."""
        is_noticed = self._passes.first >= 0 or self._now.shown
        i = self._passes.first if is_noticed else self._witnesses.unnoticed()
        parameter = self._parameters[i]() if i in self._covered else None
        gradient = None if parameter is None else parameter.grad
        if gradient is None or type(gradient) is not Tensor or gradient.layout is not torch.strided:
            return False
        now = id(gradient), gradient._version
        if now != self._edited[0]:  # asked at every module of a forward
            may_be_skipped = is_noticed and any_scaler()  # an attempt, by a scaler
            self._edited = now, bool(gradient.any()) and not may_be_skipped
        return self._edited[1]

    def measure_weights(self) -> None:
        """Measure parameters no backward pass has reached, at the end of a step."""
        self._weigh(range(len(self._parameters)))

    def _stepping(self, owned: list[int]) -> tuple[list[int], list[Tensor]]:
        """An optimizer uses the gradients that there are."""
        looks = self._now.shown
        indices, gradients, has_any = self._passes.stepping(owned if looks else owned[:_SAMPLE])
        self.has_stepped |= has_any or (not looks and self._passes.stepping(owned)[2])
        self._witnesses.are_enough &= self._passes.first >= 0 or not self.has_stepped
        return indices, gradients

    def _hook(self, parameter: nn.Parameter, i: int, *, early: bool = False) -> None:
        """Hook a parameter, where torch lets it."""
        trainable = parameter.requires_grad and not isinstance(parameter, UninitializedParameter)
        if not trainable or not parameter.is_leaf:
            return
        self._hooked[i] = 1
        self.hookings += 1
        on_leaf = self._leaf_always or i not in self._covered
        self._marks.put(parameter, i, early=early and not on_leaf)
        if on_leaf:
            handle = parameter.register_hook(partial(_on_leaf, weakref.ref(self), i))  # type: ignore[no-untyped-call]
            self._handles.callback(handle.remove)
            self._has_leaf_hooks = True

    @contained
    def _on_leaf(self, i: int, gradient: Tensor) -> None:
        self._passes.note(i)
        slots = self._bulk.observe(i, Tap.PARAMETER_GRADIENT, (gradient,), self._step)
        if slots:
            record = self._record(i)
            record.leaf = [*record.leaf, slots]

    @contained
    def _backward_begins(self) -> None:
        """A backward pass has reached the first parameter."""
        self.on_backward()
        # twice: after what is queued already, where data-parallel wrappers put averaged gradients in place
        _queue(partial(_queue, self._end_backward))

    def _accumulates(self, i: int) -> bool:
        """Whether the running backward pass, which has reached a parameter, adds to gradients."""
        parameter = self._parameters[i]()
        return parameter is not None and accumulates(parameter)

    @contained
    def _end_backward(self) -> None:
        """Once per backward pass: the running gradient of every parameter it reached."""
        start = time.perf_counter()
        reached, summed, sums, indices, gradients = self._passes.take()
        if self._now.weights:
            self._weigh([i for i, is_reached in enumerate(reached) if is_reached])
        if summed:
            self._bulk.put_squares(Tap.PARAMETER_GRADIENT, summed, sums, self._step)
            for i, record in self._step.parameters.items():
                record.accumulated = None if summed[i] else record.accumulated
        self._keep_gradients(indices, gradients)
        self.seconds += time.perf_counter() - start + self._passes.seconds
        self._passes.seconds = 0.0

    def _keep_gradients(self, indices: list[int], gradients: list[Tensor]) -> None:
        """Measure running gradients, all together, in place of those of an earlier pass."""
        if not indices or not self._now.shown:
            return
        if not set(map(type, gradients)) <= {Tensor}:
            self.unsummed.update(i for i, gradient in zip(indices, gradients, strict=True) if is_unsummed(gradient))
        self._replace(indices, self._bulk.measure(Tap.PARAMETER_GRADIENT, indices, gradients, self._step))

    def _replace(self, indices: list[int], found: dict[int, TermSlots]) -> None:
        """What was found of these, beside what the kernel wrote, takes the place of what an earlier pass left."""
        for i in {*found, *self._step.parameters} & set(indices) if found or self._step.parameters else ():
            self._record(i).accumulated = found.get(i)

    def _measure_used(self, owned: list[int]) -> None:
        found = [(i, p.grad) for i in owned if (p := self._parameters[i]()) is not None and p.grad is not None]
        indices, gradients = [i for i, _ in found], [gradient for _, gradient in found]
        for i, slots in self._bulk.measure(Tap.STEP_GRADIENT, indices, gradients, self._step).items():
            self._record(i).used = slots

    def _weigh(self, indices: Iterable[int]) -> None:
        """Measure parameters not yet measured on this step."""
        if not self._now.weights:
            return
        fresh = [(i, p) for i in indices if i not in self._weighed and (p := self._parameters[i]()) is not None]
        ready = [(i, p) for i, p in fresh if type(p) is _PLAIN or not isinstance(p, UninitializedParameter)]
        self._weighed.update(i for i, _ in ready)
        as_is = _PLAIN if kernel.is_compiled() else None  # thousands of views would scatter over memory
        tensors = [p if type(p) is as_is else p.detach() for _, p in ready]
        found = self._bulk.measure(Tap.PARAMETER, [i for i, _ in ready], tensors, self._step)
        for i, slots in found.items():
            self._record(i).weight = slots

    def _record(self, i: int) -> ParameterRecord:
        record = self._step.parameters.get(i)
        if record is None:
            record = self._step.parameters[i] = ParameterRecord()
        return record


def _on_leaf(owner: weakref.ref[ParameterHooks], i: int, gradient: Tensor) -> None:
    hooks = owner()
    if hooks is not None:
        hooks._on_leaf(i, gradient)
