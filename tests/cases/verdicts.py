"""What ``diagnosis`` in an EXPECT asks for: labels at places, and what must not be said.

Every label, every key and every sentence of prose has its check here; one without a check is a finding itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from observation import Seen

import keelscope as ks
from keelscope.diagnosis import Finding, Severity

Test = Callable[[ks.Report, str], bool]

RULES = [
    "dead_units",
    "coverage_gap",
    "disconnected",
    "dominated_by_one_parameter",
    "frozen",
    "gate_closed",
    "never_called",
    "no_backward",
    "nonfinite_backward",
    "nonfinite_forward",
    "norm_kills_gradient",
    "overflow_step_skipped",
    "rank_collapse",
    "saturated",
    "spike",
    "uniformly_small",
    "unregistered_parameters",
    "variance_growth",
    "zero_grad_by_init",
    "zero_grad_stuck",
    "zero_gradient",
]
QUIET = {"flat", "drifting", "not enough data"}


def touches(finding: Finding, path: str) -> bool:
    """Whether a finding names a place, something inside it, or the module it belongs to."""
    return any(
        site == path or site.startswith(f"{path}.") or (site and path.startswith(f"{site}.")) for site in finding.sites
    )


def by_rule(rule: str, report: ks.Report, path: str) -> bool:
    return any(f.rule == rule and (not path or touches(f, path)) for f in report.findings)


def by_headline(word: str, report: ks.Report, path: str) -> bool:
    return report.headline == word and by_rule(word, report, path)


def is_healthy(report: ks.Report, path: str) -> bool:
    """As a whole: a quiet headline and nothing to do; at a place: nothing is said of it."""
    if path:
        return not any(touches(f, path) and f.rule != "coverage_gap" for f in report.findings)
    return report.headline in QUIET and all(f.severity is Severity.INFO for f in report.findings)


def is_nonfinite(report: ks.Report, _: str) -> bool:
    return report.headline == "non-finite" or any(f.rule.startswith("nonfinite") for f in report.findings)


LABELS: dict[str, Test] = {rule: partial(by_rule, rule) for rule in RULES} | {
    "healthy": is_healthy,
    "nonfinite": is_nonfinite,
    "vanishing": partial(by_headline, "vanishing"),
    "exploding": partial(by_headline, "exploding"),
}


def _is_no_alarm(report: ks.Report, path: str) -> bool:
    return all(f.severity is Severity.INFO for f in report.findings if touches(f, path))


def _gap_or_data(report: ks.Report, path: str) -> bool:
    data = any(entry.path == path and entry.status == "observed" for entry in report.run.coverage)
    return (data or by_rule("coverage_gap", report, path)) and _is_no_alarm(report, path)


def _level_parameters(report: ks.Report, _: str) -> bool:
    """The parameter gradients alone say nothing."""
    return abs(report.profiles["parameter_gradients/norm"].shape.total) < 0.1


PROSE: dict[str, Test] = {
    "coverage_gap or real data, never 'dead'": _gap_or_data,
    "structurally zero (bias before BatchNorm)": _is_no_alarm,
    "reentrant checkpoint input without requires_grad": lambda report, _: any(
        "reentrant checkpoint" in f.remedy for f in report.findings if f.rule == "disconnected"
    ),
    "activation gradients": lambda report, _: report.verdict.decided_by.startswith("gradients/"),
    "depth (activations and gradients)": lambda report, _: by_rule("variance_growth", report, ""),
    "parameter-gradient profile is flat; a verdict from parameters only says healthy": _level_parameters,
    "D's second gradient belongs to the generator loss": lambda report, _: is_healthy(report, "D"),
    "out_proj: weight used functionally; not 'dead', not 'never used'": lambda report, _: _gap_or_data(
        report, "attn.out_proj"
    ),
}
PLACES = {"first layers": "0"}
"""Prose for a place -> a path inside it."""


def label_of(text: str) -> str:
    """A label without its remark: ``zero_grad_by_init (transient)``, ``vanishing with depth``."""
    return text.partition(" (")[0].removesuffix(" with depth")


def says(report: ks.Report, text: str, path: str) -> bool:
    """Whether a report says what a label or a sentence stands for."""
    if text in PROSE:
        return PROSE[text](report, path)
    return LABELS[label_of(text)](report, path)


def diagnosis(seen: Seen, want: dict[str, Any]) -> list[str]:
    """Every key of a ``diagnosis``."""
    wrong = [f"no check covers the key {key!r}" for key in want if key not in KEYS]
    for key, value in want.items():
        try:
            wrong += [f"{key}: {line}" for line in KEYS.get(key, _nothing)(seen, want, value)]
        except KeyError as error:
            wrong.append(f"{key}: no check covers {error}")
    if wrong:
        said = [f"{f.rule} {list(f.sites)[:4]}" for f in seen.report.findings]
        wrong.append(f"said: {seen.report.headline}, {said}")
    return wrong


def _nothing(*_: object) -> list[str]:
    return []


def _label(seen: Seen, want: dict[str, Any], text: str) -> Iterable[str]:
    where = PLACES.get(want.get("where", ""), want.get("where", ""))
    if not says(seen.report, text, where):
        yield f"not {text!r} at {where!r}"


def _where(seen: Seen, _: dict[str, Any], where: str) -> Iterable[str]:
    """The place is one of the model; that the label is said there is checked with the label."""
    if PLACES.get(where, where) not in seen.paths():
        yield f"no check covers the place {where!r}"


def _each(seen: Seen, want: dict[str, Any], labels: dict[str, str], step: int = -1) -> Iterable[str]:
    for path, text in labels.items():
        if not says(seen.reports[step], text, path):
            yield f"{path} is not {text!r}"


def _not(seen: Seen, _: dict[str, Any], labels: list[str]) -> Iterable[str]:
    for number, report in enumerate(seen.reports):
        yield from (f"{text!r} at step {number}" for text in labels if says(report, text, ""))


def _named(seen: Seen, text: str) -> set[str]:
    return set(re.findall(r"[\w.]+", text)) & seen.paths()


def _worst(seen: Seen) -> Finding:
    quiet = Finding("", Severity.INFO, "", sites=("nothing",))
    return next((f for f in seen.report.findings if f.rule.startswith("nonfinite")), quiet)


def _first_bad(seen: Seen, _: dict[str, Any], text: str) -> Iterable[str]:
    named = _named(seen, text)
    if not named or not named <= set(_worst(seen).sites):
        yield f"{_worst(seen).sites} instead of {named}"


def _not_first(seen: Seen, _: dict[str, Any], paths: list[str]) -> Iterable[str]:
    yield from (f"{path} is blamed" for path in paths if path in _worst(seen).sites)


def _forward_finite(seen: Seen, _: dict[str, Any], want: bool) -> Iterable[str]:
    counts = np.nan_to_num(seen.watch.run["outputs/nonfinite_count"].values)
    if bool((counts == 0).all()) is not want:
        yield f"{counts.sum()} non-finite entries"


def _last_good(seen: Seen, _: dict[str, Any], path: str) -> Iterable[str]:
    if _worst(seen).sites[-1] != path:
        yield f"{_worst(seen).sites[-1]} instead of {path}"


def _boundary(seen: Seen, _: dict[str, Any], sides: tuple[str, str]) -> Iterable[str]:
    below, above = sides
    if not by_rule("disconnected", seen.report, below) or by_rule("disconnected", seen.report, above):
        yield f"no boundary between {below} and {above}"


def _prose(seen: Seen, _: dict[str, Any], text: str) -> Iterable[str]:
    if not PROSE[text](seen.report, ""):
        yield text


def _dead_fraction(seen: Seen, want: dict[str, Any], share: float) -> Iterable[str]:
    found = [f for f in seen.report.findings if f.rule == "dead_units" and touches(f, want["where"])]
    if not found or found[0].value != share:
        yield f"{[f.value for f in found]} instead of {share}"


KEYS: dict[str, Callable[..., Iterable[str]]] = {
    "label": _label,
    "where": _where,
    "per_module": _each,
    "per_param": _each,
    "step0": partial(_each, step=0),
    "step1": partial(_each, step=1),
    "not": _not,
    "first_bad": _first_bad,
    "not_first_bad": _not_first,
    "propagators": _not_first,
    "forward_finite": _forward_finite,
    "last_good": _last_good,
    "boundary": _boundary,
    "axis": _prose,
    "note": _prose,
    "hint": _prose,
    "dead_fraction": _dead_fraction,
}
