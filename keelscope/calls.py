"""What one step saw of each module call, on the host: slots while the step runs, plain numbers afterwards.

`keelscope.hooks` fills `CallRecord`s in call order; `keelscope.rows` merges them into one value per site; with
``watch(calls=True)`` the user gets them unmerged as `Call`s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from keelscope.board import Board, Slot
from keelscope.probe import Probe, Tap
from keelscope.statistics import Terms

if TYPE_CHECKING:
    from keelscope.slowpages import AnyPage

__all__ = ["Call", "CallRecord", "Dense", "ParameterCalls", "ParameterRecord", "StepRecord", "TermSlots", "terms_of"]

TermSlots = dict[tuple[str, Terms], Slot]
"""Slots of one observation by probe name and terms."""


@dataclass(slots=True)
class CallRecord:
    """One call of one module while its step is running."""

    site: int
    grad_enabled: bool
    tracked: bool
    """Whether an output requires a gradient."""
    is_later: bool = False
    """Whether the kernel took a call of the site before."""
    dtype: torch.dtype | None = None
    """Of the first floating output leaf."""
    recomputed: bool = False
    inputs: TermSlots = field(default_factory=dict)
    outputs: TermSlots = field(default_factory=dict)
    attention: list[TermSlots] = field(default_factory=list)
    """One entry per attention inside the module."""
    leaves: dict[str, list[TermSlots]] = field(default_factory=dict)
    """Output leaf -> one entry per backward pass that reached it."""

    @property
    def differentiable(self) -> bool:
        """Whether gradients were enabled, or a checkpointed region ran it again with gradients."""
        return self.grad_enabled or self.recomputed

    def first_gradient(self) -> list[TermSlots]:
        """Gradient observations of the first output leaf that received any."""
        for events in self.leaves.values():
            if events:
                return events
        return []


@dataclass(slots=True, eq=False)
class ParameterRecord:
    """One parameter while its step is running. Its fields are replaced, never changed: most stay empty."""

    leaf: Sequence[TermSlots] = ()
    """What each backward pass added."""
    accumulated: TermSlots | None = None
    """``.grad`` at the end of the last backward pass before its optimizer stepped."""
    weight: TermSlots | None = None
    used: TermSlots | None = None
    """``.grad`` when its optimizer began to step."""
    update: TermSlots | None = None

    def gradient(self) -> Sequence[TermSlots]:
        """Observations of the canonical gradient; empty where none arrived."""
        return [self.accumulated] if self.accumulated else self.leaf


@dataclass(slots=True, eq=False)
class Dense:
    """Terms of one kind of all parameters, as the kernel wrote them; arrays when somebody looks."""

    flags: bytearray
    """Of each parameter, whether it has terms."""
    packed: bytearray
    """Doubles."""

    @property
    def seen(self) -> NDArray[np.bool_]:
        """``[parameter]``."""
        return np.ndarray(len(self.flags), np.bool_, self.flags)

    @property
    def rows(self) -> NDArray[np.float64]:
        """``[parameter, column]``."""
        size = len(self.flags)
        return np.ndarray((size, len(self.packed) // (8 * size) if size else 0), np.float64, self.packed)


@dataclass(slots=True)
class StepRecord:
    """Everything one step has shown so far. A gradient that arrives after its step is closed lands here unread."""

    board: Board = field(default_factory=Board)
    calls: list[CallRecord] = field(default_factory=list)
    parameters: dict[int, ParameterRecord] = field(default_factory=dict)
    of_site: dict[int, list[CallRecord]] = field(default_factory=dict)
    """The same calls by site."""
    dense: dict[tuple[Tap, str, Terms], Dense] = field(default_factory=dict)
    """What the kernel read of parameters, by tap, probe and terms: accumulated gradients, weights, ..."""
    trained: bool = False
    """Whether the kernel took calls, all of which had gradients enabled."""
    page: AnyPage | None = None
    """What the kernel took of calls: of each site at most the first."""
    arrivals: dict[int, list[TermSlots]] = field(default_factory=dict)
    """Gradients of those calls that the kernel did not take, by site, after the one that it did."""
    beside: dict[int, CallRecord] = field(default_factory=dict)
    """Of those calls, by site, what probes of inputs saw."""
    gates: StepRecord | None = None
    """Calls of modules that put out gates, with sites of their own."""

    def of_gates(self) -> StepRecord:
        """The record of the calls of modules that put out gates, on the same board."""
        if self.gates is None:
            self.gates = StepRecord(self.board)
        return self.gates

    def dense_of(self, tap: Tap, probe: str, terms: Terms, size: int) -> Dense:
        """Where the kernel's terms of all parameters go."""
        key = tap, probe, terms
        if key not in self.dense:
            self.dense[key] = Dense(bytearray(size), bytearray(8 * size * len(terms.columns)))
        return self.dense[key]

    def summed(self) -> set[int]:
        """Parameters whose gradient of the whole step the kernel has read."""
        if not any(record.leaf for record in self.parameters.values()):
            return set()
        found = [dense.seen for (tap, *_), dense in self.dense.items() if tap is Tap.PARAMETER_GRADIENT]
        return {int(i) for seen in found for i in np.flatnonzero(seen)}

    def add(self, call: CallRecord) -> None:
        """Take in the next call."""
        self.calls.append(call)
        self.of_site.setdefault(call.site, []).append(call)

    def calls_of(self, site: int) -> list[CallRecord]:
        """The calls of a site in order, one that the kernel took among them: it was tracked."""
        calls = self.of_site.get(site, [])
        if not self.is_taken(site):
            return calls
        early, later = ([c for c in calls if c.is_later is flag] for flag in (False, True))
        return [*early, CallRecord(site, grad_enabled=True, tracked=True), *later]

    def is_taken(self, site: int) -> bool:
        """Whether the kernel took a call of the site."""
        return self.page is not None and self.page.has(site)

    def while_blank(self) -> StepRecord:
        """Itself as long as nothing has come to it, then another one."""
        has_any = self.trained or self.calls or self.parameters or self.dense or self.arrivals or self.beside
        is_blank = not has_any and self.page is None and self.gates is None and self.board.is_blank
        return self if is_blank else StepRecord()

    @property
    def saw_forward(self) -> bool:
        """Whether a module ran with gradients enabled."""
        return self.trained or any(call.differentiable for call in self.calls)

    @property
    def has_calls(self) -> bool:
        """Whether a module ran."""
        return self.trained or bool(self.calls)

    @property
    def saw_backward(self) -> bool:
        """Whether a gradient arrived."""
        return self.board.reached or bool(
            self.parameters or self.dense
        )  # asked at every module: no walk over the calls


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one module on the last recorded step, see ``watch(calls=True)``."""

    grad_enabled: bool
    """False for a forward under ``torch.no_grad()``."""
    inputs: Mapping[str, float]
    """Statistics of the first floating input, if the probe ``inputs`` is on, plus ``count``."""
    outputs: Mapping[str, float]
    """Statistics of the first floating output leaf, plus ``count``."""
    leaves: Mapping[str, tuple[float, ...]]
    """Output leaf path -> gradient norm of each backward pass that reached it; empty where none did."""
    dtype: str = ""
    """Of the first floating output leaf, as in ``"bfloat16"``; statistics are taken in float64 whatever it is."""


@dataclass(frozen=True, slots=True)
class ParameterCalls:
    """The gradients one parameter received on the last recorded step, see ``watch(calls=True)``."""

    per_backward: tuple[float, ...]
    """Norm of what each backward pass added."""


def terms_of(probe: Probe) -> tuple[Terms, ...]:
    """The distinct terms a probe's statistics need."""
    return tuple(dict.fromkeys(statistic.terms for statistic in probe.statistics))
