"""Terms of many parameters at once: one call of the kernel for all of them, torch for what it cannot read.

`keelscope.parameters` says when; what is found goes to the record of the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from keelscope import kernel
from keelscope.board import Slot
from keelscope.calls import Dense, StepRecord, TermSlots, terms_of
from keelscope.containment import warn_once
from keelscope.entries import on_this_rank
from keelscope.kernel import Routine
from keelscope.packing import Packing
from keelscope.probe import Axis, Probe, Tap, sees_everything
from keelscope.sites import WatchedParameter
from keelscope.statistics import Terms

__all__ = ["Bulk"]

_WITHOUT_SHAPE = {Routine.MOMENTS, Routine.SQUARES}


class Bulk:
    """What probes of parameters look at.

    Args:
        parameters: of the model.
        probes: all probes of the watch; those of other axes are ignored.
    """

    def __init__(self, parameters: Sequence[WatchedParameter], probes: Sequence[Probe]) -> None:
        self.every: Callable[[Probe], bool] = _always
        """Whether a probe records on this step."""
        self._packing = Packing()
        self._owners = [weakref.ref(watched.owner) for watched in parameters]
        self._by_tap = {tap: [probe for probe in probes if probe.tap is tap] for tap in Tap}
        self._terms: dict[int, tuple[Probe, tuple[Terms, ...]]] = {}
        """Of probes, by identity: kept, or another could take its place."""
        self._shown: dict[str, frozenset[int] | range] = {}
        """Probe -> the parameters that it is shown."""
        for probe in probes:
            if probe.tap.axis is Axis.PARAMETER:
                self._shown[probe.name] = _compact(
                    [i for i, watched in enumerate(parameters) if probe.fits(watched.owner)], len(parameters)
                )

    def show(self, probes: Sequence[Probe], indices: Iterable[int]) -> None:
        """Show probes some parameters, whatever their owner, and no others.

        Args:
            probes: of parameters; those of an earlier call with the same names are replaced.
            indices: the parameters.
        """
        names, wanted = {probe.name for probe in probes}, frozenset(indices)
        for tap, several in self._by_tap.items():
            self._by_tap[tap] = [p for p in several if p.name not in names] + [p for p in probes if p.tap is tap]
        self._shown |= dict.fromkeys(names, wanted)
        self._terms.clear()

    def has(self, tap: Tap) -> bool:
        """Whether a probe of that tap is shown any parameter."""
        return any(self._shown[probe.name] for probe in self._by_tap[tap])

    def is_due(self, tap: Tap) -> bool:
        """Whether a probe of that tap records on this step."""
        return any(self.every(probe) for probe in self._by_tap[tap])

    def is_of_squares(self, tap: Tap) -> bool:
        """Whether all that is due of that tap can be told from sums of squares, over all parameters."""
        due = [probe for probe in self._by_tap[tap] if self._shown[probe.name] and self.every(probe)]
        every = [sees_everything(probe) and len(self._shown[probe.name]) == len(self._owners) for probe in due]
        routines = {terms.routine for probe in due for terms in self._terms_of(probe)}
        return bool(due) and all(every) and routines == {Routine.SQUARES}

    def put_squares(self, tap: Tap, summed: bytearray, sums: bytearray, step: StepRecord) -> None:
        """Take in sums of squares, where `is_of_squares` holds; the record may keep the arrays.

        Args:
            tap: what they are of.
            summed: a flag of each parameter, whether it was.
            sums: packed ``[parameter, (count, squares)]``.
            step: where they go, in place of what was there.
        """
        found = Dense(summed, sums)
        fresh: Dense | None = found
        for probe in self._by_tap[tap]:
            for terms in self._terms_of(probe) if self._shown[probe.name] and self.every(probe) else ():
                key = tap, probe.name, terms
                if fresh is not None and key not in step.dense:  # the first pass and probe: nothing is copied
                    step.dense[key], fresh = fresh, None
                    continue
                dense = step.dense_of(*key, len(self._owners))
                np.copyto(dense.rows, found.rows, where=found.seen[:, None])
                np.copyto(dense.seen, found.seen, where=found.seen)

    def measure(
        self, tap: Tap, indices: Sequence[int], tensors: Sequence[Tensor], step: StepRecord
    ) -> dict[int, TermSlots]:
        """Measure one tensor each of many parameters.

        Args:
            tap: what they are.
            indices: of the parameters, each once.
            tensors: of each parameter, on one rank or several.
            step: where terms go; what the kernel reads goes to `StepRecord.dense`, in place of what was there.

        Returns:
            Index -> the slots of everything else.
        """
        found: dict[int, TermSlots] = {}
        if not set(map(type, tensors)) <= {Tensor, nn.Parameter}:  # distributed: none of them, or nearly all
            own = [(i, view[0]) for i, t in zip(indices, tensors, strict=True) if (view := on_this_rank((t,)))]
            indices, tensors = [i for i, _ in own], [tensor for _, tensor in own]
        for probe in self._by_tap[tap] if indices else ():
            if self.every(probe) and self._shown[probe.name]:
                try:
                    left = self._pack(probe, indices, tensors, step)
                    self._put(probe, left, step, found)
                except Exception as error:  # one probe's fault costs the others nothing
                    warn_once(self, error, probe.name)
        return found

    def observe(self, i: int, tap: Tap, tensors: tuple[Tensor, ...], step: StepRecord) -> TermSlots:
        """Measure one observation of one parameter.

        Args:
            i: the parameter.
            tap: what is observed.
            tensors: the observation.
            step: where terms go.

        Returns:
            Its slots.
        """
        owner = self._owners[i]()
        slots: TermSlots = {}
        own = on_this_rank(tuple(tensor.detach() for tensor in tensors))
        for probe in self._by_tap[tap] if own is not None else ():
            if owner is not None and i in self._shown[probe.name] and self.every(probe):
                try:
                    view = probe.view(own or (), owner)
                    if view is not None:
                        slots |= {(probe.name, terms): step.board.put(terms, view) for terms in terms_of(probe)}
                except Exception as error:
                    warn_once(self, error, probe.name)
        return slots

    def _terms_of(self, probe: Probe) -> tuple[Terms, ...]:
        known = self._terms.get(id(probe))
        if known is None:
            known = self._terms[id(probe)] = probe, terms_of(probe)
        return known[1]

    def _pack(
        self, probe: Probe, indices: Sequence[int], tensors: Sequence[Tensor], step: StepRecord
    ) -> list[tuple[int, Tensor]]:
        """Let the kernel read what it can; what is left is returned, without what the probe is not shown."""
        shown = self._shown[probe.name]
        if not sees_everything(probe) or len(shown) < len(self._owners):
            return [(i, tensor) for i, tensor in zip(indices, tensors, strict=True) if i in shown]
        left: Sequence[int] = range(len(indices))
        several = self._terms_of(probe)
        if all(terms.routine in _WITHOUT_SHAPE for terms in several):
            for terms in several:
                routine = terms.routine or Routine.MOMENTS
                rows, left = kernel.pack_all(routine, list(tensors)) or self._packing.pack_all(routine, tensors)
                dense = step.dense_of(probe.tap, probe.name, terms, len(self._owners))
                _write(dense, indices, rows, left)
        return [(indices[k], tensors[k]) for k in left]

    def _put(
        self, probe: Probe, tensors: Sequence[tuple[int, Tensor]], step: StepRecord, found: dict[int, TermSlots]
    ) -> None:
        plain = sees_everything(probe)
        detached = [(i, (tensor.detach(),)) for i, tensor in tensors]
        views = [(i, view) for i, one in detached if (view := one if plain else self._view(probe, i, one))]
        for terms in terms_of(probe) if views else ():
            slots, key = _put_all(terms, [view for _, view in views], step), (probe.name, terms)
            for (i, _), slot in zip(views, slots, strict=True):
                found.setdefault(i, {})[key] = slot

    def _view(self, probe: Probe, i: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        owner = self._owners[i]()
        return None if owner is None else probe.view(tensors, owner)


def _write(dense: Dense, indices: Sequence[int], rows: NDArray[np.float64], left: Sequence[int]) -> None:
    if not left and indices == list(range(len(dense.seen))):
        dense.rows[:] = rows
        dense.seen[:] = True
        return
    places = np.asarray(indices, dtype=np.intp)
    dense.rows[places] = rows
    dense.seen[places] = True
    dense.seen[places[list(left)]] = False


def _put_all(terms: Terms, views: list[tuple[Tensor, ...]], step: StepRecord) -> list[Slot]:
    if all(len(view) == 1 for view in views):
        return step.board.put_many(terms, [view[0] for view in views])
    return [step.board.put(terms, view) for view in views]


def _always(_: Probe) -> bool:
    return True


def _compact(rising: list[int], size: int) -> frozenset[int] | range:
    """Indices to look others up in; all of them, as nearly always, take no room."""
    return range(size) if len(rising) == size else frozenset(rising)
