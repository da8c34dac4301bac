"""The records that both halves share: what a run file holds, as frozen values without torch or h5py.

The write half fills a `RunLayout` once, when the first recorded step is complete, and then appends `Row`s.
The read half gets the same records back from the file. `docs/file-format.md` shows where each field is stored.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "SCALARS",
    "SCHEMA_VERSION",
    "CoverageEntry",
    "GroupSpec",
    "Later",
    "PartInfo",
    "Row",
    "RunInfo",
    "RunLayout",
    "Site",
    "Stack",
    "StatisticSpec",
    "SublayerInfo",
]

SCHEMA_VERSION = "1.2"
SCALARS = "scalars"


@dataclass(frozen=True, slots=True)
class Site:
    """One entry of the site axis: a module, or a parameter in the parameter groups."""

    path: str
    """Dotted path as in ``model.named_modules()``; ``""`` is the model itself."""
    kind: str
    """Class name of the module, or ``"Parameter"``."""
    role: str = "other"
    """``"layer"`` (an entry of a stack: its output is the stream), ``"branch"`` (a module inside such an entry),
    ``"norm"``, ``"parameter"``, ``"sublayer"`` (a residual addition), ``"gate"`` (a gate or residual weight) or
    ``"other"``."""
    stack: str = ""
    """Path of the stack it belongs to, ``""`` outside every stack."""
    position: int = -1
    """Index of the stack entry it belongs to, 0 at the input side; -1 outside."""
    numel: int = 0
    """Number of parameter entries the site owns directly."""
    aliases: tuple[str, ...] = ()
    """Other paths of the same object (tied weights, a module registered twice)."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A chain of like blocks, in execution order."""

    path: str
    """Path of its container, e.g. ``"encoder.layer"``; ``"."`` is the model itself, several are joined by commas."""
    kind: str
    """Class name of its entries."""
    length: int
    """Number of entries."""
    sublayers: int = 0
    """Residual sub-layers per entry; 0 when it is not known, and depth is then counted in entries."""
    main: bool = False
    """Whether it is the longest one, along which depth is counted first."""
    chained: bool = False
    """Whether most entries were seen to take what the one before gave; heads beside each other do not."""


@dataclass(frozen=True, slots=True)
class SublayerInfo:
    """One residual addition of the model, as read from the autograd graph of the first recorded step."""

    form: str
    """Its equation, for example ``"n(a x + F(n x))"``; ``"unknown"`` where a part could not be read."""
    schemes: tuple[str, ...] = ()
    """Every residual scheme of that form."""
    site: str = ""
    """Module whose output is the stream after it, ``""`` if none is."""
    branch: str = ""
    """Module whose output is the branch, ``""`` if none is."""
    norm_before: str = ""
    """Norm through which the branch reads the stream."""
    norm_after: str = ""
    """Norm on the sum."""
    alpha: float | None = None
    """Weight of the shortcut, if it is one number."""
    beta: float | None = None
    """Weight of the branch, if it is one number."""
    gates: tuple[str, ...] = ()
    """Sites of the group ``gates`` that weigh its shortcut or its branch."""
    stream: int = 0
    """Number of the residual stream it adds to; 0 in a model with one stream."""


