"""What takes the ordinary calls of one recorded step, without the kernel.

The compiled `keelscope._kernel.Page` does the same work and is preferred, see `make_page`: the first call of each
module and the first gradient of its output, where both are plain tensors in host memory. Everything else is left to
`keelscope.hooks`, which takes several times as long.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from keelscope import kernel
from keelscope.batch import WIDTH, Batch
from keelscope.containment import warn_once
from keelscope.hostsums import Shape
from keelscope.kernel import COLUMNS, Routine
from keelscope.leaves import hook_plainly, hookable
from keelscope.onhost import place_of

if TYPE_CHECKING:
    from keelscope._kernel import Page
    from keelscope.unwinding import Breaks

__all__ = ["AnyPage", "Arrival", "SlowPage", "make_page"]

AnyPage: TypeAlias = "Page | SlowPage"

_CALLED, _ARRIVED, _ELSEWHERE = 1, 2, 4
_FOR_GRADIENT = len(COLUMNS)
_ROUTINES = (1 << _FOR_GRADIENT) - 1
_LATE_TOKENS = 1 << Routine.LATE_TOKENS
_LEFT_ALONE = 0x80

_graph_task = torch._C._current_graph_task_id
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state


class SlowPage:
    """One step; for what it is made of see `keelscope.kernel.page`.

    Args:
        modules: by site.
        owner: told of gradients.
        breaks: told of nodes.
        duties: of each site.
        batch: where entries wait until they are summed.
    """

    def __init__(
        self,
        modules: list[weakref.ref[nn.Module]],
        owner: weakref.ref[Any],
        breaks: Breaks,
        duties: bytes,
        batch: Batch,
    ) -> None:
        self._modules, self._breaks = modules, breaks
        self.owner = owner
        self._duties, self._seen = bytearray(duties), bytearray(len(duties))
        self._batch = batch
        self._outputs, self._gradients = np.zeros((2, len(duties), WIDTH))  # [site, column] each
        self.armed = 0
        """Whether calls are taken."""
        self.open = 1
        """Whether gradients are taken."""
        self.reached = 0
        """Whether a gradient has arrived."""
        self.seconds = 0.0

    def look(self, site: int, module: nn.Module, args: object, kwargs: object, output: object) -> bool:
        """Take a call of a module, if it is an ordinary one.

        Args:
            site: of the module.
            module: that ran.
            args: what it was given.
            kwargs: by name.
            output: what it put out.

        Returns:
            Whether the call is recorded.
        """
        if not self.armed or site >= len(self._seen) or self._seen[site] or self._duties[site] & _LEFT_ALONE:
            return False
        start = time.perf_counter()
        try:
            done = self._look(site, module, args, kwargs, output)
        except Exception:  # a tensor that is not what it says: Python looks at it with more care
            return False
        if done:
            self.seconds += time.perf_counter() - start
        return done

    def _look(self, site: int, module: nn.Module, args: Any, kwargs: Any, output: object) -> bool:
        if type(output) is not Tensor or self._modules[site]() is not module or not _is_plain_forward():
            return False
        place = place_of(output) if output.requires_grad else None
        if place is None:
            return False
        duty = self._duties[site]
        of_gradient = duty >> _FOR_GRADIENT
        if of_gradient:
            shape = _tokens(output) if of_gradient & _LATE_TOKENS else None
            if not hook_plainly(
                hookable(output, (args, kwargs)), Arrival(self, site, of_gradient, shape), self._breaks
            ):
                return False
        self._seen[site] |= _CALLED
        of_output = duty & _ROUTINES
        if of_output:
            shape = _tokens(output) if of_output & _LATE_TOKENS else None
            self._batch.put(place, of_output, shape, self._outputs, site)
        return True

    def arrive(self, hook: Arrival, gradient: Tensor) -> None:
        """Take a gradient of a call that was taken.

        Args:
            hook: where it arrived.
            gradient: of the output, or of the tensor that this is a view of.
        """
        site = hook.site
        if not self.reached:
            self.reached, self.armed = 1, 0
            owner = self.owner()
            if owner is not None:
                owner._first_arrives()
        start = time.perf_counter()
        place = None if self._seen[site] & (_ARRIVED | _ELSEWHERE) else place_of(gradient)
        if place is not None:
            self._seen[site] |= _ARRIVED
            self._batch.put(place, hook.routines, hook.shape, self._gradients, site)
            self.seconds += time.perf_counter() - start
            return
        self._seen[site] |= _ELSEWHERE
        owner = self.owner()
        if owner is not None:
            owner._another_arrives(site, gradient, hook.shape)

    def leave(self, site: int) -> None:
        """Leave a site that was not seen yet to Python."""
        if 0 <= site < len(self._seen) and not self._seen[site]:
            self._duties[site] |= _LEFT_ALONE

    def has(self, site: int) -> bool:
        """Whether a call of the site is recorded here."""
        return 0 <= site < len(self._seen) and self._seen[site] != 0

    def take(self) -> tuple[bytes, bytes]:
        """What was seen.

        Returns:
            ``[site]`` and, as packed doubles, terms ``[site, column]``.
        """
        self._batch.flush()
        return bytes(self._seen), np.concatenate([self._outputs, self._gradients], axis=1).tobytes()


@dataclass(slots=True, eq=False)
class Arrival:
    """The hook on the output of one call."""

    page: SlowPage
    site: int
    routines: int
    shape: Shape | None

    def __call__(self, gradient: Tensor) -> None:
        """Take the gradient; returning None leaves it as it is."""
        if self.page.open:
            try:
                self.page.arrive(self, gradient)
            except Exception as error:  # no fault of ours reaches the training
                owner = self.page.owner()
                if owner is not None:
                    warn_once(owner, error)


def make_page(
    modules: list[weakref.ref[nn.Module]], owner: weakref.ref[Any], breaks: Breaks, duties: bytes, batch: Batch
) -> AnyPage:
    """The compiled form where there is one.

    Args:
        modules: see `keelscope.kernel.page`.
        owner: see there.
        breaks: see there.
        duties: see there.
        batch: for the form in Python.

    Returns:
        The page.
    """
    return kernel.page(modules, owner, breaks, duties) or SlowPage(modules, owner, breaks, duties, batch)


def _tokens(output: Tensor) -> Shape | None:
    return tuple(output.shape) if output.dim() == 3 else None


def _is_plain_forward() -> bool:
    """Whether this is an ordinary forward that trains: no recomputation in backward, not traced or transformed."""
    return torch.is_grad_enabled() and _transforms() is None and _tracing() is None and _graph_task() == -1
