"""The residual paths of a run at one step, read from its group ``sublayers``: one record per residual stream.

`paths_of` is asked by the layer table, the explanation, the rules and every format; the numbers come from
`keelscope.analysis.paths` and `keelscope.analysis.attribution`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from keelscope.analysis.attribution import Attribution, attribute
from keelscope.analysis.paths import ShortcutPath, shortcut_path
from keelscope.store.schema import SublayerInfo

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence
    from keelscope.store.schema import Site

__all__ = ["PLAIN_DEPTH", "Paths", "StreamPaths", "paths_of"]

PLAIN_DEPTH = 20
"""Sub-layers up to which a network trains without working shortcuts, if its gradient is level."""

_UNKNOWN = SublayerInfo("unknown")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StreamPaths:
    """One residual stream: its sub-layers in execution order."""

    stream: int
    """Its number."""
    sites: tuple[Site, ...]
    """``[sublayer]``: entries of the group ``sublayers``."""
    infos: tuple[SublayerInfo, ...]
    """``[sublayer]``: what the structure says of each."""
    values: dict[str, NDArray[np.float64]]
    """Statistic -> ``[sublayer]`` at the step of `Paths`."""
    shortcut: ShortcutPath
    attribution: Attribution

    def __len__(self) -> int:
        return len(self.sites)

    @property
    def is_normalised(self) -> NDArray[np.bool_]:
        """``[sublayer]``: whether a norm follows the sum."""
        named = np.array([bool(info.norm_after) or info.form.startswith("n(") for info in self.infos], dtype=np.bool_)
        unlike = np.abs(self.attribution.norm) > 0
        return np.asarray(named | unlike)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Paths:
    """All residual streams of a run at one step."""

    step: int
    """The recorded step the numbers are from."""
    streams: tuple[StreamPaths, ...]
    """The longest one first; before it that of the stack which is told of, if that is not the main one."""
    stack: str = ""
    """Path of the stack that `main` belongs to, where several are judged."""

    @property
    def main(self) -> StreamPaths:
        """The stream that is told of: the one with the most sub-layers, or with the most in its stack."""
        return self.streams[0]

    def __repr__(self) -> str:
        told = ", ".join(
            f"stream {s.stream}: {len(s)} sub-layers, shortcut loses {s.shortcut.lost:.3g} decades"
            for s in self.streams
        )
        return f"Paths(step {self.step}; {told})"


def paths_of(evidence: Evidence) -> Paths | None:
    """The residual paths at the reported step, or at the last recorded one before it that holds them.

    Args:
        evidence: a run at one step.

    Returns:
        The paths; None if the run does not hold the group ``sublayers``.
    """
    if "paths" not in evidence.kept:
        evidence.kept["paths"] = _read(evidence)
    return cast("Paths | None", evidence.kept["paths"])


def _read(evidence: Evidence) -> Paths | None:
    spec = evidence.run.groups.get("sublayers")
    if spec is None:
        return None
    keys = [statistic.name for statistic in spec.statistics if not statistic.dims]
    rows = {key: row for key in keys if (row := evidence.latest(f"sublayers/{key}")) is not None}
    if not rows:
        return None
    step = max(at for at, _ in rows.values())
    table = {key: values for key, (at, values) in rows.items() if at == step}
    infos = tuple(evidence.run.info.sublayers)
    infos = infos if len(infos) == len(spec.sites) else (_UNKNOWN,) * len(spec.sites)
    numbers = np.array([info.stream for info in infos])
    streams = [
        _stream(int(number), np.flatnonzero(numbers == number), (spec.sites, infos), table)
        for number in dict.fromkeys(numbers.tolist())
    ]
    streams.sort(key=lambda stream: -len(stream))
    streams[0] = _with_end(streams[0], evidence, step)
    stack = evidence.axis.stack
    if stack is None or stack.main:
        return Paths(step, tuple(streams))
    streams.sort(key=lambda stream: -sum(site.stack == stack.path for site in stream.sites))  # keeps the order else
    return Paths(step, tuple(streams), stack.path)


def _stream(
    number: int,
    members: NDArray[np.intp],
    labels: tuple[tuple[Site, ...], tuple[SublayerInfo, ...]],
    table: dict[str, NDArray[np.float64]],
) -> StreamPaths:
    missing = np.full(members.size, np.nan)
    values = {key: column[members] for key, column in table.items()}

    def of(key: str) -> NDArray[np.float64]:
        return values.get(key, missing)

    top = of("output_gradient")[-1:]
    shortcut = shortcut_path(
        of("shortcut_gain"),
        shortcut_only=of("shortcut_only_gradient"),
        top=float(top[0]) if top.size else float("nan"),
        predicted_slope=of("predicted_slope"),
        branch_gain=of("branch_gain"),
        alpha=of("alpha"),
    )
    sites, infos = (tuple(column[i] for i in members) for column in labels)
    return StreamPaths(number, sites, infos, values, shortcut, _attribution(values, missing))


def _attribution(
    values: dict[str, NDArray[np.float64]], missing: NDArray[np.float64], end: float = float("nan")
) -> Attribution:
    keys = ("output_gradient", "sum_gradient", "shortcut_part", "input_gradient")
    return attribute(*(values.get(key, missing) for key in keys), end=end)


def _with_end(stream: StreamPaths, evidence: Evidence, step: int) -> StreamPaths:
    """The stream with what happens between it and the input end of the model, if that was measured on the same step."""
    missing = np.full(len(stream), np.nan)
    return replace(stream, attribution=_attribution(stream.values, missing, _gradient_at_input(evidence, step)))


def _gradient_at_input(evidence: Evidence, step: int) -> float:
    """Norm of the output gradient of the last row before the first stack entry; NaN if there is none."""
    rows = evidence.rows
    first = next((i for i, site in enumerate(rows) if site.role == "layer"), 0)
    series = evidence.window("gradients/norm")
    if first == 0 or series is None or step not in series.steps:
        return float("nan")
    row = series.values[int(np.flatnonzero(series.steps == step)[0])]
    place = {site.path: i for i, site in enumerate(series.sites)}
    before = [float(row[place[site.path]]) for site in rows[:first] if site.path in place]
    known = [value for value in before if np.isfinite(value)]
    return known[0] if known else float("nan")
