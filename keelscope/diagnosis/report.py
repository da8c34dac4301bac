"""`Report`: a diagnosis that can be printed, saved and passed on; `compare` puts several side by side.

Made by `diagnose`. The numbers are in the record it extends; this file only offers the formats.
The HTML page with plots comes from a package of the entry point group ``keelscope.renderers``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from keelscope import plugins, tables
from keelscope.diagnosis.comparison import SideBySide
from keelscope.diagnosis.record import Diagnosis
from keelscope.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from keelscope.diagnosis.evidence import NamedProfile
    from keelscope.diagnosis.finding import Finding
    from keelscope.diagnosis.layers import Layer
    from keelscope.store.reader import Run

__all__ = ["JSON_FORMAT", "Comparison", "Report", "compare", "diagnose"]

JSON_FORMAT = 1
"""Raised when a key of `Report.to_dict` changes its meaning or goes away."""

Json = dict[str, object]


class Report(Diagnosis):
    """A verdict with its evidence, in every format.

    ``print(report)`` gives plain text, a notebook a table, rich a coloured view.
    """

    __slots__ = ()

    def to_dict(self) -> Json:
        """The report as JSON values.

        Keys: ``format``, ``title``, ``model``, ``n_parameters``, ``step``, ``steps``, ``headline``, ``sentence``,
        ``decided_by``, ``depth`` (unit, length, layers, stack, paths and their values), ``profiles`` (by series:
        slope, total, span, flatness, knee, levels along those paths, ...), ``findings``, ``layers``, ``coverage``
        (entries by status) and ``notes``. A number that was not observed is null; NaN and infinities are the strings
        ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.

        Returns:
            Dictionaries, lists, strings, numbers and None only.
        """
        info, axis = self.run.info, self.axis
        return {
            "format": JSON_FORMAT,
            "title": self.title,
            "model": info.model_class,
            "n_parameters": info.n_parameters,
            "step": self.step if self.steps else None,
            "steps": list(self.steps),
            "headline": self.headline,
            "sentence": self.sentence,
            "decided_by": self.verdict.decided_by or None,
            "depth": {
                "unit": axis.unit,
                "length": axis.length,
                "layers": len(axis),
                "stack": axis.stack.path if axis.stack is not None else None,
                "paths": [site.path for site in axis.sites],
                "values": axis.depth.tolist(),
            },
            "profiles": {key: _profile(profile, self) for key, profile in self.profiles.items()},
            "findings": [_finding(finding) for finding in self.findings],
            "layers": [_layer(layer) for layer in self.layers],
            "coverage": self._coverage(),
            "notes": list(self.notes),
        }

    def _coverage(self) -> Json:
        counts: dict[str, int] = {}
        for entry in self.run.coverage:
            counts[entry.status] = counts.get(entry.status, 0) + 1
        return dict(counts)

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
        return self.to_text()

    def __repr__(self) -> str:
        return f"<Report {self.title}: {self.headline}; {len(self.findings)} findings, {len(self.layers)} layers>"

    def _repr_html_(self) -> str:
        return tables.as_html(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.view(console, width=options.max_width)


def diagnose(run: Run, *, step: int = -1) -> Report:
    """Diagnose a run.

    Args:
        run: a run, finished or still being written.
        step: the recorded step to report on; -1 is the last one.

    Returns:
        The report.

    Raises:
        UnknownNameError: if that step was not recorded.
    """
    return Report.of(run, step=step)


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
        return self.to_text()

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.titles)}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.view(console, width=options.max_width)


def compare(*runs: Report | Run | Sequence[Report | Run], bins: int = 16) -> Comparison:
    """Put 2 to 8 runs side by side over depth.

    Args:
        *runs: runs, reports on them, or a sequence of these.
        bins: largest number of depth rows.

    Returns:
        The comparison.

    Raises:
        UsageError: for fewer than 2 or more than 8 runs.
    """
    flat = [run for item in runs for run in (item if isinstance(item, Sequence) else [item])]
    return Comparison.of([run if isinstance(run, Report) else Report.of(run) for run in flat], bins=bins)


def _safe(value: float | None) -> float | str | None:
    """A number that strict JSON can hold."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


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
        "value": _known(finding.value),
        "threshold": _known(finding.threshold),
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
    }
