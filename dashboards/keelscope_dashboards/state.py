"""The state of all runs as JSON values: what the page polls once a second and what its cards are made from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from keelscope_dashboards.theme import SYMBOLS
from keelscope_dashboards.verdicts import PENDING, Verdict

if TYPE_CHECKING:
    from keelscope_dashboards.followed import FollowedRun, Status
    from keelscope_dashboards.index import RunIndex
    from keelscope_dashboards.verdicts import Judge

__all__ = ["RunState", "digest_of", "run_states", "summary_of"]

JUDGED_AT_ONCE = 8
"""Runs that are judged while others are still being opened; the rest waits so that opening is not slowed down."""


@dataclass(frozen=True, slots=True)
class RunState:
    """One run as the page knows it."""

    id: str
    name: str
    slot: int
    """Colour and marker."""
    status: Status
    error: str
    """Why the file cannot be read; one sentence, empty when it can."""
    revision: int
    """Grows with every change of the file."""
    rows: int
    """Recorded steps."""
    head: int
    """Last recorded step; -1 before the first."""
    planned: int
    """Steps the training will take, 0 when it did not say."""
    model: str
    """Scheme or class of the model."""
    panels: tuple[str, ...]
    """Names of the panels it can fill."""
    verdict: Verdict


def run_states(index: RunIndex, judge: Judge) -> tuple[RunState, ...]:
    """All runs on show, fresh.

    Args:
        index: the runs.
        judge: gives the verdicts.

    Returns:
        States in the order of the run list.
    """
    sources = index.refresh()
    opening = any(source.status == "waiting" for source in sources.values())
    return tuple(
        _state(i, run_id, source, judge if i < JUDGED_AT_ONCE or not opening else None)
        for i, (run_id, source) in enumerate(sources.items())
    )


def _state(i: int, run_id: str, source: FollowedRun, judge: Judge | None) -> RunState:
    facts = source.facts()
    return RunState(
        id=run_id,
        name=source.name,
        slot=i % len(SYMBOLS),
        status=source.status,
        error=source.error,
        revision=source.revision,
        rows=facts.rows,
        head=facts.head,
        planned=facts.planned,
        model=facts.model,
        panels=tuple(panel.name for panel in facts.panels),
        verdict=_verdict(run_id, source, judge),
    )


def _verdict(run_id: str, source: FollowedRun, judge: Judge | None) -> Verdict:
    if source.error:
        return Verdict("error", source.error)
    return judge.verdict(run_id, source) if judge is not None else PENDING


def summary_of(states: tuple[RunState, ...]) -> list[dict[str, Any]]:
    """What the browser polls: everything but the words of the verdicts."""
    listing = []
    for state in states:
        values = asdict(state)
        del values["verdict"]
        listing.append(values | {"headline": state.verdict.headline})
    return listing


def digest_of(states: tuple[RunState, ...]) -> str:
    """Two words: the first changes when the run list has to be drawn anew, the second when a card or a finding has."""
    opening = any(state.status == "waiting" for state in states)  # the list is drawn once more when all are open
    listed = [(s.id, s.name, *(() if opening else (s.status, s.error, s.model))) for s in states]
    judged = [(s.id, s.name, s.error, asdict(s.verdict)) for s in states]
    return f"{_hash(listed)}.{_hash(judged)}"


def _hash(words: list[Any]) -> str:
    return hashlib.blake2s(json.dumps(words).encode(), digest_size=8).hexdigest()
