"""What is known beside the graph: sub-layers that modules declare, and stack entries that ran without gradient.

`keelscope.topology.reader` gathers it when the forward is over, and adds it to what the graph shows.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn
from torch.autograd.graph import Node

from keelscope.topology.declared import Declaration, declarations
from keelscope.topology.listener import Listener
from keelscope.topology.merging import Placed, merged, without_repeats
from keelscope.topology.reading import Reading
from keelscope.topology.records import Topology

__all__ = ["Extras"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Extras:
    """Declarations, when their modules ran, and stack entries without gradient."""

    declarations: tuple[Declaration, ...] = ()
    ended: Mapping[str, int] | None = None
    """When the first call of a module ended, by autograd's sequence numbers."""
    frozen: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, listener: Listener, entries: Container[str]) -> Extras:
        """Gather them.

        Args:
            model: the model.
            listener: what ran.
            entries: paths of stack entries.

        Returns:
            The extras.
        """
        frozen = tuple(path for path in listener.without_gradient if path in entries)
        return cls(tuple(declarations(model)), listener.ended(), frozen)

    def added(self, reading: Reading, regions: Mapping[Node, Topology]) -> Topology:
        """What the graph shows, completed.

        Args:
            reading: the reading of the forward.
            regions: what hidden regions showed when they ran again.

        Returns:
            One topology, each sub-layer once.
        """
        topology, outline = reading.read()
        keep = [not any(d.covers(s) for d in self.declarations) for s in topology.sublayers]
        if not all(keep):
            topology = replace(topology, sublayers=_kept(tuple(topology.sublayers), keep), further=())
            outline = replace(outline, numbers=_kept(outline.numbers, keep))
        topology = without_repeats(merged(topology, outline, regions, self._declared()))
        reasons = [d.problem for d in self.declarations if d.problem]
        if self.frozen:
            span = self.frozen[0] if len(self.frozen) == 1 else f"{self.frozen[0]} to {self.frozen[-1]}"
            reasons.append(f"{span}: no gradient is computed there, so that sub-layers inside are not seen.")
        return replace(topology, unknown=(*topology.unknown, *reasons))

    def _declared(self) -> dict[str, list[Placed]]:
        """Declared sub-layers of modules that ran; those of one container are one stream."""
        streams: dict[str, list[Placed]] = {}
        ended = self.ended or {}
        for declaration in self.declarations:
            if declaration.path in ended:
                number = ended[declaration.path]
                placed = [(number, record) for record in declaration.sublayers]
                streams.setdefault(declaration.path.rpartition(".")[0], []).extend(placed)
        return streams


def _kept(values: tuple[_T, ...], keep: list[bool]) -> tuple[_T, ...]:
    return tuple(value for value, wanted in zip(values, keep, strict=True) if wanted)
