"""`Layer`: one row of the layer table, and how the table is filled from `Evidence`.

Numbers keep four things apart: a value, exactly 0, NaN or Inf that was really observed, and None for not observed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keelscope.diagnosis.evidence import LATE_TOKENS, OUTPUT_GRADIENT, PARAMETER_GRADIENT
from keelscope.diagnosis.path_columns import branch_gains, gate_values, norm_gains, shortcut_gains

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence
    from keelscope.store.schema import Site

__all__ = ["Layer", "layer_rows"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer at the reported step. A number that is None was not observed; NaN and Inf were."""

    path: str
    kind: str
    """Class name."""
    role: str
    stack: str
    """Path of the stack it is an entry of; ``""`` outside."""
    depth: float | None
    """Depth of its output on the depth axis; None off the axis (embedding, final norm, head)."""
    output_variance: float | None
    gradient_rms: float | None
    """RMS of the gradient with respect to its output."""
    late_token_gradient: float | None
    """Typical gradient norm of one token in the later half of the positions (a geometric mean)."""
    ratio: float | None
    """`gradient_rms` divided by that of the next row towards the output: below 1 the gradient shrinks on its way in."""
    parameter_gradient_norm: float | None
    """Root of the summed squares over the parameters it owns or contains, each counted in one row."""
    weight_norm: float | None
    """The same for the parameters themselves."""
    tied_to: str = ""
    """Path of the row that holds its parameters when they are shared and counted there."""
    norm_gain: float | None = None
    """Geometric mean of the Jacobian gains of its norms: of those on residual sums where it has such, else of all."""
    shortcut_gain: float | None = None
    """Decades (log10) that shortcuts alone put between the top of the stream and the stream entering it; below 0 the
    shortcut loses."""
    branch_gain: float | None = None
    """v = ms(F) / ms(x), mean over its sub-layers."""
    gate: float | None = None
    """Mean effective weight of its gates and learnable residual weights."""


def layer_rows(evidence: Evidence) -> tuple[Layer, ...]:
    """The layer table in execution order.

    Args:
        evidence: a run at one step.

    Returns:
        Entries of all stacks and the parameter-owning modules outside them.
    """
    rows = evidence.rows
    depth = {site.path: float(d) for site, d in zip(evidence.axis.sites, evidence.axis.depth, strict=True)}
    variance = _module_column(evidence, rows, "outputs/variance")
    gradient = _module_column(evidence, rows, OUTPUT_GRADIENT)
    parameter_gradient = _parameter_column(evidence, rows, PARAMETER_GRADIENT)
    weight = _parameter_column(evidence, rows, "parameters/norm")
    late = [_linear(level) for level in _module_column(evidence, rows, LATE_TOKENS)]
    ratio = _ratios(gradient)
    tied = _tied(evidence, rows)
    norm, branch, gate = norm_gains(evidence, rows), branch_gains(evidence, rows), gate_values(evidence, rows)
    shortcut = shortcut_gains(evidence, rows)
    return tuple(
        Layer(
            path=site.path,
            kind=site.kind,
            role=site.role,
            stack=site.stack if site.role == "layer" else "",
            depth=depth.get(site.path),
            output_variance=variance[i],
            gradient_rms=gradient[i],
            late_token_gradient=late[i],
            ratio=ratio[i],
            parameter_gradient_norm=parameter_gradient[i],
            weight_norm=weight[i],
            tied_to=tied.get(site.path, ""),
            norm_gain=norm[i],
            shortcut_gain=shortcut[i],
            branch_gain=branch[i],
            gate=gate[i],
        )
        for i, site in enumerate(rows)
    )


def _module_column(evidence: Evidence, rows: tuple[Site, ...], key: str) -> list[float | None]:
    """One value per row, None where the site was not observed at the reported step."""
    values = evidence.at_step(key)
    if values is None:
        return [None] * len(rows)
    observed = evidence.observed(key)[-1]
    place = {site.path: i for i, site in enumerate(evidence.sites(key))}
    indices = [place.get(site.path, -1) for site in rows]
    return [float(values[i]) if i >= 0 and observed[i] else None for i in indices]


def _linear(level: float | None) -> float | None:
    """A level in decades as a value; NaN there means a tensor without positions, which is not observed."""
    return None if level is None or np.isnan(level) else float(np.power(10.0, level))


def _parameter_column(evidence: Evidence, rows: tuple[Site, ...], key: str) -> list[float | None]:
    """Root of the summed squares per row, None where no parameter of the row was observed."""
    values = evidence.at_step(key)
    if values is None:
        return [None] * len(rows)
    observed = evidence.observed(key)[-1]
    norms = evidence.by_owner(key, rows, values, observed)
    some = evidence.by_owner(key, rows, np.ones_like(values), observed)
    return [float(norm) if count > 0 else None for norm, count in zip(norms, some, strict=True)]


def _ratios(gradient: list[float | None]) -> list[float | None]:
    """Each value over the next observed one towards the output; None for the last, or over 0."""
    out: list[float | None] = [None] * len(gradient)
    above: float | None = None
    for i in range(len(gradient) - 1, -1, -1):
        value = gradient[i]
        if value is not None and above is not None and above != 0:
            out[i] = value / above
        above = value if value is not None else above
    return out


def _tied(evidence: Evidence, rows: tuple[Site, ...]) -> dict[str, str]:
    """Rows whose parameters are another row's, by alias."""
    owners = {}
    for site in (*evidence.sites("parameters/norm"), *evidence.sites(PARAMETER_GRADIENT)):
        for alias in site.aliases:
            owners[alias.rpartition(".")[0]] = site.path.rpartition(".")[0]
    paths = {site.path for site in rows}
    return {path: owner for path, owner in owners.items() if path in paths}
