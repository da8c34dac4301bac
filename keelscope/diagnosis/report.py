"""`Report`: a diagnosis that can be printed, saved and passed on; `compare` puts several side by side.

Made by `diagnose`. The numbers are in the record it extends; this file only offers the formats.
The HTML page with plots comes from a package of the entry point group ``keelscope.renderers``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

from keelscope import plugins, tables
from keelscope.diagnosis.comparison import SideBySide
from keelscope.diagnosis.fail_on import complaint, fail_words, matched
from keelscope.diagnosis.plain import plain_values
from keelscope.diagnosis.record import Diagnosis
from keelscope.errors import HealthError, UsageError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from keelscope.store.reader import Run

__all__ = ["Comparison", "Report", "compare", "diagnose"]


class Report(Diagnosis):
    """A verdict with its evidence, in every format.

    ``print(report)`` gives plain text, a notebook a table, rich a coloured view.
    """

    __slots__ = ()

    def check(self, fail_on: str | Sequence[str] = "error") -> Self:
        """Fail where the gradients are not healthy: for tests, as ``--fail-on`` is for the command line.

        Args:
            fail_on: headlines, rules and severities, as words or in one text with commas between; a severity also
                holds of every graver finding.

        Returns:
            The report itself.

        Raises:
            HealthError: an AssertionError with the verdict and the findings that match.
            UnknownNameError: if a word is no headline, rule or severity.
            UsageError: if there is no word at all.
        """
        words = matched(self, fail_words(fail_on))
        if words:
            raise HealthError(complaint(self, words))
        return self

    def to_dict(self) -> dict[str, object]:
        """The report as JSON values.

        Keys: ``format``, ``title``, ``model``, ``n_parameters``, ``step``, ``steps``, ``headline``, ``sentence``,
        ``decided_by``, ``depth`` (unit, length, layers, stack, paths and their values), ``stacks`` (the headline of
        each stack that is judged), ``profiles`` (by series: slope, total, span, flatness, knee, levels along those
        paths, ...), ``findings``, ``layers``, ``coverage`` (entries by status), ``structure`` (residual sub-layers by
        equation), ``paths`` (the explanation, and per residual stream the shortcut, the decades by cause and the
        attribution of every sub-layer; null where not recorded) and ``notes``. A number that was not
        observed is null; NaN and infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.

        Returns:
            Dictionaries, lists, strings, numbers and None only.
        """
        return plain_values(self)

    def to_json(self, *, indent: int | None = 2) -> str:
        """`to_dict` as strict JSON text.

        Args:
            indent: spaces per level; None for one line.

        Returns:
            The text.
        """
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_markdown(self, *, unfold: bool = False) -> str:
        """Headline, findings and layer table in Markdown.

        Args:
            unfold: show every layer of long stacks.

        Returns:
            The text.
        """
        return tables.as_markdown(self, unfold=unfold)

    def to_csv(self) -> str:
        """The layer table, every layer, in full precision.

        Returns:
            CSV with a header line; empty cells were not observed.
        """
        return tables.as_csv(self)

    def to_text(self, *, width: int = 100, unfold: bool = False) -> str:
        """What the terminal shows, without colour.

        Args:
            width: characters per line.
            unfold: show every layer of long stacks.

        Returns:
            The text.
        """
        from keelscope.terminal import as_text

        return as_text(lambda console: self.view(console, unfold=unfold), width=width)

    def view(self, console: Console, *, unfold: bool = False, width: int | None = None) -> RenderableType:
        """What rich prints.

        Args:
            console: tells width and character set.
            unfold: show every layer of long stacks.
            width: characters per line; the console's by default.

        Returns:
            The renderable.
        """
        from keelscope.terminal import report_view

        return report_view(self, console, unfold=unfold, width=width)

    def to_html(self, path: str | Path) -> Path:
        """A self-contained page with plots, made by the renderer of an installed package.

        A renderer is an object of the entry point group ``keelscope.renderers``: called with the report, it returns
        the page as text.

        Args:
            path: where to write it.

        Returns:
            The path.

        Raises:
            UsageError: if no renderer is installed.
        """
        found = [renderer for _, renderer in plugins.load("keelscope.renderers") if callable(renderer)]
        if not found:
            raise UsageError(
                "No HTML renderer is installed (entry point group keelscope.renderers); install keelscope with its "
                "dashboards, or use to_markdown()."
            )
        target = Path(path).expanduser()
        target.write_text(cast("Callable[[Report], str]", found[0])(self), encoding="utf-8")
        return target

    def __str__(self) -> str:
        from keelscope.terminal import terminal_width

        return self.to_text(width=terminal_width())

    def __repr__(self) -> str:
        return f"<Report {self.title}: {self.headline}; {len(self.findings)} findings, {len(self.layers)} layers>"

    def _repr_html_(self) -> str:
        return tables.as_html(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.view(console, width=options.max_width)


def diagnose(
    run: Run, *, step: int = -1, rules: str = "default", thresholds: Mapping[str, float] | None = None
) -> Report:
    """Diagnose a run.

    Args:
        run: a run, finished or still being written.
        step: the recorded step to report on; -1 is the last one.
        rules: the set that findings come from: ``"default"``, or ``"classic"`` for the absolute thresholds of other
            tools. The headline is the same.
        thresholds: new values of some thresholds, e.g. ``{"vanishing": 3.0}``; ``keelscope list thresholds`` prints
            them all.

    Returns:
        The report.

    Raises:
        UsageError: if a threshold is not a number above 0.
        UnknownNameError: if that step was not recorded, or there is no such rule set or threshold.
    """
    return Report.of(run, step=step, rules=rules, thresholds=thresholds)


class Comparison(SideBySide):
    """Several runs side by side over depth.

    ``print(comparison)`` gives plain text, rich a coloured view.
    """

    __slots__ = ()

    def to_text(self, *, width: int = 100) -> str:
        """What the terminal shows, without colour.

        Args:
            width: characters per line.

        Returns:
            The text.
        """
        from keelscope.terminal import as_text

        return as_text(self.view, width=width)

    def view(self, console: Console, *, unfold: bool = False, width: int | None = None) -> RenderableType:  # noqa: ARG002  # depth rows are bins: nothing folds
        """What rich prints.

        Args:
            console: tells width and character set.
            unfold: accepted as by `Report.view`; a comparison has nothing folded.
            width: characters per line; the console's by default.

        Returns:
            The renderable.
        """
        from keelscope.terminal import comparison_view

        return comparison_view(self, console, width=width)

    def __str__(self) -> str:
        from keelscope.terminal import terminal_width

        return self.to_text(width=terminal_width())

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.titles)}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.view(console, width=options.max_width)


def compare(*runs: Report | Run | Sequence[Report | Run], bins: int = 16, titles: Sequence[str] = ()) -> Comparison:
    """Put 2 to 8 runs side by side over depth.

    Args:
        *runs: runs, reports on them, or a sequence of these.
        bins: largest number of depth rows.
        titles: what each is called; by default its own title.

    Returns:
        The comparison.

    Raises:
        UsageError: for fewer than 2 or more than 8 runs.
    """
    flat = [run for item in runs for run in (item if isinstance(item, Sequence) else [item])]
    return Comparison.of([run if isinstance(run, Report) else Report.of(run) for run in flat], bins=bins, titles=titles)
