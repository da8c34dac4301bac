"""The page that all benchmarks write to: the part of `make bench`, and marked sections that it leaves as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from targets import targets_of

__all__ = ["PAGE", "page_of", "replaced", "sections"]

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
TEMPLATE = Path(__file__).parent / "benchmarks.md.in"
SECTION = re.compile(r"<!-- ([a-z]+) -->\n.*?<!-- end of \1 -->\n", re.DOTALL)


def sections(page: str) -> dict[str, str]:
    """Name and text of every marked section, markers included, in order."""
    return {found[1]: found[0] for found in SECTION.finditer(page)}


def replaced(page: str, name: str, body: str) -> str:
    """The page with another text in a section, which stays where it is; a new one comes last."""
    text = f"<!-- {name} -->\n{body}<!-- end of {name} -->\n"
    told = sections(page).get(name)
    return page.replace(told, text) if told else f"{page.rstrip()}\n\n{text}"


def page_of(told: str, machine: str, shapes: Iterable[tuple[str, str]], pairs: int, parts: Sequence[str]) -> str:
    """The page with new parts of `make bench`; the sections that other commands write are left as they are."""
    values: dict[str, object] = {"pairs": pairs, "machine": machine, "targets": targets_of(parts[0])}
    values["shapes"] = "\n".join(f"- **{name}**: {doc}." for name, doc in shapes)
    values |= dict(zip(("tiles", "wholes", "growth", "processes"), parts, strict=True))
    return "\n".join([TEMPLATE.read_text().format(**values), *sections(told).values()])
