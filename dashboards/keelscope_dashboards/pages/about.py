"""About this run: the model, its stacks and residual sub-layers, what was recorded and how, and the configuration."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from keelscope_dashboards.asking import Ask, Page, nothing_chosen
from keelscope_dashboards.blocks import Facts, Place, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from keelscope.store.reader import Run
    from keelscope.store.schema import SublayerInfo
    from keelscope_dashboards.blocks import Block

__all__ = ["PAGE"]

NONE = "–"  # noqa: RUF001  # the dash that reports show where there is nothing
MAX_ROWS = 200


def _build(ask: Ask) -> Sequence[Block]:
    with ask.focus.source.reading() as run:
        return [_run(ask, run), _config(run), _stacks(run), _sublayers(ask, run), _groups(run)]


def _run(ask: Ask, run: Run) -> Facts:
    info, steps = run.info, run.steps
    span = f"{len(steps):,} rows, step {steps[0]:,} to {steps[-1]:,}" if len(steps) else "none yet"
    pairs = (
        ("Title", info.title),
        ("Model", info.model_class),
        ("Parameters", f"{info.n_parameters:,}" if info.n_parameters else ""),
        ("Recorded", span),
        ("Status", ask.focus.source.status),
        ("Started", info.created_at.replace("T", " ").partition("+")[0]),
        ("Device", info.device),
        ("Library", info.training_library),
        ("Seed", str(info.seed) if info.seed >= 0 else ""),
        ("Run id", info.run_id),
        ("File", f"{ask.focus.source.path.name}, {_size(ask.focus.source.path.stat().st_size)}"),
    )
    notes = tuple(("Note", ask.focus.source.told(note)) for note in run.notes)
    return Facts(f"Run {ask.focus.name}", (*((name, value) for name, value in pairs if value), *notes))


def _size(octets: int) -> str:
    return f"{octets / 2**20:,.1f} MiB" if octets >= 2**20 else f"{octets / 2**10:,.0f} KiB"


def _config(run: Run) -> Block:
    pairs = tuple((str(key), NONE if value is None else str(value)) for key, value in run.info.config.items())
    if not pairs:
        return nothing_chosen('No configuration was given. ks.watch(..., config={"lr": 1e-3}) keeps one with the run.')
    return Facts("Configuration", pairs)


def _stacks(run: Run) -> Block:
    if not run.info.stacks:
        return nothing_chosen("No stack of like blocks was found: depth is counted in modules.")
    rows = tuple(
        (
            "(model)" if stack.path == "." else stack.path,
            stack.kind,
            f"{stack.length:,}",
            f"{stack.sublayers}" if stack.sublayers else "not known",
            "yes" if stack.main else "",
        )
        for stack in run.info.stacks
    )
    head = ("Stack", "Entries of class", "Entries", "Sub-layers per entry", "Verdict is drawn from it")
    return Table("Stacks", head, rows, numeric=(2, 3))


def _sublayers(ask: Ask, run: Run) -> Block:
    """The residual sub-layers; consecutive ones that differ in nothing but their number share a row."""
    found = run.info.sublayers
    if not found:
        return nothing_chosen("No residual sub-layer was found in the autograd graph of the first recorded step.")
    rows, places = [], []
    start = 1
    for _, members in groupby(found, key=_alike):
        alike = list(members)
        rows.append(_sublayer_row(start, alike))
        places.append(Place(ask.focus.id, depth=start, page="layer"))
        start += len(alike)
    head = (
        "Sub-layers",
        "Equation",
        "Shortcut weight a",
        "Schemes of that form",
        "Norm before",
        "Norm after",
        "Branch",
    )
    note = f"{len(found):,} residual additions, read from the autograd graph"
    return Table("Residual sub-layers", head, tuple(rows[:MAX_ROWS]), note, places=tuple(places[:MAX_ROWS]))


def _alike(one: SublayerInfo) -> tuple[object, ...]:
    norms = (_part(one.norm_before), _part(one.norm_after), _part(one.branch))
    return (one.form, one.schemes, one.alpha, *norms)


def _part(path: str) -> str:
    """The path with its numbers left open, so that like places in different blocks are alike."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


def _sublayer_row(start: int, alike: Sequence[SublayerInfo]) -> tuple[str, ...]:
    one, end = alike[0], start + len(alike) - 1
    shown = (lambda path: path) if start == end else _part
    return (
        f"{start}" if start == end else f"{start} to {end}",
        one.form,
        NONE if one.alpha is None else f"{one.alpha:.4g}",
        ", ".join(one.schemes) or "no named scheme",
        shown(one.norm_before) or NONE,
        shown(one.norm_after) or NONE,
        shown(one.branch) or NONE,
    )


def _groups(run: Run) -> Table:
    rows = tuple(
        (
            group.name,
            ", ".join(spec.name for spec in group.statistics),
            f"{len(group.sites):,}",
            f"{len(run.steps_of(group.name)):,}",
            group.probe or NONE,
            _joined(f"{key}: {value}" for key, value in group.provenance.items()),
        )
        for group in run.groups.values()
    )
    head = ("Group", "Statistics", "Sites", "Rows", "Probe", "How the numbers were taken")
    return Table("What was recorded", head, rows, numeric=(2, 3))


def _joined(parts: Iterable[str]) -> str:
    return "; ".join(parts) or NONE


PAGE = Page(
    "about",
    "About this run",
    "info",
    "What was trained, what was recorded of it, and how?",
    _build,
    scrub=False,
)
