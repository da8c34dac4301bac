"""How a run shows itself: a few lines in a terminal, a small table in a notebook.

Used by `reader.Run`. Every string may come from an untrusted file, so the HTML escapes all of them.
"""

from __future__ import annotations

from html import escape

from keelscope.store.schema import SCALARS
from keelscope.store.shown import ShownRun

__all__ = ["as_html", "as_text"]


def as_text(run: ShownRun) -> str:
    """The run in a few lines.

    Args:
        run: the run.

    Returns:
        Name and state, then one line per fact.
    """
    facts = _facts(run)
    width = max(len(name) for name, _ in facts)
    return "\n".join([f"<Run {_name(run)}>", *(f"  {name:{width}}  {value}" for name, value in facts)])


def as_html(run: ShownRun) -> str:
    """The run as an HTML table without styles or scripts.

    Args:
        run: the run.

    Returns:
        One ``<table>``.
    """
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in _facts(run))
    return f"<table><caption>Run {escape(_name(run))}</caption><tbody>{rows}</tbody></table>"


def _name(run: ShownRun) -> str:
    name = run.path.name if run.path else "in memory"
    return f"{name}, being recorded" if run.live else name


def _facts(run: ShownRun) -> list[tuple[str, str]]:
    info, steps = run.info, run.steps
    model = [info.model_class, f"{info.n_parameters:,} parameters" if info.n_parameters else "", info.training_library]
    facts = [
        ("title", info.title),
        ("created", info.created_at),
        ("model", ", ".join(part for part in model if part)),
        ("stacks", ", ".join(f"{stack.path} ({stack.length} x {stack.kind})" for stack in info.stacks)),
        ("steps", f"{steps.size}, {steps[0]} to {steps[-1]}" if steps.size else "none yet"),
    ]
    for group in run.groups.values():
        names = " ".join(spec.name for spec in group.statistics)
        facts.append((group.name, f"{names}  [{len(group.sites)} sites]"))
    facts.append((SCALARS, " ".join(run.scalars)))
    missed = sum(entry.status != "observed" for entry in run.coverage)
    if run.coverage:
        facts.append(("coverage", f"{len(run.coverage) - missed} observed, {missed} not"))
    facts += [("note", note) for note in run.history.notes]
    return [(name, value) for name, value in facts if value]
