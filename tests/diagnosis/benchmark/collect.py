"""Every labelled model, the verdict on it, and how often verdicts are right: used by the tests and by the page.

A verdict is a row of words without numbers, so that a page of them does not change with the machine.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FILES = ("schemes", "plain", "faults", "unusual", "libraries")


def collect():
    """Every labelled model, in the order of the files."""
    found = []
    for file in FILES:
        scope = runpy.run_path(str(HERE / f"{file}.py"))
        found += [model for value in scope.values() for model in getattr(value, "labelled", ())]
    return found


@dataclass(frozen=True)
class Outcome:
    """What was said of one model."""

    headline: str
    alarms: tuple[str, ...]
    """Rules with an error or a warning."""
    sites: dict[str, list[str]]
    """Rule -> all sites it names."""
    detail: str
    """The sentence of the verdict, for a message."""
    classic: tuple[str, ...] = ()
    """Rules of the set ``classic`` with an error or a warning."""


def outcome_of(model) -> Outcome:
    """Build, record and judge one model."""
    from keelscope.diagnosis import Severity, diagnose

    run = model.record()
    report = diagnose(run)
    alarms = [finding.rule for finding in report.findings if finding.severity >= Severity.WARNING]
    sites: dict[str, list[str]] = {}
    for finding in report.findings:
        sites.setdefault(finding.rule, []).extend(finding.sites)
    detail = " | ".join([report.sentence, *map(str, report.findings)])
    return Outcome(report.headline, tuple(dict.fromkeys(alarms)), sites, detail)


def faults_of(model, outcome) -> list[str]:
    """What is wrong with a verdict, by the label; nothing when it is right."""
    found = []
    if not model.accepts(outcome.headline):
        found.append(f"headline {outcome.headline}, label {model.headline}")
    if model.healthy and outcome.alarms:
        found.append(f"false alarm: {', '.join(outcome.alarms)}")
    for rule in model.findings:
        if rule not in outcome.sites:
            found.append(f"finding {rule} is missing")
        elif not model.names_rightly(rule, outcome.sites[rule]):
            found.append(f"sites of {rule}: {outcome.sites[rule]}")
    return found
