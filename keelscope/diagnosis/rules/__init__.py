"""The rules: plain functions from `Evidence` to findings, one tuple per file, joined here.

A new built-in rule is one function in the file of its subject, named in that file's tuple. A third-party package offers
its own through the entry point group ``keelscope.rules``. The docstring of a rule says what it means, its formula,
its threshold, where that comes from and what helps; ``keelscope list rules`` prints it.

There are two rule sets: ``default``, and ``classic`` with the absolute thresholds of other tools.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, cast

from keelscope import plugins
from keelscope.diagnosis.finding import Severity
from keelscope.diagnosis.rules import (
    classic,
    classic_values,
    coverage,
    flow,
    gates,
    nonfinite,
    norms,
    paths,
    totals,
    training,
    units,
    zeros,
)
from keelscope.errors import PluginWarning, UnknownNameError

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence
    from keelscope.diagnosis.finding import Finding

__all__ = [
    "CLASSIC",
    "DEFAULT",
    "RULES",
    "SETS",
    "Rule",
    "all_rules",
    "check_set",
    "findings_of",
    "rule_name",
    "rules_of",
]

Rule = Callable[["Evidence"], Iterable["Finding"]]
"""What a rule is."""

RULES: tuple[Rule, ...] = (
    *nonfinite.RULES,
    *flow.RULES,
    *paths.RULES,
    *norms.RULES,
    *gates.RULES,
    *units.RULES,
    *zeros.RULES,
    *totals.RULES,
    *training.RULES,
    *coverage.RULES,
)
"""The built-in rules, in the order of the report."""

CLASSIC: tuple[Rule, ...] = (*classic.RULES, *classic_values.RULES)
"""The rule set ``classic``."""
DEFAULT = "default"
SETS = (DEFAULT, "classic")
"""Names of the rule sets."""


def rule_name(rule: Rule) -> str:
    """The name a rule is listed under: that of its function."""
    return str(getattr(rule, "__name__", type(rule).__name__))


def all_rules() -> tuple[Rule, ...]:
    """The built-in rules, then those of installed packages."""
    offered = [cast("Rule", item) for _, item in plugins.load("keelscope.rules")]
    return (*RULES, *(rule for rule in offered if rule not in RULES))


def rules_of(name: str) -> tuple[Rule, ...]:
    """The rules of one set.

    Args:
        name: one of `SETS`.

    Returns:
        Its rules; those of installed packages belong to ``default``.

    Raises:
        UnknownNameError: if there is no such set.

    Example:
        >>> [rule_name(rule) for rule in rules_of("classic")][:2]
        ['classic_exploding_tensor', 'classic_vanishing_gradient']
    """
    check_set(name)
    return all_rules() if name == DEFAULT else CLASSIC


def check_set(name: str) -> None:
    """Refuse a rule set that there is not, without looking for the rules of installed packages.

    Args:
        name: one of `SETS`.

    Raises:
        UnknownNameError: if it is none of them.
    """
    if name not in SETS:
        raise UnknownNameError(f"there is no rule set {name!r}; use {' or '.join(SETS)}.")


def findings_of(evidence: Evidence, rules: str = DEFAULT) -> tuple[Finding, ...]:
    """What all rules of a set find, the gravest first.

    A rule of another package that fails warns with `PluginWarning` and is left out.

    Args:
        evidence: a run at one step.
        rules: name of the set.

    Returns:
        Findings by severity; causes before their consequences: NaN and Inf by the step they began on, then a gradient
        that stops, then the others in the order of the rules.
    """
    found = [finding for rule in rules_of(rules) for finding in _checked(rule, evidence)]
    return tuple(sorted(found, key=_order))


def _order(finding: Finding) -> tuple[int, int, int]:
    """Sorts by severity, then by cause."""
    if finding.rule.startswith("nonfinite"):
        return -finding.severity, 0, finding.steps[0] if finding.steps is not None else 0
    stops = finding.severity is Severity.ERROR and finding.rule in ("dead_units", "zero_gradient", "disconnected")
    return -finding.severity, 1 if stops else 2, 0


def _checked(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    if rule in RULES or rule in CLASSIC:
        yield from rule(evidence)
        return
    try:
        yield from list(rule(evidence))
    except Exception as error:  # whatever a foreign rule raises, the report must come out
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"rule {rule_name(rule)} is left out: it failed with {reason}.", PluginWarning, stacklevel=4)
