"""What the probes of a site look at on the running step: worked out once per set of due probes, not once per tensor.

`keelscope.hooks` runs at every call of every watched module; what can be known before lies here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from keelscope.board import Board
from keelscope.calls import TermSlots, terms_of
from keelscope.containment import warn_once
from keelscope.entries import on_this_rank
from keelscope.probe import JacobianProbe, Probe, Tap, Tensors, sees_everything
from keelscope.statistics import Terms

__all__ = ["Duties", "Duty", "Task", "measure"]


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One probe, and where its terms go."""

    probe: Probe
    keys: tuple[tuple[str, Terms], ...]
    sees_everything: bool
    """Whether it takes tensors as they are, so that there is no view to ask for."""

    @classmethod
    def of(cls, probe: Probe) -> Task:
        """The task of a probe."""
        return cls(probe, tuple((probe.name, terms) for terms in terms_of(probe)), sees_everything(probe))


@dataclass(frozen=True, slots=True, eq=False)
class Duty:
    """What looks at one site on one step."""

    inputs: tuple[Task, ...]
    outputs: tuple[Task, ...]
    gradients: tuple[Task, ...]
    inputs_and_gradients: tuple[Task, ...]
    attention: tuple[Task, ...]
    jacobians: tuple[JacobianProbe, ...]
    needs_gradient: bool
    """Whether something waits for the gradient of the output."""

    @classmethod
    def of(cls, probes: Sequence[Probe]) -> Duty:
        """The duty of the probes that are due."""

        def tasks(tap: Tap) -> tuple[Task, ...]:
            return tuple(Task.of(probe) for probe in probes if probe.tap is tap)

        return cls(
            tasks(Tap.INPUT),
            tasks(Tap.OUTPUT),
            tasks(Tap.OUTPUT_GRADIENT),
            tasks(Tap.INPUT_AND_GRADIENT),
            tasks(Tap.ATTENTION),
            tuple(probe for probe in probes if isinstance(probe, JacobianProbe)),
            any(probe.tap.in_backward for probe in probes),
        )


class Duties:
    """Duties of every site of one model.

    Args:
        probes: the probes of each site.
    """

    def __init__(self, probes: Iterable[tuple[Probe, ...]]) -> None:
        self._probes = list(probes)
        self._known: dict[tuple[bool, ...], dict[int, Duty]] = {}
        self._now: dict[int, Duty] = {}
        self.every = _always

    @property
    def every(self) -> Callable[[Probe], bool]:
        """Whether a probe records on this step; asked once for each probe when it is set."""
        return self._every

    @every.setter
    def every(self, every: Callable[[Probe], bool]) -> None:
        self._every = every
        distinct = {id(probe): probe for found in self._probes for probe in found}
        self._now = self._known.setdefault(tuple(every(probe) for probe in distinct.values()), {})

    def add(self, probes: Sequence[Probe]) -> None:
        """Take in the probes of one more site."""
        self._probes.append(tuple(probes))
        self._known.clear()
        self.every = self._every

    def probes(self, site: int) -> tuple[Probe, ...]:
        """All probes of a site, due or not."""
        return self._probes[site]

    def __getitem__(self, site: int) -> Duty:
        duty = self._now.get(site)
        if duty is None:
            duty = self._now[site] = Duty.of([probe for probe in self._probes[site] if self._every(probe)])
        return duty


def measure(tasks: tuple[Task, ...], tensors: Tensors, module: nn.Module, board: Board, owner: object) -> TermSlots:
    """Terms of one observation.

    Args:
        tasks: what looks at it.
        tensors: the observation.
        module: whose it is.
        board: where terms go.
        owner: keeps what was said about probes that fail, see `keelscope.containment.warn_once`.

    Returns:
        Where the terms are; nothing of a probe that fails or has nothing to say.
    """
    slots: TermSlots = {}
    own = on_this_rank(tensors)
    for task in tasks if own is not None else ():
        try:
            view = own
            if own is not None and not task.sees_everything:
                view = task.probe.view(tuple(tensor.detach() for tensor in own), module)
            if view is not None:
                for key in task.keys:
                    slots[key] = board.put(key[1], view)
        except Exception as error:  # one probe's fault costs the others nothing
            warn_once(owner, error, task.probe.name)
    return slots


def _always(_: Probe) -> bool:
    return True
