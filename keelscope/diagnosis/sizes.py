"""`ModelSizes`: how deep and wide a recorded model is, so that a reference model of the same size can be built.

Depth comes from the depth axis and the residual structure, the rest from the run's configuration, else from the number
of entries of its norms. Used by ``keelscope compare --like``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keelscope.diagnosis.axis import depth_axis
from keelscope.errors import UsageError

if TYPE_CHECKING:
    from keelscope.store.reader import Run

__all__ = ["ModelSizes", "sizes_of_run"]

_PER_BLOCK = 2
_HEAD_WIDTHS = (64, 32, 128, 16, 8, 4, 2)  # features per head to try where the heads are not known


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a reference model."""

    depth: int
    """Residual sub-layers, an even number."""
    width: int
    heads: int
    vocabulary: int | None = None
    """None where it is not known."""
    notes: tuple[str, ...] = ()
    """What had to be assumed, each a sentence."""

    @property
    def options(self) -> dict[str, int]:
        """As options of ``scheme:NAME``."""
        known = {"vocabulary": self.vocabulary} if self.vocabulary else {}
        return {"depth": self.depth, "width": self.width, "heads": self.heads, **known}


def sizes_of_run(run: Run) -> ModelSizes:
    """The sizes of a recorded model.

    Args:
        run: any run.

    Returns:
        Depth, width, heads and vocabulary.

    Raises:
        UsageError: if depth or width are not in the run, or no reference model can have them.
    """
    config, notes = run.info.config, list[str]()
    depth = _depth(run, notes)
    width = _whole(config, "width") or _norm_width(run)
    if not width:
        raise UsageError(f"{_name(run)} does not tell its width: it has no norms, and its config no width=.")
    if width % 2:
        raise UsageError(f"{_name(run)} is {width} wide; a reference model needs an even width.")
    heads = _whole(config, "heads")
    if not heads or width % (2 * heads):
        heads = next(width // features for features in _HEAD_WIDTHS if width % features == 0)
        notes.append(f"Its attention heads are not known, or do not fit its width: {heads} is assumed.")
    return ModelSizes(depth, width, heads, _whole(config, "vocabulary") or None, tuple(notes))


def _depth(run: Run, notes: list[str]) -> int:
    """Sub-layers of the main stack; where it does not say, one per block that adds, two per block of unknown kind."""
    axis, found = depth_axis(run), run.info.sublayers
    streams = Counter(sublayer.stream for sublayer in found)
    depth = int(axis.length) if axis.unit == "sub-layer" else max(streams.values(), default=0)
    blocks = int(axis.length) if axis.unit == "block" else 0
    if depth < blocks:
        each = 1 if found else _PER_BLOCK
        depth = each * blocks
        notes.append(f"Its sub-layers per block are not known: {each} for each of {blocks} blocks is assumed.")
    if not depth:
        raise UsageError(f"{_name(run)} has no residual stack, so that there is no depth to give a reference model.")
    if depth % _PER_BLOCK:
        notes.append(f"Its depth of {depth} is odd, and a reference block holds two: {depth + 1} is taken.")
    return depth + depth % _PER_BLOCK


def _norm_width(run: Run) -> int:
    """The most frequent number of entries that weights of norms have."""
    norms = {site.path for group in run.groups.values() for site in group.sites if site.role == "norm"}
    spec = run.groups.get("parameters") or run.groups.get("parameter_gradients")
    sizes = Counter(
        site.numel
        for site in (spec.sites if spec is not None else ())
        if site.path.endswith(".weight") and site.path.rpartition(".")[0] in norms
    )
    return sizes.most_common(1)[0][0] if sizes else 0


def _whole(config: Mapping[str, object], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _name(run: Run) -> str:
    return run.info.title or run.info.model_class or "the run"
