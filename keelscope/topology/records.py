"""Records of a model's residual structure: `Sublayer`, one residual addition, and `Topology`, all of them.

`keelscope.topology.reading` makes them from an autograd graph. They hold names and numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keelscope.topology.coefficients import ONE, Coefficient

__all__ = ["Sublayer", "Topology"]


@dataclass(frozen=True, slots=True)
class Sublayer:
    """One residual addition: ``x <- after(a x + b F(before(x)))``.

    Sites are module paths. A norm that is no module of its own is named after the module around it:
    ``blocks.0:norm``.
    """

    index: int
    """Position in execution order, from 0."""
    addition: str
    """Autograd's name for the operation that adds."""
    shortcut: str | None
    """Site whose output enters as x, if any."""
    branch: str | None
    """Site whose output is the branch, weight b excluded, if any."""
    alpha: Coefficient
    """Weight a of the shortcut."""
    beta: Coefficient
    """Weight b of the branch."""
    norm_before: str | None
    """Norm through which the branch reads the stream."""
    norm_after: str | None
    """Norm on the sum: the shortcut passes it."""
    branch_norm: str | None
    """Norm on the branch's output."""
    site: str | None
    """Site whose output is the stream after this sub-layer, if any."""
    branch_sites: tuple[str, ...]
    """Modules that ran inside the branch, in the order in which they ended."""
    form: str
    """The equation, as in `keelscope.topology.forms.equation`; ``unknown`` if a part of it could not be read."""
    schemes: tuple[str, ...]
    """All schemes whose sub-layers have this form; empty if none has."""
    inner_norm: str | None = None
    """Norm right before the branch's last product of matrices."""
    shortcut_norm: str | None = None
    """Norm between the tensor that the branch reads and the addition, on the shortcut."""
    entry: Coefficient = ONE
    """Weight c on what the branch reads."""
    activation: str | None = None
    """Activation on the sum: the shortcut passes it."""
    read_by: str | None = None
    """A module whose input is the stream after this sub-layer, if any."""
    stream: int = 0
    """Which stream it adds to: sub-layers of one stream follow each other without a product of matrices between. -1 in
    `Topology.further`."""
    part_of: int | None = None
    """For an addition in `Topology.further`: the index of the sub-layer it belongs to."""
    note: str = ""
    """What could not be read here."""
    number: int = field(default=-1, compare=False, repr=False)
    """Autograd's own number of the addition in the graph that was read, by which the graph's owner finds it again."""

    @property
    def is_declared(self) -> bool:
        """Whether the model says so itself (`keelscope.topology.declared`)."""
        return self.addition == "declared"


@dataclass(frozen=True, slots=True)
class Topology:
    """The residual sub-layers of a model in execution order."""

    sublayers: Sequence[Sublayer]
    further: tuple[Sublayer, ...] = ()
    """Residual additions that are no sub-layers of their own: a second stream that takes up the same branch, an
    addition inside a branch, a further call of the same modules."""
    schemes: tuple[tuple[str, ...], ...] = ()
    """Per stream, the schemes that all its sub-layers follow."""
    unknown: tuple[str, ...] = ()
    """What could not be read, and why."""
    following: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Paths of stack entries that take what the entry before them gave."""

    def __len__(self) -> int:
        return len(self.sublayers)

    def of_stream(self, stream: int) -> tuple[Sublayer, ...]:
        """The sub-layers of one stream.

        Args:
            stream: number of the stream.

        Returns:
            In execution order.
        """
        return tuple(sublayer for sublayer in self.sublayers if sublayer.stream == stream)

    def forms(self) -> dict[str, int]:
        """How many sub-layers have each form.

        Returns:
            Form -> number, in order of first appearance.
        """
        counts: dict[str, int] = {}
        for sublayer in self.sublayers:
            counts[sublayer.form] = counts.get(sublayer.form, 0) + 1
        return counts