@dataclass(frozen=True, slots=True)
class CoverageEntry:
    """Whether one module or parameter was observed, and why not."""

    path: str
    what: str
    """``"module"`` or ``"parameter"``."""
    status: str
    """``"observed"`` or a reason in one word: ``"frozen"``, ``"never_called"``, ``"disconnected"``, ..."""
    reason: str = ""
    """One sentence; empty when observed."""
    first: str = field(default="", compare=False)
    """Status on the first row, where a later one observed it; else empty."""
    first_reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class StatisticSpec:
    """What a reader needs to know about one statistic."""

    name: str
    unit: str
    doc: str
    dims: tuple[str, ...] = ()
    """Names of axes after ``[step, site]``."""
    coords: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Coordinate values of each extra axis, e.g. ``{"quantile": (0.1, 0.5, 0.9)}``."""
    across_ranks: str = ""
    """How the finished values of several ranks combine: ``"sum"``, ``"max"``, ``"mean"``, ``"rms"`` (root of the mean
    of squares), ``"root_sum_squares"``, or ``""``: they cannot, and the first rank that saw a site is shown."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group of statistics over one site axis, recorded by one probe."""

    name: str
    """Group name in the file, e.g. ``"gradients"``."""
    statistics: tuple[StatisticSpec, ...]
    sites: tuple[Site, ...]
    """The site axis: observed sites in execution order, then the others in registration order."""
    probe: str = ""
    """``package:name`` of the probe that recorded it."""
    probe_version: int = 1
    provenance: Mapping[str, str] = field(default_factory=dict)
    """How the numbers were taken, e.g. ``{"scale": "unscaled", "clip": "before", "reduce": "local"}``."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What is known about a run as a whole. Nothing here identifies a person, a host or a path."""

    title: str
    run_id: str
    created_at: str
    """ISO 8601, UTC."""
    model_class: str = ""
    n_parameters: int = 0
    device: str = ""
    training_library: str = ""
    """For example ``"torch 2.13.0"``."""
    seed: int = -1
    stacks: tuple[Stack, ...] = ()
    sublayers: Sequence[SublayerInfo] = ()
    """Residual sub-layers in execution order; empty where none were found or the structure could not be read."""
    config: Mapping[str, object] = field(default_factory=dict)
    """JSON values given by the user or by `keelscope train`."""


@dataclass(frozen=True, slots=True)
class PartInfo:
    """Which piece of a run a file holds: of which rank, and the how-manieth file of it."""

    rank: int = 0
    world_size: int = 1
    part: int = 0
    session_id: str = ""
    """Random, the same in all parts that one process wrote."""
    first_step: int = 0
    """Step of its first row."""
    resumed_at_step: int = -1
    """First step of a session that went on with an earlier run, -1 in the first session. Rows of earlier sessions from
    this step on were overtaken."""


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Everything that is fixed when the file is created."""

    info: RunInfo
    groups: tuple[GroupSpec, ...]
    scalars: tuple[str, ...] = ()
    """Names of the scalar series, e.g. ``("loss", "lr")``; each is ``[step]``."""
    coverage: Sequence[CoverageEntry] = ()
    part: PartInfo = PartInfo()


class Later(Protocol):
    """Values of one group that are finished when they are written, with those of the rows beside it."""

    @property
    def key(self) -> Hashable:
        """Those with the same one can be finished together."""

    @property
    def total(self) -> str:
        """The scalar that is the norm of all sites that were seen, whose statistic `norm` says theirs; or empty."""

    def together(self, several: Sequence[Any], /) -> tuple[Mapping[str, NDArray[np.float64]], NDArray[np.bool_] | None]:
        """Finish those of several rows.

        Args:
            several: with the same key.

        Returns:
            Statistic -> ``[row, site, ...]``, of at least the group's sites; and ``[row, site]``, whether they were
            seen, None where those were that have a value.
        """


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded optimizer step."""

    step: int
    """Completed optimizer steps before it, from 0."""
    wall_time: float
    """Seconds since the run was created."""
    values: Mapping[str, Mapping[str, NDArray[np.floating]]]
    """``values[group][statistic]`` is ``[site, ...]``; NaN where a site was not observed on this step.
    A group that was not recorded on this step is absent."""
    scalars: Mapping[str, float | None] = field(default_factory=dict)
    """None of one that a group in `later` tells."""
    observed: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    """``observed[group]`` is ``[site]``: whether the site was seen on this step, so that a NaN there is a computed one.
    For a group left out here, a site counts as observed when any of its statistics is not NaN."""
    later: Mapping[str, Later] = field(default_factory=dict)
    """Groups in place of those in `values`."""
