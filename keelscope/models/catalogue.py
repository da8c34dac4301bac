"""What is known of a scheme without building it: `describe` reads equation, init, source and options from its class.

The texts live in the docstring of each class, in sections ``Equation:``, ``Init:``, ``Expect:`` and ``Source:``, and
option by option under ``Args:``. `keelscope list schemes` and the page docs/schemes.md print them.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keelscope.models.residual import SubLayer

__all__ = ["Option", "SchemeInfo", "describe", "option_names"]

SECTION = re.compile(r"^(\w+):\n((?:(?:    .*)?\n)+)", re.MULTILINE)
ARGUMENT = re.compile(r"^    (\w+): ((?:.+\n(?:     .*\n)*))", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a scheme."""

    name: str
    default: object
    doc: str


@dataclass(frozen=True, slots=True)
class SchemeInfo:
    """One scheme in words."""

    name: str
    summary: str
    """One sentence."""
    equation: str
    """The residual addition; x is the stream, F the branch, n a norm."""
    init: str
    """What the scheme does to freshly drawn weights."""
    expect: str
    """Signature of the gradient flow at random init."""
    source: str
    """Where the equation comes from."""
    options: tuple[Option, ...]


def _joined(text: str) -> str:
    return " ".join(text.split())


def option_names(scheme: type[SubLayer]) -> list[str]:
    """The options a scheme accepts.

    Args:
        scheme: Class of the stack's entries.

    Returns:
        Names of its keyword-only constructor parameters.
    """
    parameters = inspect.signature(scheme).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def describe(scheme: type[SubLayer]) -> SchemeInfo:
    """Everything there is to say about a scheme.

    Args:
        scheme: Class of the stack's entries.

    Returns:
        Its texts and options; a text that the docstring lacks is empty.
    """
    doc = (inspect.getdoc(scheme) or "") + "\n"
    sections = dict(SECTION.findall(doc))
    arguments = dict(ARGUMENT.findall(sections.get("Args", "")))
    parameters = inspect.signature(scheme).parameters
    options = tuple(
        Option(name, parameters[name].default, _joined(arguments.get(name, ""))) for name in option_names(scheme)
    )
    texts = {key.lower(): _joined(sections.get(key, "")) for key in ("Equation", "Init", "Expect", "Source")}
    return SchemeInfo(name=scheme.name, summary=_joined(doc.split("\n\n")[0]), options=options, **texts)
