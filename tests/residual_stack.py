"""A residual stack in plain numpy, forward and backward written out, and runs made of what it measures.

``x <- n(a x + b W n(x))`` per token, in float64, with the RMS norms and the weights chosen by the caller: the slow and
obvious reference for everything that explains a gradient profile.
"""

from __future__ import annotations

import numpy as np

from keelscope.store.memory import MemoryWriter
from keelscope.store.schema import GroupSpec, Row, RunInfo, RunLayout, Site, Stack, StatisticSpec, SublayerInfo

EPSILON = 1e-12
SUBLAYER = (
    "alpha", "branch_gain", "cosine", "shortcut_gain", "predicted_slope", "absorbed_fraction", "output_gradient",
    "sum_gradient", "shortcut_part", "branch_part", "path_cosine", "input_gradient", "shortcut_only_gradient",
)  # fmt: skip
GATE = ("value", "minimum", "maximum", "saturated_fraction", "gradient")


def normalise(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)


def norm_vjp(x, g):
    s = np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    y = x / s
    return (g - y * (y * g).mean(-1, keepdims=True)) / s


def norm_gain(x):
    """Frobenius norm of the Jacobian over sqrt(d), root mean square over tokens, from the whole matrix."""
    width = x.shape[-1]
    jacobians = [np.stack([norm_vjp(row, unit) for unit in np.eye(width)]) for row in x]
    return np.sqrt(np.mean([(j**2).sum() / width for j in jacobians]))


def measure(depth, *, alpha=1.0, beta=1.0, pre=False, post=False, scale=1.0, width=16, tokens=6, seed=0, embedding=1.0):
    """Statistics ``[sublayer]`` of a stack of random linear branches, and the gradient at the input.

    Args:
        depth: number of sub-layers.
        alpha: weight of every shortcut, or ``[sublayer]``.
        beta: weight of every branch, or ``[sublayer]``.
        pre: whether branches read the stream through a norm.
        post: whether a norm follows the sum.
        scale: standard deviation of a branch's gain.
        width: features.
        tokens: tokens.
        seed: of weights, input and top gradient.
        embedding: RMS of the input.
    """
    rng = np.random.default_rng(seed)
    a, b = np.broadcast_to(alpha, depth), np.broadcast_to(beta, depth)
    weights = rng.normal(0, scale / np.sqrt(width), (depth, width, width))
    stream = [embedding * rng.normal(size=(tokens, width))]
    sums = []
    for layer in range(depth):
        x = stream[-1]
        sums.append(a[layer] * x + b[layer] * (normalise(x) if pre else x) @ weights[layer])
        stream.append(normalise(sums[-1]) if post else sums[-1])
    values = {name: np.full(depth, np.nan) for name in SUBLAYER}
    g = c = rng.normal(size=(tokens, width))
    for layer in range(depth - 1, -1, -1):
        x, z = stream[layer], sums[layer]
        at_sum, c_sum = (norm_vjp(z, t) if post else t for t in (g, c))
        inner = b[layer] * at_sum @ weights[layer].T
        parts = a[layer] * at_sum, norm_vjp(x, inner) if pre else inner
        branch, gain = z - a[layer] * x, norm_gain(z) if post else 1.0
        ms = [(t**2).mean() for t in (branch, x)]
        v = ms[0] / ms[1]
        found = {
            "alpha": abs(a[layer]),
            "branch_gain": v,
            "cosine": cosine(branch, x),
            "shortcut_gain": abs(a[layer]) * gain,
            "predicted_slope": 0.5 * np.log10(1 + v / a[layer] ** 2) if post else -np.log10(max(a[layer], 1e-300)),
            "absorbed_fraction": 0.0,
            "output_gradient": np.linalg.norm(g),
            "sum_gradient": np.linalg.norm(at_sum),
            "shortcut_part": np.linalg.norm(parts[0]),
            "branch_part": np.linalg.norm(parts[1]),
            "path_cosine": cosine(*parts),
            "input_gradient": np.linalg.norm(parts[0] + parts[1]),
            "shortcut_only_gradient": np.linalg.norm(a[layer] * c_sum),
        }
        for name, value in found.items():
            values[name][layer] = value
        g, c = parts[0] + parts[1], a[layer] * c_sum
    return values


def cosine(a, b):
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return float((a * b).sum() / size) if size else np.nan


