"""Tensor hooks placed from forward hooks: what modules put out, and the gradients that come back.

Module *backward* hooks are never used: they miss structured outputs and break in-place operations. Forward hooks sit on
the modules during recorded steps only, and turn into hooks that do nothing in copies and pickles of the model. Forward
recomputation inside a backward pass (activation checkpointing) is recognised and not counted twice.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, jit, nn

from keelscope.attention import AttentionMode, CloseHook, OpenModule
from keelscope.board import Board
from keelscope.callbacks import ForwardHook, GradientHook, InputHook, Owner, Placement
from keelscope.calls import CallRecord, StepRecord, TermSlots
from keelscope.containment import contained
from keelscope.duties import Duties, measure, measure_jacobian
from keelscope.jacobian.passage import JacobianCalls
from keelscope.leaves import Arguments, KeptInput, floating_leaves, hook_gradient, hookable
from keelscope.paged import PagedHooks
from keelscope.probe import Probe, Tap, fits_site
from keelscope.recomputation import repeated_call
from keelscope.sites import SOUGHT, WatchedModule

if TYPE_CHECKING:
    pass

__all__ = ["ModuleHooks", "in_backward"]


def in_backward() -> bool:
    """Whether the caller runs inside a backward pass, where a forward is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


class ModuleHooks(PagedHooks):
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
        self._duties = Duties(tuple(p for p in probes if fits_site(p, w.module, w.site.role)) for w in modules)
        self._sought = frozenset(site for site, w in enumerate(modules) if w.site.role == SOUGHT)
        super().__init__()
        self._reference: weakref.ref[Owner] = weakref.ref(self)
        self._record_for = record_for
        self._handles = ExitStack()
        self._placed: dict[int, Placement] = {}
        self._before = ExitStack()
        self._awaited: tuple[int, ...] = ()
        self._on_leaves = ExitStack()
        self._inputs: dict[int, list[TermSlots]] = {}
        self.jacobians = JacobianCalls()
        self._attention = AttentionMode(self._show_attention)
        self.attached = False
        self.on_module: Callable[[nn.Module], None] | None = None
        """Called with every watched module that has run."""
        self.untracked = True
        """Whether forwards without gradient are recorded: not those of validation, once training is known to have none
        that a checkpointed region repeats."""
        self.missed = False
        """Whether a region repeated a call that was not recorded."""
        self.lost: dict[int, str] = {}
        """Sites with a call that could not be observed, and why."""

    @property
    def every(self) -> Callable[[Probe], bool]:
        """Whether a probe records on this step."""
        return self._duties.every

    @every.setter
    def every(self, every: Callable[[Probe], bool]) -> None:
        self._duties.every = every

    def begin(self, step: StepRecord) -> None:
        """Start a step: hooks on tensors that outlive the one before are given back.

        Args:
            step: its record.
        """
        self.open_page(step)
        self._on_leaves.close()
        self._inputs.clear()
        self.jacobians.begin()
        self._attention.reset()

    def add(self, watched: WatchedModule, probes: Sequence[Probe]) -> None:
        """Watch one more module, which becomes the next site.

        Args:
            watched: the module.
            probes: what looks at it.
        """
        self._modules.append(weakref.ref(watched.module))
        self._duties.add(probes)
        if self.attached:
            self._attach_to(len(self._modules) - 1, watched.module, self._handles)
            self._attach_before()

    def attach(self) -> None:
        """Install the hooks; doing so twice changes nothing."""
        if not self.attached:
            self.attached = True
            for site, reference in enumerate(self._modules):
                module = reference()
                if module is not None and site not in self._sought:
                    self._attach_to(site, module, self._handles)
        self._attach_before()

    def spare(self, name: str, sites: Iterable[int]) -> None:
        """Take a probe off sites where it has nothing to say."""
        self._duties.drop(name, sites)

    def _attach_before(self) -> None:
        """Hooks before modules, where a probe is due that looks at what goes in; most look at every tenth step."""
        wanted = self._duties.awaited()
        if wanted == self._awaited:
            return
        self._before.close()
        self._awaited = wanted
        for site in wanted:
            module = self._modules[site]()
            if module is not None and not isinstance(module, jit.ScriptModule):
                if site in self._sought:
                    self._attach_to(site, module, self._before)
                handle = module.register_forward_pre_hook(InputHook(self, site), with_kwargs=True)
                self._before.callback(handle.remove)

    def _attach_to(self, site: int, module: nn.Module, handles: ExitStack) -> None:
        taps = {probe.tap for probe in self._duties.probes(site)}
        try:
            if Tap.ATTENTION in taps:  # before the hook below, which takes what it found
                handle = module.register_forward_hook(CloseHook(self._attention, site), always_call=True)
                handles.callback(handle.remove)
            hook = ForwardHook(self, site)
            if site in self._sought:
                handles.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            else:
                self._placed.setdefault(site, Placement(hook)).put(module)
        except (RuntimeError, AttributeError) as error:
            self._placed.pop(site, None)
            self.lost[site] = f"of a kind that takes no hooks ({error})"

    def detach(self) -> None:
        """Give every handle back."""
        for site, placement in self._placed.items() if self.attached else ():
            module = self._modules[site]()
            if module is not None:
                placement.take(module)
        self._handles.close()
        self._before.close()
        self._awaited = ()
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
        leaves = floating_leaves(output)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.lost[site] = "called inside a functorch transform (vmap, grad, jvp), where values are not concrete"
            return
        enabled = torch.is_grad_enabled()
        step = self._record_for(None if repeated else enabled)
        if step.page is not None:
            arms = enabled and not repeated and self._arms(step.page)
            if arms and step.page.look(site, module, *inputs, output):
                step.trained = True
                return
            step.page.leave(site)
        call = self._repeated_call(site, step) if repeated else self._new_call(site, leaves, step, enabled)
        if call is None:
            return
        duty = self._duties[site]
        if leaves and not call.recomputed:
            call.outputs = measure(duty.outputs, (leaves[0][1],), module, step.board, self)
        if duty.needs_gradient:
            self._hook_gradients(call, leaves, inputs, module, step.board)

    def _repeated_call(self, site: int, step: StepRecord) -> CallRecord | None:
        """The record of the call that a recomputation repeats, whose gradient was not tracked."""
        calls = step.of_site.get(site, ())
        if step.is_taken(site):  # tracked, or the kernel would not have taken it
            taken = CallRecord(site, grad_enabled=True, tracked=True)
            calls = [*(c for c in calls if not c.is_later), taken, *(c for c in calls if c.is_later)]
        self.missed |= all(call.recomputed for call in calls)
        call = repeated_call(calls)
        if call is not None:
            call.recomputed = True
        return call

    def _new_call(
        self, site: int, leaves: list[tuple[str, Tensor]], step: StepRecord, grad_enabled: bool
    ) -> CallRecord:
        tracked = grad_enabled and any([tensor.requires_grad for _, tensor in leaves])  # noqa: C419 - faster
        dtype = leaves[0][1].dtype if leaves else None
        call = CallRecord(site, grad_enabled, tracked, dtype, step.is_taken(site))
        waiting = self._inputs.get(site)  # several where a module calls itself
        if waiting:
            call.inputs = waiting.pop()
        if self._attention.found:
            call.attention = self._attention.found.pop(site, [])
        step.add(call)
        return call

    @contained
    def _before_forward(self, site: int, module: nn.Module, args: object, kwargs: object) -> None:
        """Measure the input before the module can change it in place, and look out for attention inside."""
        if in_backward() or not self._looks(repeated=False):
            return
        board = self._record_for(torch.is_grad_enabled()).board  # first: it may open the next row
        duty = self._duties[site]
        leaves = floating_leaves((args, kwargs)) if duty.inputs or duty.jacobians else []
        if duty.jacobians:
            self.jacobians.enter(site, [tensor for _, tensor in leaves])
        if leaves and duty.inputs:
            inputs = measure(duty.inputs, (leaves[0][1],), module, board, self)
            self._inputs.setdefault(site, []).append(inputs)
        if duty.attention and self._modules[site]() is module:
            self._attention.open(OpenModule(site, module, board))

    def _show_attention(self, inside: OpenModule, scores: Tensor) -> None:
        tasks = self._duties[inside.site].attention
        inside.seen.append(measure(tasks, (scores,), inside.module, inside.board, self))

    def _looks(self, *, repeated: bool) -> bool:
        """Whether this forward is one to record."""
        return (self.untracked or torch.is_grad_enabled() or repeated) and not _is_tracing()

    def _hook_gradients(
        self, call: CallRecord, leaves: list[tuple[str, Tensor]], inputs: Arguments, module: nn.Module, board: Board
    ) -> None:
        duty = self._duties[call.site]
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
                hook = GradientHook(*owners, call.site, board, events, kept, shape, span)
                handle = hook_gradient(target, hook, self._breaks)
                if handle is not None:  # on a parameter or an input that outlives the step
                    self._on_leaves.callback(handle.remove)
                kept = None

    @contained
    def _after_backward(self, hook: GradientHook, module: nn.Module, gradient: Tensor) -> None:
        start = time.perf_counter()
        if not hook.board.reached:
            self.hold()
            self.on_gradient()
        duty = self._duties[hook.site]
        slots = measure(duty.gradients, (gradient,), module, hook.board, self)
        if hook.kept is not None and hook.kept.unchanged:
            slots |= measure(duty.inputs_and_gradients, (hook.kept.tensor, gradient), module, hook.board, self)
        if hook.span is not None:
            passage = self.jacobians.passage(hook.site, hook.span) if duty.jacobians else None
            if passage is not None:
                refuse = partial(self.jacobians.refuse, hook.site)
                slots |= measure_jacobian(duty.jacobians, passage, module, hook.board, self, refuse)
        hook.events.append(slots)
        hook.board.reached = True
        self.seconds += time.perf_counter() - start


def _is_tracing() -> bool:
    return torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()


def _nothing() -> None:
    """Nobody asked."""
