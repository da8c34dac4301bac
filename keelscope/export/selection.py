"""What of a run is exported: which series, which sites, which steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from keelscope.errors import UnknownNameError, UsageError
from keelscope.formatting import count
from keelscope.store.longform import LongBlock, long_blocks
from keelscope.store.reader import Run
from keelscope.store.schema import SCALARS

__all__ = ["Selection", "parsed_steps"]

_STEPS = re.compile(r"(\d*)(?::(\d*)(?::(\d+))?)?")


@dataclass(frozen=True, slots=True)
class Selection:
    """A part of a run."""

    series: tuple[str, ...] = ("*",)
    """Patterns on ``group/statistic``; a group alone means all of it."""
    sites: str = "*"
    """Pattern on the path of a site."""
    steps: slice = field(default_factory=lambda: slice(None))
    """From which step on, before which step, every how-manieth recorded one."""

    def keys(self, run: Run) -> list[str]:
        """The series that are meant.

        Args:
            run: the run.

        Returns:
            Their keys in recorded order.

        Raises:
            UnknownNameError: if a pattern matches nothing.
        """
        found: dict[str, None] = {}
        for pattern in self.series:
            full = pattern if "/" in pattern or pattern == "*" else f"{pattern}/*"
            matched = [key for key in run.keys() if fnmatchcase(key, full)]  # noqa: SIM118 - a run is no mapping
            if not matched:
                raise UnknownNameError(
                    f"no series matches {pattern!r}; groups are {', '.join((*run.groups, SCALARS))}."
                )
            found |= dict.fromkeys(matched)
        return [key for key in run.keys() if key in found]  # noqa: SIM118 - a run is no mapping

    def sites_of(self, run: Run) -> dict[str, NDArray[np.intp]]:
        """The sites that are meant, by group.

        Args:
            run: the run.

        Returns:
            Indices on the site axis of each group.

        Raises:
            UnknownNameError: if the pattern matches no site of any group.
        """
        found = {
            name: np.array([i for i, site in enumerate(group.sites) if fnmatchcase(site.path, self.sites)], np.intp)
            for name, group in run.groups.items()
        }
        if found and not any(map(len, found.values())):
            known = next(iter(run.groups.values())).sites[:3]
            named = ", ".join(repr(site.path) for site in known)
            raise UnknownNameError(f"no site matches {self.sites!r}; sites are {named}, ...")
        return found

    def check_steps(self, run: Run) -> None:
        """Make sure that some recorded step is meant.

        Args:
            run: the run.

        Raises:
            UsageError: if none is.
        """
        first, before = self.steps.start or 0, self.steps.stop
        steps = np.asarray(run.steps, dtype=np.int64)
        limited = self.steps.start is not None or before is not None
        if limited and not ((steps >= first) & ((steps < before) if before is not None else True)).any():
            known = f"{count(len(steps), 'step')} from {steps[0]} to {steps[-1]}" if steps.size else "no step"
            asked = f"from {first} on" if before is None else f"from {first} to before {before}"
            raise UsageError(f"no recorded step lies {asked}; the run holds {known}.")

    def blocks(self, run: Run) -> Iterator[LongBlock]:
        """The selected numbers as a long table.

        Args:
            run: the run.

        Returns:
            Blocks of bounded size.
        """
        return long_blocks(run, self.keys(run), self.sites_of(run), self.steps)


def parsed_steps(text: str) -> slice:
    """Steps as the command line names them.

    Args:
        text: ``"100"``, ``"100:200"``, ``":200"`` or ``"0:1000:10"``; empty means all.

    Returns:
        From, before, and every how-manieth recorded one.

    Raises:
        UsageError: if it is anything else.

    Example:
        >>> parsed_steps("100:200"), parsed_steps("7"), parsed_steps("::5")
        (slice(100, 200, None), slice(7, 8, None), slice(None, None, 5))
    """
    match = _STEPS.fullmatch(text)
    if match is None or (match[3] is not None and int(match[3]) == 0):
        raise UsageError(f"--steps {text!r} is not FIRST:BEFORE or FIRST:BEFORE:EVERY, such as 100:200 or ::10.")
    first, before, every = (int(part) if part else None for part in match.groups())
    if first is not None and ":" not in text:
        before = first + 1
    return slice(first, before, every)
