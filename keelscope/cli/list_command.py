"""``keelscope list``: what can be recorded, judged and built, each with one line of meaning."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from keelscope.cli.output import print_json, print_table

if TYPE_CHECKING:
    from keelscope.cli.output import Row

__all__ = ["Kind", "add_command"]


class Kind(StrEnum):
    """What can be listed."""

    PROBES = "probes"
    STATISTICS = "statistics"
    RULES = "rules"
    SCHEMES = "schemes"
    THRESHOLDS = "thresholds"


def add_command(app: typer.Typer) -> None:
    """Add ``list`` to the application.

    Args:
        app: the application.
    """
    app.command("list", epilog="Example: keelscope list schemes")(list_names)


def list_names(
    what: Annotated[Kind, typer.Argument(help="What to list.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List probes, statistics, rules, thresholds or schemes, installed plugins included."""
    rows = _LISTS[what]()
    if json:
        print_json(rows)
    else:
        print_table(rows)


def probes() -> list[Row]:
    """One row per installed probe.

    Returns:
        Rows with name, tap, statistics and the package it comes from.
    """
    from keelscope import plugins
    from keelscope.probe import DEFAULT_PROBES, Probe, group_of

    return [
        {
            "name": probe.name,
            "observes": probe.tap.value.replace("_", " "),
            "recorded": "by default" if group_of(probe) in DEFAULT_PROBES and probe.statistics else "on request",
            "statistics": ", ".join(statistic.name for statistic in probe.statistics),
            "package": package,
        }
        for package, probe in plugins.load("keelscope.probes")
        if isinstance(probe, Probe)
    ]


def statistics() -> list[Row]:
    """One row per statistic of every installed probe.

    Returns:
        Rows with name as in a run file, unit and meaning.
    """
    from keelscope.probe import available_probes, group_of

    return [
        {
            "name": f"{group_of(probe)}/{statistic.name}",
            "unit": statistic.unit,
            "meaning": statistic.doc,
            "recorded": "on request" if statistic in probe.optional else "with its probe",
        }
        for probe in available_probes().values()
        for statistic in (*probe.statistics, *probe.optional)
    ]


def rules() -> list[Row]:
    """One row per rule of the diagnosis.

    Returns:
        Rows with name, rule set and meaning.
    """
    from keelscope.diagnosis.rules import SETS, rule_name, rules_of

    found = [(name, rule) for name in SETS for rule in rules_of(name)]
    return [{"name": rule_name(rule), "set": name, "meaning": first_sentence(rule)} for name, rule in found]


def thresholds() -> list[Row]:
    """One row per threshold of the diagnosis.

    Returns:
        Rows with name, default, unit and meaning.
    """
    from keelscope.diagnosis.thresholds import THRESHOLDS

    return [
        {"name": one.name, "default": f"{one.value:g}", "unit": one.unit, "meaning": one.meaning} for one in THRESHOLDS
    ]


def schemes() -> list[Row]:
    """One row per residual scheme of the reference models.

    Returns:
        Rows with name, equation, options and meaning.
    """
    from keelscope.models import SCHEMES, describe

    found = [describe(scheme) for scheme in SCHEMES.values()]
    return [
        {
            "name": info.name,
            "equation": info.equation,
            "meaning": info.summary,
            "options": ", ".join(f"{option.name}={option.default}" for option in info.options),
        }
        for info in found
    ]


def first_sentence(thing: object) -> str:
    """The first paragraph of an object's docstring, on one line.

    Args:
        thing: anything with a docstring.

    Returns:
        The text, empty without a docstring.
    """
    return " ".join((getattr(thing, "__doc__", None) or "").strip().split("\n\n")[0].split())


_LISTS = {
    Kind.PROBES: probes,
    Kind.STATISTICS: statistics,
    Kind.RULES: rules,
    Kind.SCHEMES: schemes,
    Kind.THRESHOLDS: thresholds,
}
