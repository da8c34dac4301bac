"""Every labelled model, the verdict on it, and how often verdicts are right: used by the tests and by the page.

A row holds words and no numbers, so that a page of them does not change with the machine.
"""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FILES = ("schemes", "plain", "faults", "unusual", "libraries")
LEVEL = ("healthy", "flat", "drifting")
"""Labels and headlines without an illness of depth."""
CLASSIC = {
    "non-finite": ("classic_exploding_tensor",),
    "dead": ("classic_all_zero", "classic_dying_relu", "classic_dead_layer"),
    "exploding": ("classic_large_gradient", "classic_exploding_operation", "classic_first_over_last"),
    "vanishing": ("classic_vanishing_gradient", "classic_small_gradient", "classic_first_against_last"),
}
"""The word that the rules of the set ``classic`` amount to, the first one that holds; else ``level``."""


def collect(shift=0, *, folder=HERE, files=FILES):
    """Every labelled model, in the order of the files; with seeds moved by `shift`."""
    found = []
    for file in files:
        scope = runpy.run_path(str(folder / f"{file}.py"))
        found += [model for value in scope.values() for model in getattr(value, "labelled", ())]
    return [model.at_other_seed(shift) for model in found] if shift else found


@dataclass(frozen=True)
class Outcome:
    """What was said of one model."""

    headline: str
    alarms: tuple[str, ...]
    """Rules with an error or a warning."""
    sites: dict[str, list[str]]
    """Rule -> all sites it names."""
    detail: str
    """The sentence of the verdict and all findings, for a message."""
    classic: tuple[str, ...]
    """Rules of the set ``classic`` that found something."""


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
    classic = dict.fromkeys(finding.rule for finding in diagnose(run, rules="classic").findings)
    return Outcome(report.headline, tuple(dict.fromkeys(alarms)), sites, detail, tuple(classic))


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


@dataclass(frozen=True)
class Row:
    """One line of the page."""

    model: str
    half: str
    label: str
    state: str
    """``healthy`` or ``sick``."""
    headline: str
    alarms: str
    classic: str
    """The word of the set ``classic``."""
    classic_alarms: str
    """How many of its rules found something."""

    @property
    def is_right(self) -> bool:
        """Whether the headline is one that the label accepts."""
        return self.headline == self.label or (self.label == "healthy" and self.headline in LEVEL)

    @property
    def is_classic_right(self) -> bool:
        """Whether the word of ``classic`` is right, which knows neither drift nor too little data."""
        return self.classic == (self.label if self.label in CLASSIC else "level")


def row_of(model, outcome) -> Row:
    """The line of one model."""
    word = next((word for word, rules in CLASSIC.items() if set(rules) & set(outcome.classic)), "level")
    state = "healthy" if model.healthy else "sick"
    alarms = ", ".join(outcome.alarms) or "-"
    return Row(model.name, model.half, model.headline, state, outcome.headline, alarms, word, str(len(outcome.classic)))


def as_table(rows: Iterable[Row]) -> str:
    """The lines in Markdown."""
    titles = "| model | half | label | state | headline | errors and warnings | classic | its alarms |"
    lines = [" | ".join(vars(row).values()) for row in rows]
    return "\n".join([titles, "|---|---|---|---|---|---|---|---|", *(f"| {line} |" for line in lines)])


def rows_in(page: str) -> list[Row]:
    """The lines back from the page."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ") and ", seed " in line]
    return [Row(*cells) for cells in lines]


@dataclass(frozen=True)
class Score:
    """How often a half is judged rightly."""

    models: int
    healthy: int
    right: int
    alarmed: int
    """Healthy models with a false alarm."""
    classic_right: int
    classic_alarmed: int

    @property
    def accuracy(self) -> float:
        """Share of right headlines."""
        return self.right / self.models


def score(rows: Sequence[Row]) -> Score:
    """Count over rows."""
    healthy = [row for row in rows if row.state == "healthy"]
    return Score(
        models=len(rows),
        healthy=len(healthy),
        right=sum(row.is_right for row in rows),
        alarmed=sum(row.alarms != "-" for row in healthy),
        classic_right=sum(row.is_classic_right for row in rows),
        classic_alarmed=sum(row.classic_alarms != "0" for row in healthy),
    )


def confusion(rows: Sequence[Row], column: str) -> str:
    """Label against verdict, counted, in Markdown; `column` is ``headline`` or ``classic``."""
    labels = [word for word in ("flat", "healthy", *CLASSIC, "not enough data") if any(r.label == word for r in rows)]
    words = ["flat", "drifting", *CLASSIC, "not enough data"] if column == "headline" else ["level", *CLASSIC]
    counts = Counter((row.label, getattr(row, column)) for row in rows)
    lines = [[label, *(str(counts[label, word] or "") for word in words)] for label in labels]
    table = [["label", *words], ["---"] * (len(words) + 1), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)
