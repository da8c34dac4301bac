"""The limits that watching is held to, beside what a table of tiles shows."""

from __future__ import annotations

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
    return "\n".join(lines)
