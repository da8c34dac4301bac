"""The part of the hooks on modules that hands calls over to the kernel, and takes back what it leaves.

A page (`keelscope.kernel.page`) takes calls between the first module of a forward that trains, which
`keelscope.hooks` looks at, and the first gradient.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import Node

from keelscope import kernel
from keelscope.calls import StepRecord
from keelscope.containment import contained
from keelscope.duties import Duties, measure
from keelscope.leaves import HAS_HOOK_DICTS
from keelscope.probe import Probe
from keelscope.unwinding import Breaks

if TYPE_CHECKING:
    from keelscope._kernel import Page
    from keelscope.callbacks import Owner

__all__ = ["PagedHooks", "milliseconds"]

_TOLD_AFTER = 61
"""Of native/hooks.c: a prime, see `keelscope.unwinding`."""


class _Timed(Protocol):
    seconds: float


class PagedHooks:
    """What hooks on modules have to do with the page of their step."""

    _modules: list[weakref.ref[nn.Module]]
    _duties: Duties
    _reference: weakref.ref[Owner]

    def __init__(self) -> None:
        self.page: Page | None = None
        """What the kernel takes of this step."""
        self.is_paged = False
        """Whether the kernel may take calls from the next step on."""
        self.on_gradient: Callable[[], None] = _nothing
        """Called with the first gradient of a step, before it is measured."""
        self.seconds = 0.0
        self._step = StepRecord()
        self._breaks = Breaks()

    def open_page(self, step: StepRecord) -> None:
        """Begin a step."""
        self.close_page()
        self._step = step
        if self.is_paged and HAS_HOOK_DICTS:
            self.page = step.page = kernel.page(self._modules, self._reference, self._duties.codes())

    def close_page(self) -> None:
        """Let the kernel take nothing more of the step."""
        page, self.page = self.page, None
        if page is not None:
            page.armed = page.open = 0
            self.seconds += page.seconds

    def hold(self) -> None:
        """The forward of the step is over: what comes now is looked at in Python first."""
        if self.page is not None:
            self.page.armed = 0

    def watched_by(self, probe: Probe) -> NDArray[np.bool_]:
        """Whether a probe looks at each site, ``[site]``."""
        return self._duties.watched_by(probe)

    def _arms(self, page: Page) -> bool:
        """Whether the kernel may take the rest of this forward."""
        if page.armed or page.reached or page is not self.page:
            return False
        page.armed = 1
        return True

    @contained
    def _at_break(self, node: Node) -> None:
        """The last of as many nodes as the kernel puts hooks on before it tells."""
        self._breaks.passed(node, _TOLD_AFTER)

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
            slots = measure(self._duties[site].gradients, (as_output,), module, self._step.board, self)
            self._step.arrivals.setdefault(site, []).append(slots)
        self.seconds += time.perf_counter() - start


def milliseconds(hooks: Iterable[_Timed]) -> float:
    """Host time spent in hooks since the last call, in milliseconds."""
    several = list(hooks)
    seconds = sum(each.seconds for each in several)
    for each in several:
        each.seconds = 0.0
    return 1e3 * seconds


def _nothing() -> None:
    """Nobody asked."""
