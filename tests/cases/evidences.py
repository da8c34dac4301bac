"""What ``evidence`` in an EXPECT asks for: numbers that the record must hold, or that show a wrong way to count.

A key is a name listed here, ``group/statistic path`` for a recorded value, or ``path / path`` for two gradient norms.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mechanics
import numpy as np
from observation import Seen, close, watched

Number = Callable[[Seen], Any]

ENDS = {
    "loss_scale_tiny": ("0.weight", "4.weight"),
    "post_ln_24": ("layers.0.linear1.weight", "layers.23.linear1.weight"),
    "pre_ln_control": ("1.layers.0.linear1.weight", "1.layers.11.linear1.weight"),
    "sigmoid_mlp": ("0.weight", "40.weight"),
}
"""The first and the last layer whose parameter gradients a case compares."""


def _ratio(seen: Seen) -> float:
    first, last = ENDS[seen.case.__name__.removeprefix("case_")]
    return seen.norm(first) / seen.norm(last)


def _raw_over_true(seen: Seen) -> float:
    """What a hook on the leaf sees over what is recorded."""
    model, step = seen.case.build()
    raw: list[float] = []
    next(model.parameters()).register_hook(lambda gradient: raw.append(float(gradient.double().norm())))
    with watched(seen.case, model, step) as watch:
        step(model)
    return raw[0] / float(watch.run["parameter_gradients/norm"].values[0, 0])


def _eps_helps(seen: Seen) -> float:
    """Non-finite gradients of the embedding with an epsilon that half precision can hold."""
    model, step = seen.case.build(1e-5)
    with watched(seen.case, model, step) as watch:
        step(model)
    return float(watch.run["gradients/nonfinite_count"].of("emb").values[0, 0])


def _crashed(seen: Seen) -> dict[str, Any]:
    """The recorded norms, summarised as a reader of the file would."""
    run = seen.watch.run
    values = np.asarray(run["parameter_gradients/norm"].values[:, 0])
    there = np.asarray(run.observed("parameter_gradients/norm")[:, 0])
    finite = values[np.isfinite(values)]
    return {
        "n": int(there.sum()),
        "nan": int((there & np.isnan(values)).sum()),
        "inf": int(np.isinf(values).sum()),
        "zero": int((values == 0).sum()),
        "finite_min": float(finite.min()),
        "finite_max": float(finite.max()),
        "distinct_steps": len(set(run.steps.tolist())),
        "first_nonfinite_step": int(run.steps[~np.isfinite(values)][0]),
    }


def _gates(seen: Seen) -> list[float]:
    return [seen.value("gates/value", f"{i}.gate") for i in range(3)]


def _rows(seen: Seen) -> float:
    return seen.value("gradients/nonfinite_count", "emb") / 8


EVIDENCE: dict[str, Number] = {
    "raw_over_true": _raw_over_true,
    "ratio_first_last": _ratio,
    "dead_fraction_act1": lambda seen: seen.value("outputs/zero_fraction", "act1"),
    "ratio_per_layer": lambda seen: seen.norm("0") / seen.norm("1"),
    "drop_across_softmax": lambda seen: seen.norm("fc") / seen.norm("sm"),
    "drop_across_norm": lambda seen: seen.norm("0") / seen.norm("1"),
    "share_emb": lambda seen: (seen.norm("emb.weight") / float(seen.watch.run["scalars/grad_norm_total"].at(0))) ** 2,
    "mean_gate": _gates,
    "body_over_out_grad": lambda seen: [seen.norm(f"{i}.body") / seen.norm(f"{i}") for i in range(3)],
    "per_sample_grad_norms": lambda seen: seen.step.norms,
    "forward_nonfinite": lambda seen: float(np.nansum(seen.watch.run["outputs/nonfinite_count"].values)),
    "rows_with_nan_gradient": _rows,
    "rows_with_finite_gradient": lambda seen: 6 - _rows(seen),
    "emb_grad_nan_with_eps_1e-5": _eps_helps,
    "live_tensor_growth": lambda seen: mechanics.trained(seen.case)[0],
    "model_freed": lambda seen: float(mechanics.memory(seen.case) == []),
    "nan_entries_at_producer": lambda seen: seen.value("outputs/nonfinite_count", "mid.log"),
    "token_cosine_out": lambda seen: seen.value("tokens/cosine_similarity", "layers.23"),
    "var_last_over_first": lambda seen: seen.value("outputs/variance", "15") / seen.value("outputs/variance", "0"),
    "var_growth_per_block": lambda seen: (
        (seen.value("outputs/variance", "15") / seen.value("outputs/variance", "0")) ** (1 / 15)
    ),
    "grad_first_over_last": lambda seen: seen.norm("0") / seen.norm("15"),
    "ratio_enc0_dec_last": lambda seen: seen.norm("enc.0.weight") / seen.norm("dec.3.weight"),
    "feat.weight.grad[0,0]": lambda seen: float(seen.model.feat.weight.grad[0, 0]),
    "crashed": _crashed,
}
"""Key -> the number as keelscope recorded it."""

REDUCED: dict[str, tuple[Callable[[Any], Any], Number]] = {
    "spectral": (max, lambda seen: seen.value("norms/sigma_max_exact", "0")),
    "spectral_per_row": (max, lambda seen: seen.value("norms/sigma_max_exact", "1")),
    "frobenius": (
        lambda rows: float(np.sqrt(np.mean(np.square(rows)) / 6)),
        lambda seen: seen.value("norms/jacobian_gain", "0"),
    ),
    "running_grad_norm_after_each_backward": (lambda rows: rows[-1], lambda seen: seen.norm("0.weight")),
}
"""Per-token or per-pass numbers -> what of them is recorded, and the record."""

WRONG: dict[str, Number] = {
    "sum_of_micro_norms (wrong)": lambda seen: seen.norm("0.weight"),
    "naive_max_gain_over_std (wrong)": lambda seen: [seen.value("norms/sigma_max_exact", "0")] * 3,
    "naive_uncoalesced": lambda seen: seen.norm("0.weight"),
    "embedding_use_only": lambda seen: seen.norm("emb.weight"),
    "head_use_only": lambda seen: seen.norm("emb.weight"),
    "wrong_total_if_counted_twice": lambda seen: float(seen.watch.run["scalars/grad_norm_total"].at(0)),
    "with_raw_logits_it_would_be": lambda seen: seen.norm("fc"),
}
"""Key -> what must not come out as that number."""

OF_THE_CASE = {
    "mean_entropy_sm": "an entropy is recorded of attention only",
    "share_row0_within_emb": "rows of a parameter are not recorded",
    "rows_touched": "rows of a parameter are not recorded",
    "token_cosine_in": "an input of the model is no module's output",
    **dict.fromkeys(
        ("skipped_step", "dead", "denormal", "single", "empty", "resumed", "all_nan"), "no model makes them"
    ),
    **dict.fromkeys(("points", "grad_steps", "grad_values", "loss_values", "partial_record"), "no importer exists"),
}
"""Facts about a case that no record holds, and why; its own computation stands for them."""


def evidence(seen: Seen, want: dict[str, Any]) -> list[str]:
    """Every number of an ``evidence``."""
    return [line for key, value in want.items() for line in _one(seen, key, value)]


def _one(seen: Seen, key: str, want: Any) -> list[str]:
    if key in OF_THE_CASE:
        return []
    if key in WRONG:
        got = WRONG[key](seen)
        return [f"{key} came out as {got}"] if _agrees(want, got, 1e-3) else []
    reduce, number = REDUCED.get(key, (lambda rows: rows, EVIDENCE.get(key) or _spelt(key)))
    if number is None:
        return [f"no check covers {key!r}"]
    got, expected = number(seen), reduce(want)
    tolerance = getattr(seen.case, "RTOL", 1e-4)
    return [] if _agrees(expected, got, tolerance) else [f"{key}: {got} instead of {expected}"]


def _spelt(key: str) -> Number | None:
    """The number that a key spells out."""
    of_module = re.fullmatch(r"(?:step0_)?out_grad_norm_(?:of_)?(.+)", key)
    if of_module or key.startswith("step0_grad_norm_"):
        path = of_module[1] if of_module else key.removeprefix("step0_grad_norm_")
        return lambda seen: seen.norm(path)
    quotient = re.fullmatch(r"(\S+) / (\S+)", key)
    if quotient:
        return lambda seen: seen.norm(quotient[1]) / seen.norm(quotient[2])
    recorded = re.fullmatch(r"(\w+/\w+) (\S+)", key)
    return (lambda seen: seen.value(recorded[1], recorded[2])) if recorded else None


def _agrees(want: Any, got: Any, tolerance: float) -> bool:
    if isinstance(want, dict):
        return set(want) == set(got) and all(_agrees(want[key], got[key], tolerance) for key in want)
    if isinstance(want, list | tuple):
        return len(want) == len(got) and all(_agrees(a, b, tolerance) for a, b in zip(want, got, strict=True))
    return want is got if want is None else close(float(want), float(got), tolerance)
