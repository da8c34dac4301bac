"""`Page` and `Ask`: what a page of the dashboard is, and what it is asked with.

A page is one file of `keelscope_dashboards.pages` with one entry in its list. It gets an `Ask` (the runs on show, the
cursor, what was chosen) and returns blocks; address, navigation, cursor, drawing and the HTTP answer are made from the
entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from keelscope_dashboards.blocks import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from keelscope.diagnosis.report import Report
    from keelscope_dashboards.blocks import Block
    from keelscope_dashboards.followed import FollowedRun
    from keelscope_dashboards.verdicts import Verdict

__all__ = ["Ask", "Choice", "Option", "Page", "Shown", "missing", "nothing_chosen", "settled"]


@dataclass(frozen=True, slots=True)
class Option:
    """One thing to choose."""

    value: str
    label: str
    group: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A control of a page; its value stands in the address under its name."""

    name: str
    label: str
    options: tuple[Option, ...]
    default: tuple[str, ...]
    most: int = 1
    """How many can be chosen at once."""
    look: Literal["segments", "select"] = "segments"


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """One run on show."""

    id: str
    name: str
    slot: int
    source: FollowedRun
    verdict: Verdict
    report: Report | None
    """None while the run is being diagnosed."""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """What a page is asked to show."""

    runs: tuple[Shown, ...]
    """On show and readable, in the order of the run list."""
    focus: Shown
    step: int
    """The cursor's step; the last one of every run when it is beyond."""
    depth: int
    """The cursor's depth, as the report counts it."""
    chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values by choice, each one of its options."""

    def one(self, name: str) -> str:
        """The value of a choice that takes one; empty if it has none."""
        return next(iter(self.chosen.get(name, ())), "")


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the dashboard."""

    name: str
    """Its place in the address."""
    title: str
    icon: str
    question: str
    """What it answers, in one sentence."""
    build: Callable[[Ask], Sequence[Block]] | None = None
    """None for the overview, which the browser draws from tiles alone."""
    choices: Callable[[Ask], Sequence[Choice]] = lambda _: ()
    follows: frozenset[str] = frozenset()
    """Which of ``"step"``, ``"depth"`` and ``"verdict"`` it has to be asked anew for."""
    scrub: bool = True
    """Whether it has the slider over steps."""
    single: bool = True
    """Whether it is about the focused run alone."""


def settled(choice: Choice, wished: Sequence[str]) -> tuple[str, ...]:
    """The valid part of what was wished, else the default.

    Args:
        choice: a control.
        wished: values from an address.

    Returns:
        At most `Choice.most` values.

    Example:
        >>> settled(Choice("y", "", (Option("log", ""), Option("linear", "")), ("log",)), ["sin", "linear"])
        ('linear',)
    """
    known = {option.value for option in choice.options}
    valid = tuple(dict.fromkeys(value for value in wished if value in known))[: choice.most]
    return valid or tuple(value for value in choice.default if value in known) or _first(choice)


def _first(choice: Choice) -> tuple[str, ...]:
    return tuple(option.value for option in choice.options[:1])


def missing(name: str, group: str) -> Notice:
    """What a page says about a run that lacks the group it draws.

    Args:
        name: the run.
        group: name of the group, which is also that of the probe that records it.

    Returns:
        A notice with the line that records it.
    """
    return Notice(
        f"{name} does not record {group}",
        f"Nothing of the group {group} is in the file. Record it with the probe of that name:",
        f'ks.watch(model, "runs/mine.h5", optimizer=optimizer, probes=["default", "{group}"])',
    )


def nothing_chosen(sentence: str) -> Notice:
    """What a page says when there is nothing to draw for another reason."""
    return Notice("Nothing to show", sentence)
