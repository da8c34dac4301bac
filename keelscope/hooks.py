"""Tensor hooks placed from forward hooks: what modules put out, and the gradients that come back.

Module *backward* hooks are never used: they miss structured outputs and break in-place operations. Forward hooks sit on
the modules during recorded steps only, and turn into hooks that do nothing in copies and pickles of the model. Forward
recomputation inside a backward pass (activation checkpointing) is recognised and not counted twice.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, jit, nn

from keelscope.attention import AttentionMode, CloseHook, OpenModule
from keelscope.batch import Batch
from keelscope.board import Board
from keelscope.callbacks import ForwardHook, GradientHook, InputHook, Owner
from keelscope.calls import CallRecord, StepRecord, TermSlots
from keelscope.compiled import is_tracing
from keelscope.containment import contained
from keelscope.duties import Duties, measure, measure_jacobian
from keelscope.jacobian.passage import JacobianCalls
from keelscope.leaves import (
    HAS_HOOK_DICTS,
    Arguments,
    Handles,
    KeptInput,
    floating_inputs,
    floating_leaves,
    hook_gradient,
    hookable,
    removed_with,
)
from keelscope.placements import Placements
from keelscope.probe import Probe, Tap, fits_site
from keelscope.recomputation import in_backward, repeated_call
from keelscope.sites import SOUGHT, WatchedModule
from keelscope.slowpages import AnyPage, make_page

__all__ = ["ModuleHooks"]


class ModuleHooks:
    """Forward hooks over chosen modules, filling the record of the step a call belongs to.

    The owner says with `record_for` which step that is, from whether gradients are enabled (None: a recomputation).
    """

    def __init__(
        self,
        modules: Sequence[WatchedModule],
        probes: Sequence[Probe],
        record_for: Callable[[bool | None], StepRecord],
    ) -> None:
        self._modules = [weakref.ref(watched.module) for watched in modules]
        self.duties = Duties(tuple(p for p in probes if fits_site(p, w.module, w.site.role)) for w in modules)
        self._sought = frozenset(site for site, w in enumerate(modules) if w.site.role == SOUGHT)
        self._reference: weakref.ref[Owner] = weakref.ref(self)
        self._record_for = record_for
        self._handles, self._before = ExitStack(), ExitStack()
        self.placements = Placements()
        self.awaited: tuple[int, ...] = ()
        """Sites with a hook before the module."""
        self._on_leaves = Handles()
        self._inputs: dict[int, list[TermSlots]] = {}
        self.jacobians = JacobianCalls()
        self._attention = AttentionMode(self._show_attention)
        self._batch = Batch()
        self.attached = False
        self.page: AnyPage | None = None
        """What the kernel takes of this step."""
        self.is_paged = False
        """Whether the kernel may take calls from the next step on."""
        self._step = StepRecord()
        self.on_module: Callable[[nn.Module], None] | None = None
        """Called with every watched module that has run."""
        self.on_gradient: Callable[[], None] = lambda: None
        """Called with the first gradient of a step."""
        self.untracked = True
        """Whether forwards without gradient are recorded: those of checkpointed regions, none of validation."""
        self.missed = False
        """Whether a region repeated a call that was not recorded."""
        self.seconds = 0.0
        self.lost: dict[int, str] = {}
        """Sites with a call that could not be observed, and why."""

    def begin(self, step: StepRecord) -> None:
        """Start a step: hooks on tensors that outlive the one before are given back.

        Args:
            step: its record.
        """
        self.close_page(step)
        if self.is_paged and HAS_HOOK_DICTS:
            codes, breaks = self.duties.codes(), step.board.breaks
            self.page = step.page = make_page(self._modules, self._reference, breaks, codes, self._batch)
        self._on_leaves.close()
        self._inputs.clear()
        self.jacobians.begin()
        self._attention.reset()

    def close_page(self, following: StepRecord) -> None:
        """Let the kernel take nothing more of the step, and let go of its record for one that follows."""
        page, self.page, self._step = self.page, None, following
        if page is not None:
            page.armed = page.open = 0
            self.seconds += page.seconds

    def hold(self) -> None:
        """The forward of the step is over: what comes now is looked at in Python first."""
        if self.page is not None:
            self.page.armed = 0

    def add(self, watched: WatchedModule, probes: Sequence[Probe]) -> None:
        """Watch one more module, which becomes the next site.

        Args:
            watched: the module.
            probes: what looks at it.
        """
        self._modules.append(weakref.ref(watched.module))
        self.duties.add(probes)
        if self.attached:
            self._attach_to(len(self._modules) - 1, watched.module, self._handles)
            self._attach_before()

    def forget(self, site: int) -> None:
        """Watch no module at this site any more."""
        self.placements.forget(site)
        self._modules[site] = weakref.ref(nn.Identity())  # of an object that is gone

    def attach(self) -> None:
        """Install the hooks; doing so twice changes nothing."""
        if not self.attached:
            self.attached = True
            back = self.placements.put_back()
            for site, reference in enumerate(self._modules) if len(back) < len(self._modules) else ():
                module = reference() if site not in back and site not in self._sought else None
                if module is not None:
                    self._attach_to(site, module, self._handles)
        self._attach_before()

    def _attach_before(self) -> None:
        """Hooks before modules, where a probe is due that looks at what goes in; most look at every tenth step."""
        wanted = self.duties.awaited()
        if wanted == self.awaited:
            return
        self._before.close()
        self.awaited, handles = wanted, removed_with(self._before)
        for site in wanted:
            module = self._modules[site]()
            if module is not None and not isinstance(module, jit.ScriptModule):
                if site in self._sought:
                    self._attach_to(site, module, self._before)
                handle = module.register_forward_pre_hook(InputHook(self, site), with_kwargs=True)
                handles.append(handle)

    def _attach_to(self, site: int, module: nn.Module, handles: ExitStack) -> None:
        taps = {probe.tap for probe in self.duties.probes(site)}
        try:
            if Tap.ATTENTION in taps:  # before the hook below, which takes what it found
                handle = module.register_forward_hook(CloseHook(self._attention, site), always_call=True)
                handles.callback(handle.remove)
            alone = site not in self._sought and Tap.ATTENTION not in taps
            self.placements.put(site, module, ForwardHook(self, site), alone=alone)
            if site in self._sought:
                handles.callback(self.placements.take, site)
        except (RuntimeError, AttributeError) as error:
            self.lost[site] = f"of a kind that takes no hooks ({error})"

    def detach(self) -> None:
        """Give every handle back."""
        if self.attached and self._modules:
            self.placements.take_all()
        self._handles.close()
        self._before.close()
        self.awaited = ()
        self._on_leaves.close()
        self.jacobians.begin()
        self._attention.reset()
        self.attached = False
        if self.page is not None:
            self.page.armed = self.page.open = 0

    @contained
    def _after_forward(self, site: int, module: nn.Module, inputs: Arguments, output: object) -> None:
        start = time.perf_counter()
        repeated = in_backward()
        if self._modules[site]() is module and self._looks(repeated=repeated):
            self._record(site, module, inputs, output, repeated=repeated)
            if self.on_module is not None:  # after it: the call may close the row before, with what trained then
                self.on_module(module)
        self.seconds += time.perf_counter() - start

    def _record(self, site: int, module: nn.Module, inputs: Arguments, output: object, *, repeated: bool) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.lost[site] = "called inside a functorch transform (vmap, grad, jvp), where values are not concrete"
            return
        enabled = torch.is_grad_enabled()
        step = self._record_for(None if repeated else enabled)
        if step.page is not None:
            arms = enabled and not repeated and self._arms(step.page)
            if arms and step.page.look(site, module, *inputs, output):
                step.trained = True
                self._after_taken(site, module, inputs, output)
                return
            step.page.leave(site)
        leaves = floating_leaves(output)
        call = self._repeated_call(site, step) if repeated else self._new_call(site, leaves, step, enabled)
        if call is None:
            return
        duty = self.duties[site]
        if leaves and not call.recomputed:
            call.outputs = measure(duty.outputs, (leaves[0][1],), module, step.board, self)
        if duty.needs_gradient:
            self._hook_gradients(call, leaves, inputs, module, step.board)

    def _arms(self, page: AnyPage) -> bool:
        """Whether the kernel may take the rest of this forward."""
        if page.armed or page.reached or page is not self.page:
            return False
        page.armed = 1
        return True

    def _repeated_call(self, site: int, step: StepRecord) -> CallRecord | None:
        """The record of the call that a recomputation repeats, whose gradient was not tracked."""
        calls = step.calls_of(site)
        self.missed |= all(call.recomputed for call in calls)
        return repeated_call(calls)

    def _new_call(
        self, site: int, leaves: list[tuple[str, Tensor]], step: StepRecord, grad_enabled: bool
    ) -> CallRecord:
        tracked = grad_enabled and any([tensor.requires_grad for _, tensor in leaves])  # noqa: C419 - faster
        dtype = leaves[0][1].dtype if leaves else None
        call = CallRecord(site, grad_enabled, tracked, step.is_taken(site), dtype, inputs=self._input_of(site))
        if self._attention.found:
            call.attention = self._attention.found.pop(site, [])
        step.add(call)
        return call

    def _input_of(self, site: int) -> TermSlots:
        return (self._inputs.get(site) or [{}]).pop()  # several where a module calls itself

    @contained
    def _after_taken(self, site: int, module: nn.Module, inputs: Arguments, output: object) -> None:
        """Look at what the kernel leaves out of a call that it has taken."""
        duty, start, step = self.duties[site], time.perf_counter(), self._step
        if duty.inputs:
            step.beside[site] = call = CallRecord(site, grad_enabled=True, tracked=True, inputs=self._input_of(site))
            if duty.inputs_and_gradients:
                self._hook_gradients(call, floating_leaves(output), inputs, module, step.board, is_beside=True)
            self.seconds += time.perf_counter() - start

    @contained
    def _before_forward(self, site: int, module: nn.Module, inputs: Arguments) -> None:
        """Measure the input before the module can change it in place, and look out for attention inside."""
        if in_backward() or not self._looks(repeated=False):
            return
        board = self._record_for(torch.is_grad_enabled()).board  # first: it may open the next row
        duty = self.duties[site]
        tensors = floating_inputs(inputs) if duty.inputs or duty.jacobians else []
        if duty.jacobians:
            self.jacobians.enter(site, tensors)
        if tensors and duty.inputs:
            slots = measure(duty.inputs, (tensors[0],), module, board, self)
            self._inputs.setdefault(site, []).append(slots)
        if duty.attention and self._modules[site]() is module:
            self._attention.open(OpenModule(site, module, board))

    def _show_attention(self, inside: OpenModule, scores: Tensor) -> None:
        tasks = self.duties[inside.site].attention
        inside.seen.append(measure(tasks, (scores,), inside.module, inside.board, self))

    def _looks(self, *, repeated: bool) -> bool:
        """Whether this forward is one to record."""
        return (self.untracked or torch.is_grad_enabled() or repeated) and not is_tracing()

    def _hook_gradients(
        self,
        call: CallRecord,
        leaves: list[tuple[str, Tensor]],
        inputs: Arguments,
        module: nn.Module,
        board: Board,
        *,
        is_beside: bool = False,
    ) -> None:
        duty = self.duties[call.site]
        kept = KeptInput.first_of(inputs) if duty.inputs_and_gradients else None
        measured = bool(duty.jacobians)
        for path, tensor in leaves:
            events = call.leaves.setdefault(path, [])
            if tensor.requires_grad:
                target = hookable(tensor, inputs)
                shape = None if target is tensor else (tensor.shape, tensor.stride())
                span = self.jacobians.leave(call.site, module, tensor, target) if measured else None
                measured = False
                owners = self._reference, self._modules[call.site]
                hook = GradientHook(*owners, call.site, board, events, kept, shape, span, is_beside)
                handle = hook_gradient(target, hook, board.breaks)
                if handle is not None:  # on a parameter or an input that outlives the step
                    self._on_leaves.append(handle)
                kept = None

    @contained
    def _first_arrives(self) -> None:
        """The first gradient of the step is about to be measured."""
        self.hold()
        board = self._step.board
        if not board.reached:
            self.on_gradient()
            board.reached = True

    @contained
    def _another_arrives(self, site: int, gradient: Tensor, shape: tuple[int, ...] | None) -> None:
        """A gradient of a call that the kernel has taken: not the first, or not one that it can read.

        Args:
            site: whose output it is of.
            gradient: in the layout of the output, or of the tensor that this is a view of.
            shape: of the output, if it has three dimensions.
        """
        start = time.perf_counter()
        module = self._modules[site]()
        if module is not None:
            as_output = gradient if shape is None else gradient.detach().reshape(shape)
            slots = measure(self.duties[site].gradients, (as_output,), module, self._step.board, self)
            self._step.arrivals.setdefault(site, []).append(slots)
        self.seconds += time.perf_counter() - start

    @contained
    def _after_backward(self, hook: GradientHook, module: nn.Module, gradient: Tensor) -> None:
        start = time.perf_counter()
        if not hook.board.reached:
            self.hold()
            self.on_gradient()
        duty = self.duties[hook.site]
        slots = {} if hook.is_beside else measure(duty.gradients, (gradient,), module, hook.board, self)
        if hook.kept is not None and hook.kept.unchanged:
            slots |= measure(duty.inputs_and_gradients, (hook.kept.tensor, gradient), module, hook.board, self)
        if hook.span is not None and duty.jacobians:
            slots |= measure_jacobian(duty.jacobians, self.jacobians, (hook.site, hook.span), module, hook.board, self)
        hook.events.append(slots)
        hook.board.reached = True
        self.seconds += time.perf_counter() - start