def recorded(
    values,
    *,
    form="x + F(x)",
    schemes=(),
    gates=None,
    per_block=2,
    streams=None,
    norm=False,
    steps=(0,),
    parameters=None,
    gradient_of=None,
    norms=None,
    tokens=None,
    title="stack",
    beta=None,
    skip=None,
):
    """A run of blocks with `per_block` sub-layers each, on which the groups ``sublayers`` and ``gates`` are recorded.

    Args:
        values: as from `measure`.
        form: equation of every sub-layer, or one each.
        schemes: names of that form.
        gates: path -> (kind, sub-layers, statistics), a number or ``[step]`` per statistic.
        per_block: sub-layers of a block.
        streams: number of the stream of every sub-layer.
        norm: whether a norm follows every sum.
        steps: recorded steps.
        parameters: path -> (norm, gradient norm), each a number or ``[step]``.
        gradient_of: RMS of the output gradient of the block `i`; measured by default.
        norms: path -> statistics of the group ``norms``.
        tokens: ``[block]`` cosine similarity.
        title: title of the run.
        beta: weight of every branch as the structure tells it.
        skip: group -> whether it is left out on a step.
    """
    depth = len(values["output_gradient"])
    blocks = -(-depth // per_block)
    forms = [form] * depth if isinstance(form, str) else form
    paths = [f"layers.{i // per_block}.branch{i % per_block}" for i in range(depth)]
    owners = {i: tuple(p for p, (_, owned, _) in (gates or {}).items() if i in owned) for i in range(depth)}
    infos = tuple(
        SublayerInfo(
            forms[i],
            tuple(schemes),
            branch=path,
            norm_after=f"layers.{i // per_block}.norm{i % per_block}" if norm else "",
            alpha=float(values["alpha"][i]),
            beta=beta,
            gates=owners[i],
            stream=0 if streams is None else streams[i],
        )
        for i, path in enumerate(paths)
    )
    stack = Stack("layers", "Block", blocks, per_block, main=True)
    info = RunInfo(title, "id", "2026-01-01T00:00:00+00:00", "Model", 99, "cpu", "torch 2", 0, (stack,), infos)
    rows = [
        Site("embedding", "Embedding", numel=64),
        *(Site(f"layers.{i}", "Block", "layer", "layers", i) for i in range(blocks)),
        Site("head", "Linear", numel=64),
    ]
    top, entering = values["output_gradient"], values["input_gradient"]
    after = [top[min(depth, (i + 1) * per_block) - 1] for i in range(blocks)]
    level = after if gradient_of is None else [gradient_of(i) for i in range(blocks)]
    size = np.array([entering[0], *level, top[-1]])
    groups = {"gradients": (rows, {"norm": size, "rms": size / 10})}
    kinds = dict(zip(paths, forms, strict=True))
    axis = [Site(p, kinds[p], "sublayer", "layers", i // per_block) for i, p in enumerate(paths)]
    groups["sublayers"] = (axis, {name: values[name] for name in SUBLAYER})
    if gates:
        sites = [Site(p, kind, "gate", "layers", min(owned) // per_block) for p, (kind, owned, _) in gates.items()]
        groups["gates"] = (sites, {s: [gates[p][2].get(s, np.nan) for p in gates] for s in GATE})
    if norms:
        names = sorted({name for given in norms.values() for name in given})
        sites = [Site(p, "RMSNorm", "norm", "layers", _position(p)) for p in norms]
        groups["norms"] = (sites, {name: [norms[p].get(name, np.nan) for p in norms] for name in names})
    if tokens is not None:
        groups["tokens"] = (rows[1:-1], {"cosine_similarity": tokens})
    if parameters:
        sites = [Site(p, "Parameter", "parameter", "layers", _position(p), 9) for p in parameters]
        groups["parameters"] = (sites, {"norm": [parameters[p][0] for p in parameters]})
        groups["parameter_gradients"] = (sites, {"norm": [parameters[p][1] for p in parameters]})
    return _run(info, groups, steps, skip or {})


def _position(path):
    parts = path.split(".")
    return int(parts[1]) if parts[0] == "layers" else -1


def _run(info, groups, steps, skip):
    specs = tuple(
        GroupSpec(name, tuple(StatisticSpec(s, "1", s) for s in statistics), tuple(sites))
        for name, (sites, statistics) in groups.items()
    )
    writer = MemoryWriter(RunLayout(info, specs))
    for k, step in enumerate(steps):
        values = {
            name: {s: np.array([_at(v, k) for v in column], dtype=float) for s, column in statistics.items()}
            for name, (_, statistics) in groups.items()
            if not (name in skip and skip[name](step))
        }
        writer.append(Row(step, float(k), values))
    return writer.run()


def _at(value, k):
    return value[k] if isinstance(value, list | tuple) else value
