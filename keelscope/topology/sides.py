"""The two sides of a residual addition: what the shortcut carries, and what the branch reads, computes and puts out.

`keelscope.topology.reading` asks for both and adds what happens to the sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from keelscope.topology.additions import Addition
from keelscope.topology.coefficients import UNKNOWN, Coefficient, Coefficients, product, total
from keelscope.topology.graph import Key
from keelscope.topology.trails import Entry, Trail, Trails

__all__ = ["BranchSide", "ShortcutSide", "Sides"]


@dataclass(frozen=True, slots=True)
class ShortcutSide:
    """The shortcut, from the stream tensor to the addition."""

    alpha: Coefficient
    norm: str | None


@dataclass(frozen=True, slots=True)
class BranchSide:
    """The branch, from the stream tensor to the addition."""

    beta: Coefficient
    entry: Coefficient
    """Weight on what the branch reads."""
    reads: str
    """What the branch reads, as in `keelscope.topology.forms.Parts`."""
    norm_before: str | None
    norm: str | None
    inner_norm: str | None
    region: tuple[Key, ...]
    """Tensors of the branch, stream tensor excluded."""
    outputs: tuple[Key, ...]
    """The tensor that is the branch, weight excluded, then the same before dropout, casts and views."""
    note: str = ""
    """What could not be read."""


class Sides:
    """Reads the two sides of additions of one graph.

    Args:
        trails: follows tensors through the graph.
        weights: reads weights.
    """

    def __init__(self, trails: Trails, weights: Coefficients) -> None:
        self._trails = trails
        self._weights = weights

    def shortcut(self, addition: Addition) -> ShortcutSide:
        """The shortcut of an addition."""
        found: list[Coefficient] = []
        norm: str | None = None
        for term in addition.shortcuts:
            trail = self._trails.back(term.keys, addition.stream) or Trail()
            found.append(self._weights.of([*term.factors, *trail.factors()]))
            norm = norm or (trail.norms[0].path if trail.norms else None)
        return ShortcutSide(total(found), norm)

    def end(self, addition: Addition) -> Key:
        """The tensor behind the weights on a branch (of its first part)."""
        return self._trails.branch_end(addition.branches[0]).keys[-1]

    def second(self, addition: Addition) -> BranchSide:
        """The branch of an addition that takes up what another addition's branch put out."""
        end = self._trails.branch_end(addition.branches[0])
        beta = self._weights.of([*addition.branches[0].factors, *end.factors()])
        return BranchSide(beta, Coefficient(), "", None, None, None, (), self._outputs(end))

    def branch(self, addition: Addition) -> BranchSide:
        """The branch of an addition."""
        region = self._trails.region(addition.branches, addition.stream)
        entry, note = _one_entry(self._trails.entries(region, addition.stream))
        ends = [self._trails.branch_end(term) for term in addition.branches]
        factors = [(*term.factors, *end.factors()) for term, end in zip(addition.branches, ends, strict=True)]
        norms = {end.norms[0].path if end.norms else None for end in ends}
        norm = norms.pop() if len(norms) == 1 else None
        inner = self._trails.inner_norm(ends[0].keys[-1]) if len(ends) == 1 and norm is None else None
        # A weight that depends on the data is a part of F.
        weights = [weight for factor in entry.factors if not (weight := self._weights.of([factor])).depends_on_data]
        weight = product(weights)
        return BranchSide(
            _common([self._weights.of(found) for found in factors]),
            weight,
            _written(entry, weight),
            entry.norms[0].path if entry.norms else None,
            norm,
            None if inner is None or inner in entry.norms else inner.path,
            tuple(key for key in region if key != addition.stream),
            self._outputs(ends[0]) if len(ends) == 1 else (),
            note,
        )

    def _outputs(self, end: Trail) -> tuple[Key, ...]:
        outputs = [end.keys[0]]
        for key, following in itertools.pairwise(end.keys):
            if not self._trails.weight(key, self._weights).is_one:
                outputs.clear()
            outputs.append(following)
        return tuple(outputs)


def _common(weights: Sequence[Coefficient]) -> Coefficient:
    """The weight that several parts of a branch share."""
    return weights[0] if all(weight == weights[0] for weight in weights) else UNKNOWN


def _one_entry(entries: set[Entry]) -> tuple[Entry, str]:
    """The way in which a branch reads the stream, and a note if it reads it in several."""
    if not entries:
        return Entry(), "nothing of the branch reads the stream directly"
    ways = {_letters(entry) for entry in entries}
    plain = sorted(entries, key=lambda entry: (entry.shifted, [norm.path for norm in entry.norms], len(entry.factors)))
    if len(ways) > 1:
        return plain[0], "the branch reads the stream both through a norm and directly"
    return plain[0], ""


def _letters(entry: Entry) -> str:
    return entry.norms[-1].kind if entry.norms else ""


def _written(entry: Entry, weight: Coefficient) -> str:
    letters = [*([] if weight.is_one else ["c"]), *([_letters(entry)] if entry.norms else []), "x"]
    return " ".join(letters) + (" + c" if entry.shifted and not entry.norms else "")
