"""Runs made by hand, for tests of what reads them: any profile over depth, at any number of steps, in memory."""

from __future__ import annotations

import numpy as np

from keelscope.store.memory import MemoryWriter
from keelscope.store.schema import GroupSpec, Row, RunInfo, RunLayout, Site, Stack, StatisticSpec

GROUPS = {
    "outputs": ("mean", "variance", "rms", "nonfinite_count"),
    "gradients": ("norm", "rms", "nonfinite_count", "late_token_level", "late_token_zero_fraction"),
    "parameters": ("norm", "rms"),
    "parameter_gradients": ("norm", "rms"),
}


def make_run(
    gradient,
    *,
    late=None,
    late_zeros=0.0,
    parameter=None,
    variance=None,
    sublayers=1,
    stack=True,
    groups=tuple(GROUPS),
    coverage=(),
    size=lambda i: 20,
    scalars=None,
    title="run",
    edit=None,
):
    """A model embedding -> layers.0 .. layers.n-1 -> head.

    Args:
        gradient: RMS of the output gradient ``[layer]``, or ``[step, layer]``; NaN: not observed.
        late: late-token level in decades, as `gradient`; None: not recorded.
        late_zeros: share of late tokens without gradient.
        parameter: parameter-gradient norm of each layer (0.8 of it in the weight, 0.6 in the bias); 0.01 by default.
        variance: output variance of each layer; 1 by default.
        sublayers: per layer; 0 for not known.
        stack: False for a chain of modules that is no stack.
        groups: which are recorded.
        coverage: the table.
        size: number of parameters of layer i, four fifths of them in the weight.
        scalars: name -> ``[step]``.
        title: title of the run.
        edit: called with (step index, values, observed) before a row is recorded, to change it.

    Returns:
        The run, with steps 0, 10, 20, ...
    """
    table = np.atleast_2d(np.asarray(gradient, dtype=float))
    steps, n = table.shape
    sites = _sites(n, size, stack=stack)
    found = (Stack("layers", "Block", n, sublayers, main=True),) if stack else ()
    specs = tuple(GroupSpec(g, tuple(StatisticSpec(s, "1", s) for s in GROUPS[g]), sites[g]) for g in groups)
    info = RunInfo(title, "id", "2026-01-01T00:00:00+00:00", "Model", 12345, "cpu", "torch 2", 0, found)
    writer = MemoryWriter(RunLayout(info, specs, tuple(scalars or ()), tuple(coverage)))
    columns = {
        "gradient": table,
        "late": _spread(late, table, np.nan),
        "parameter": _spread(parameter, table, 0.01),
        "variance": _spread(variance, table, 1.0),
    }
    for k in range(steps):
        values = _row({name: column[k] for name, column in columns.items()}, late_zeros, ends=int(stack))
        values, observed = {g: values[g] for g in groups}, {}
        if edit is not None:
            edit(k, values, observed)
        logged = {name: float(series[k]) for name, series in (scalars or {}).items()}
        writer.append(Row(10 * k, float(k), values, logged, observed))
    return writer.run()


def _spread(values, table, default):
    return np.broadcast_to(np.asarray(default if values is None else values, dtype=float), table.shape)


def _sites(n, size, *, stack):
    place = (lambda i: ("layers", i)) if stack else (lambda i: ("", -1))
    role = "layer" if stack else "other"
    kind = "Block" if stack else "Linear"
    layers = [Site(f"layers.{i}", kind, role, *place(i), numel=0 if stack else size(i)) for i in range(n)]
    owned = [
        Site(f"layers.{i}.{name}", "Parameter", "parameter", *place(i), numel=round(share * size(i)))
        for i in range(n)
        for name, share in (("weight", 0.8), ("bias", 0.2))
    ]
    ends = ([Site("embedding", "Embedding", numel=64)], [Site("head", "Linear", numel=64)]) if stack else ([], [])
    ends_owned = [[Site(f"{s.path}.weight", "Parameter", "parameter", numel=64) for s in end] for end in ends]
    modules = (*ends[0], *layers, *ends[1])
    parameters = (*ends_owned[0], *owned, *ends_owned[1])
    return {
        "outputs": modules,
        "gradients": modules,
        "parameters": parameters,
        "parameter_gradients": parameters,
    }


def _row(levels, late_zeros, *, ends):
    rms = _with_ends(levels["gradient"], ends)
    late = _with_ends(levels["late"], ends)
    zeros = np.zeros_like(rms)
    norms = np.stack([0.8 * levels["parameter"], 0.6 * levels["parameter"]], axis=1).ravel()
    norms = np.concatenate([[0.01] * ends, norms, [0.01] * ends])
    variance = _with_ends(levels["variance"], ends)
    return {
        "outputs": {"mean": zeros, "variance": variance, "rms": np.sqrt(variance), "nonfinite_count": zeros.copy()},
        "gradients": {
            "norm": 8 * rms,
            "rms": rms,
            "nonfinite_count": np.where(np.isnan(rms), np.nan, 0.0),
            "late_token_level": np.where(np.isnan(rms), np.nan, late),
            "late_token_zero_fraction": np.where(np.isnan(rms), np.nan, late_zeros),
        },
        "parameters": {"norm": np.ones_like(norms), "rms": np.ones_like(norms)},
        "parameter_gradients": {"norm": norms, "rms": norms / 4},
    }


def _with_ends(values, ends):
    return np.concatenate([values[:1], values, values[-1:]]) if ends else values.copy()
