"""What the probes of a site look at on the running step: worked out once per set of due probes, not once per tensor.

`keelscope.hooks` runs at every call of every watched module; what can be known before lies here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from keelscope import kernel
from keelscope.board import Board
from keelscope.calls import TermSlots, terms_of
from keelscope.containment import warn_once
from keelscope.entries import on_this_rank
from keelscope.jacobian.linearised import NotLinearisableError
from keelscope.jacobian.passage import JacobianCalls, Span
from keelscope.kernel import COLUMNS, Program, Routine, program
from keelscope.probe import JacobianProbe, Probe, Tap, TensorProbe, Tensors, sees_everything
from keelscope.statistics import Terms

__all__ = ["Duties", "Duty", "Task", "Work", "measure", "measure_jacobian"]


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One probe, and where its terms go."""

    probe: Probe
    keys: tuple[tuple[str, Terms], ...]
    sees_everything: bool
    """Whether it takes tensors as they are, so that there is no view to ask for."""
    computed_only: bool = False
    """Whether it leaves tensors out that depend on no parameter."""
    program: Program = ()
    """What the compiled kernel takes from a view, where it can take everything."""

    @classmethod
    def of(cls, probe: Probe) -> Task:
        """The task of a probe."""
        keys = tuple((probe.name, terms) for terms in terms_of(probe))
        routines = [(key, key[1].routine) for key in keys]
        known = [(key, routine) for key, routine in routines if routine is not None]
        steps = program(known) if len(known) == len(keys) else ()
        return cls(probe, keys, sees_everything(probe), isinstance(probe, TensorProbe) and probe.computed_only, steps)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What several probes take from the same tensors."""

    tasks: tuple[Task, ...]
    program: Program
    """What the compiled kernel can take from a tensor alone."""
    beside: tuple[Task, ...]
    """What is left when it has."""

    @classmethod
    def of(cls, probes: Iterable[Probe]) -> Work:
        """The work of some probes."""
        tasks = [Task.of(probe) for probe in probes]
        steps: list[tuple[tuple[str, Terms], Routine]] = []
        beside = []
        for task in tasks:
            known = [(key, key[1].routine) for key in task.keys if task.sees_everything and not task.computed_only]
            steps += [(key, routine) for key, routine in known if routine is not None]
            rest = tuple(key for key in task.keys if key not in dict(steps))
            if rest:
                beside.append(replace(task, keys=rest))
        return cls(tuple(tasks), program(steps), tuple(beside))

    def __bool__(self) -> bool:
        return bool(self.tasks)


@dataclass(frozen=True, slots=True, eq=False)
class Duty:
    """What looks at one site on one step."""

    inputs: Work
    outputs: Work
    gradients: Work
    inputs_and_gradients: Work
    attention: Work
    jacobians: tuple[JacobianProbe, ...]
    needs_gradient: bool
    """Whether something waits for the gradient of the output."""
    code: int
    """The same for the kernel, see `code_of`."""

    @classmethod
    def of(cls, probes: Sequence[Probe]) -> Duty:
        """The duty of the probes that are due."""
        work = {tap: Work.of(probe for probe in probes if probe.tap is tap) for tap in Tap}
        known = work[Tap.OUTPUT], work[Tap.OUTPUT_GRADIENT]
        others = any(probe.tap not in _WITH_THE_KERNEL for probe in probes if probe.tap.of_module)
        others |= bool(work[Tap.INPUT_AND_GRADIENT]) and not work[Tap.INPUT]  # then no hook before the module waits
        return cls(
            code=_LEFT_TO_PYTHON if others else code_of(*known),
            inputs=work[Tap.INPUT],
            outputs=work[Tap.OUTPUT],
            gradients=work[Tap.OUTPUT_GRADIENT],
            inputs_and_gradients=work[Tap.INPUT_AND_GRADIENT],
            attention=work[Tap.ATTENTION],
            jacobians=tuple(probe for probe in probes if isinstance(probe, JacobianProbe)),
            needs_gradient=any(probe.tap.in_backward for probe in probes),
        )

    @property
    def needs_input(self) -> bool:
        """Whether something has to be there before the module runs."""
        return bool(self.inputs or self.attention or self.jacobians)


_LEFT_TO_PYTHON = 0x80
_WITH_THE_KERNEL = {Tap.OUTPUT, Tap.OUTPUT_GRADIENT, Tap.INPUT, Tap.INPUT_AND_GRADIENT}
"""What is looked at where the kernel takes a call: by itself the first two, by Python beside it the others."""


def code_of(outputs: Work, gradients: Work) -> int:
    """What the kernel takes of a call by itself: a bit per routine, for outputs, and 3 bits further for gradients.

    Args:
        outputs: what looks at outputs.
        gradients: what looks at their gradients.

    Returns:
        The code; 128 where something else has to be done than to run the kernel.
    """
    code = 0
    for shift, work in ((0, outputs), (len(COLUMNS), gradients)):
        for routine in work.program[1::2]:
            if routine not in COLUMNS:
                return _LEFT_TO_PYTHON
            code |= 1 << int(str(routine)) + shift
    return _LEFT_TO_PYTHON if outputs.beside or gradients.beside else code


class Duties:
    """Duties of every site of one model.

    Args:
        probes: the probes of each site.
    """

    def __init__(self, probes: Iterable[tuple[Probe, ...]]) -> None:
        self._sets: dict[tuple[int, ...], tuple[Probe, ...]] = {}
        """The sets of probes that there are: nearly all sites have one of a few."""
        self._probes = [self._one(several) for several in probes]
        self._distinct = _distinct(self._probes)
        self._known: dict[tuple[bool, ...], list[Duty | None]] = {}
        self._now: list[Duty | None] = []
        self._shared: dict[tuple[int, ...], Duty] = {}
        self._codes: dict[int, bytes] = {}
        self._watched: dict[int, NDArray[np.bool_]] = {}
        self._awaited: tuple[int, ...] | None = None
        self.every = _always

    @property
    def every(self) -> Callable[[Probe], bool]:
        """Whether a probe records on this step; asked once for each probe when it is set."""
        return self._every

    @every.setter
    def every(self, every: Callable[[Probe], bool]) -> None:
        self._every = every
        now = self._known.setdefault(tuple(every(probe) for probe in self._distinct), [])
        now += [None] * (len(self._probes) - len(now))
        if now is not self._now:
            self._now, self._awaited = now, None

    def add(self, probes: Sequence[Probe]) -> None:
        """Take in the probes of one more site."""
        self._probes.append(self._one(probes))
        self._distinct = _distinct(self._probes)
        self._forget()

    def drop(self, name: str, sites: Iterable[int]) -> None:
        """Take a probe off some sites."""
        for site in sites:
            self._probes[site] = self._one(probe for probe in self._probes[site] if probe.name != name)
        self._forget()

    def _one(self, probes: Iterable[Probe]) -> tuple[Probe, ...]:
        """One object for all sites with the same probes."""
        several = tuple(probes)
        return self._sets.setdefault(tuple(map(id, several)), several)

    def _forget(self) -> None:
        self._known.clear()
        self._codes.clear()
        self._watched.clear()
        self.every = self._every

    def probes(self, site: int) -> tuple[Probe, ...]:
        """All probes of a site, due or not."""
        return self._probes[site]

    def codes(self) -> bytes:
        """What the kernel takes at each site on this step, ``[site]``."""
        codes = self._codes.get(id(self._now))
        if codes is None:
            codes = self._codes[id(self._now)] = bytes(self[site].code for site in range(len(self._probes)))
        return codes

    def watched_by(self, probe: Probe) -> NDArray[np.bool_]:
        """Whether a probe looks at each site, ``[site]``."""
        watched = self._watched.get(id(probe))
        if watched is None:
            watched = np.array([probe in found for found in self._probes], dtype=np.bool_)
            self._watched[id(probe)] = watched
        return watched

    def awaited(self) -> tuple[int, ...]:
        """Sites where something has to be there before the module runs, on this step."""
        if self._awaited is None:
            self._awaited = tuple(site for site in range(len(self._probes)) if self[site].needs_input)
        return self._awaited

    def __getitem__(self, site: int) -> Duty:
        duty = self._now[site]
        if duty is None:
            due = tuple(probe for probe in self._probes[site] if self._every(probe))
            key = tuple(map(id, due))  # sites with the same probes share a duty
            duty = self._now[site] = self._shared.get(key) or self._shared.setdefault(key, Duty.of(due))
        return duty


def measure(work: Work, tensors: Tensors, module: nn.Module, board: Board, owner: object) -> TermSlots:
    """Terms of one observation.

    Args:
        work: what looks at it.
        tensors: the observation.
        module: whose it is.
        board: where terms go.
        owner: keeps what was said about probes that fail, see `keelscope.containment.warn_once`.

    Returns:
        Where the terms are; nothing of a probe that fails or has nothing to say.
    """
    own = on_this_rank(tensors)
    if own is None:
        return {}
    packed = kernel.measure(work.program, own[0]) if work.program and len(own) == 1 else None
    slots: TermSlots = {} if packed is None else packed  # type: ignore[assignment]
    for task in work.tasks if packed is None else work.beside:
        if task.computed_only and torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in own):
            continue
        try:
            view: Tensors | None = own
            if not task.sees_everything:
                view = task.probe.view(tuple(tensor.detach() for tensor in own), module)
            if view is not None:
                _put(task, view, board, slots)
        except Exception as error:  # one probe's fault costs the others nothing
            warn_once(owner, error, task.probe.name)
    return slots


def _put(task: Task, view: Tensors, board: Board, slots: TermSlots) -> None:
    packed = kernel.measure(task.program, view[0]) if task.program and len(view) == 1 else None
    if packed is not None:
        slots |= packed
        return
    for key in task.keys:
        slots[key] = board.put(key[1], view)


def measure_jacobian(
    probes: Iterable[JacobianProbe],
    calls: JacobianCalls,
    which: tuple[int, Span],
    module: nn.Module,
    board: Board,
    owner: object,
) -> TermSlots:
    """Terms of one Jacobian.

    Args:
        probes: what looks at it.
        calls: of the step; told why a probe cannot have it.
        which: the site and its call.
        module: whose it is.
        board: where terms go.
        owner: see `measure`.

    Returns:
        Where the terms are.
    """
    slots: TermSlots = {}
    passage = calls.passage(*which)
    if passage is None:
        return slots
    for probe in probes:
        try:
            with torch.no_grad():
                view = probe.measures(passage, module)
                if view is not None:
                    slots |= {(probe.name, terms): board.put(terms, view) for terms in terms_of(probe)}
        except NotLinearisableError as error:
            calls.refuse(which[0], str(error))
        except Exception as error:
            warn_once(owner, error, probe.name)
    return slots


def _distinct(probes: Iterable[tuple[Probe, ...]]) -> list[Probe]:
    return list({id(probe): probe for found in probes for probe in found}.values())


def _always(_: Probe) -> bool:
    return True
