"""The coverage of a finished run is that of all its rows, though its file is created when the first one is complete.

What a later row has seen is marked in place when the file is closed: `writer` and `memory` are told, `commit` writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

from keelscope.store.schema import CoverageEntry

__all__ = ["Seen", "covered", "observed_later", "seen_by"]

Seen: TypeAlias = frozenset[tuple[str, str]]
"""``(what, path)`` of modules and parameters that were observed."""


def seen_by(entries: Iterable[CoverageEntry]) -> Seen:
    """What a coverage calls observed.

    Args:
        entries: the coverage.

    Returns:
        Modules and parameters.

    Example:
        >>> sorted(seen_by([CoverageEntry("a", "module", "observed"), CoverageEntry("b", "module", "frozen")]))
        [('module', 'a')]
    """
    return frozenset((entry.what, entry.path) for entry in entries if entry.status == "observed")


def covered(entries: Iterable[CoverageEntry], seen: Seen) -> tuple[CoverageEntry, ...]:
    """A coverage after later rows.

    Args:
        entries: that of the first row.
        seen: what all rows have observed.

    Returns:
        The same modules and parameters.
    """
    later = {entry for entry in entries if entry.status != "observed" and (entry.what, entry.path) in seen}
    return tuple(observed_later(entry) if entry in later else entry for entry in entries)


def observed_later(entry: CoverageEntry) -> CoverageEntry:
    """An entry that a row after the first one observed.

    Args:
        entry: as the first row shows it.

    Returns:
        The entry by now, which still knows the first status.
    """
    return replace(entry, status="observed", reason="", first=entry.status, first_reason=entry.reason)
