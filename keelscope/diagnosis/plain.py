"""A diagnosis as plain JSON values; the keys are documented at `keelscope.diagnosis.report.Report.to_dict`."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from keelscope.diagnosis.structure import forms_of

if TYPE_CHECKING:
    from keelscope.diagnosis.finding import Finding
    from keelscope.diagnosis.headline import Verdict
    from keelscope.diagnosis.layers import Layer
    from keelscope.diagnosis.paths import Paths, StreamPaths
    from keelscope.diagnosis.profiles import NamedProfile
    from keelscope.diagnosis.record import Diagnosis

__all__ = ["JSON_FORMAT", "plain_values"]

JSON_FORMAT = 1
"""Raised when a key changes its meaning or goes away."""

Json = dict[str, object]


def plain_values(report: Diagnosis) -> Json:
    """A diagnosis as dictionaries, lists, strings, finite numbers and None.

    Args:
        report: what to write.

    Returns:
        What strict JSON can hold: null for not observed, strings for NaN and infinities.
    """
    info, axis = report.run.info, report.axis
    return {
        "format": JSON_FORMAT,
        "title": report.title,
        "model": info.model_class,
        "n_parameters": info.n_parameters,
        "step": report.step if report.steps else None,
        "steps": list(report.steps),
        "headline": report.headline,
        "sentence": report.sentence,
        "decided_by": report.verdict.decided_by or None,
        "depth": {
            "unit": axis.unit,
            "length": axis.length,
            "layers": len(axis),
            "stack": axis.stack.path if axis.stack is not None else None,
            "paths": [site.path for site in axis.sites],
            "values": axis.depth.tolist(),
        },
        "stacks": [_stack(verdict) for verdict in report.stacks],
        "structure": [
            {"equation": form.equation, "schemes": list(form.schemes), "alpha": _safe(form.alpha), "count": form.number}
            for form in forms_of(info.sublayers)
        ],
        "profiles": {key: _profile(profile, report) for key, profile in report.profiles.items()},
        "findings": [_finding(finding) for finding in report.findings],
        "layers": [_layer(layer) for layer in report.layers],
        "paths": None if report.paths is None else _paths(report.paths, report.explanation),
        "coverage": dict(Counter(entry.status for entry in report.run.coverage)),
        "notes": list(report.notes),
    }


def _safe(value: float | None) -> float | str | None:
    """A number that strict JSON can hold."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _stack(verdict: Verdict) -> Json:
    axis, decided = verdict.chain.axis, verdict.chain.profiles.get(verdict.headline.decided_by)
    return {
        "path": verdict.path or None,
        "unit": axis.unit,
        "length": axis.length,
        "headline": verdict.headline.word,
        "decided_by": verdict.headline.decided_by or None,
        "total": None if decided is None else _known(decided.shape.total),
    }


def _profile(profile: NamedProfile, report: Diagnosis) -> Json:
    shape = profile.shape
    knee = shape.knee
    return {
        "title": profile.title,
        "counted": profile.counted,
        "slope": _known(shape.slope),
        "total": _known(shape.total),
        "span": _known(shape.span),
        "flatness": _known(shape.flatness),
        "fitted": shape.fitted,
        "observed": shape.observed,
        "zeros": shape.zeros,
        "floored": shape.floored,
        "knee": None
        if knee is None
        else {
            "lower": report.axis.sites[knee.lower].path,
            "upper": report.axis.sites[knee.upper].path,
            "change": knee.change,
        },
        "levels": [_known(level) for level in shape.levels.tolist()],
    }


def _finding(finding: Finding) -> Json:
    return {
        "rule": finding.rule,
        "severity": finding.severity.label,
        "statement": finding.statement,
        "sites": list(finding.sites),
        "steps": None if finding.steps is None else list(finding.steps),
        "value": _safe(_known(finding.value)),
        "threshold": _safe(_known(finding.threshold)),
        "remedy": finding.remedy,
    }


def _layer(layer: Layer) -> Json:
    return {
        "path": layer.path,
        "kind": layer.kind,
        "role": layer.role,
        "stack": layer.stack or None,
        "depth": layer.depth,
        "output_variance": _safe(layer.output_variance),
        "gradient_rms": _safe(layer.gradient_rms),
        "late_token_gradient": _safe(layer.late_token_gradient),
        "ratio": _safe(layer.ratio),
        "parameter_gradient_norm": _safe(layer.parameter_gradient_norm),
        "weight_norm": _safe(layer.weight_norm),
        "tied_to": layer.tied_to or None,
        "norm_gain": _safe(layer.norm_gain),
        "shortcut_gain": _safe(layer.shortcut_gain),
        "branch_gain": _safe(layer.branch_gain),
        "gate": _safe(layer.gate),
    }


def _paths(paths: Paths, explanation: str) -> Json:
    return {"step": paths.step, "explanation": explanation, "streams": [_stream(s) for s in paths.streams]}


def _stream(stream: StreamPaths) -> Json:
    shortcut, attribution = stream.shortcut, stream.attribution
    predicted = shortcut.predicted[~np.isnan(shortcut.predicted)]
    return {
        "stream": stream.stream,
        "sublayers": len(stream),
        "shortcut": {
            "lost": _safe(_known(shortcut.lost)),
            "slope": _known(shortcut.slope),
            "predicted": _safe(-float(predicted[0])) if predicted.size else None,
            "mean_branch_gain": _known(shortcut.mean_branch_gain),
            "mean_alpha": _known(shortcut.mean_alpha),
            "missing": shortcut.missing,
            "floored": shortcut.floored,
        },
        "totals": attribution.totals | {"total": _known(attribution.total)},
        "attribution": [_sublayer(stream, i) for i in range(len(stream))],
    }


def _sublayer(stream: StreamPaths, i: int) -> Json:
    """One row of the attribution table."""
    columns = {"carried": stream.shortcut.carried, "shortcut_gain": stream.shortcut.gains}
    columns |= {name: getattr(stream.attribution, name) for name in ("norm", "scale", "branch", "other")}
    columns |= {name: stream.values[name] for name in ("alpha", "branch_gain", "cosine") if name in stream.values}
    numbers = {name: _safe(_known(float(column[i]))) for name, column in columns.items()}
    return {"path": stream.sites[i].path, "form": stream.infos[i].form, **numbers}
