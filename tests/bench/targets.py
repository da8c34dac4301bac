"""The limits that watching is held to, beside what a table of tiles shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["targets_of"]

LOW, MEAN = 2, 4  # columns of the table: 10th percentile and mean
LIMITS = {
    ("blocks and norms", LOW): {"W1": 1.10, "W2": 1.06, "W3": 1.12},
    ("blocks and norms, torch", LOW): {"W1": 1.15, "W2": 1.10, "W3": 1.30},
    ("every leaf", LOW): {"W1": 1.22, "W2": 1.10, "W3": 1.25},
    ("blocks and norms, every=10", MEAN): {"W1": 1.01, "W2": 1.01, "W3": 1.015},
    ("sublayers alone, on its step", LOW): {"W1": 1.2, "W2": 1.2, "W3": 1.2},
    ("default sites, steps not recorded", LOW): {"W1": 1.01, "W2": 1.01, "W3": 1.01},
}
HOPED = {"W1": 1.05, "W2": 1.03, "W3": 1.05}
"""For blocks and norms with the kernel, beyond the limit."""


def targets_of(tiles: str) -> str:
    """A table of limits and whether they hold, from the table of tiles."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tiles.splitlines()[2:]]
    measured = {(row[0], row[1]): row for row in rows}
    lines = ["| watched | CPU | tile | measured | limit | holds |", "|---|---|---|---|---|---|"]
    for (name, column), limits in LIMITS.items():
        kind = "p10" if column == LOW else "mean"
        for tile, limit in limits.items():
            row = measured.get((tile, name))
            if row is not None and "does not run" not in row[LOW]:
                verdict = "yes" if float(row[column]) <= limit else "**no**"
                lines.append(f"| {name} | {kind} | {tile} | {row[column]} | {limit} | {verdict} |")
    return "\n".join([*lines, *hoped_of(measured)])


def hoped_of(measured: Mapping[tuple[str, str], Sequence[str]]) -> list[str]:
    """How far the table is from the figures that are hoped for, as a paragraph."""
    there = {tile: float(row[LOW]) for tile in HOPED if (row := measured.get((tile, "blocks and norms"))) is not None}
    said = [f"{tile} {HOPED[tile]} ({_distance(low - HOPED[tile])})" for tile, low in there.items()]
    return ["", f"Hoped for beyond these limits, blocks and norms: {', '.join(said)}."] if said else []


def _distance(above: float) -> str:
    return f"{above:.2f} above it" if above > 0.004 else "reached"
