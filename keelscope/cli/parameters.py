"""Values of the command line that need no conversion are taken as they are.

Newer versions of typer check every value with pydantic, texts and what was left out too. Loading pydantic costs 0.1 s
of CPU, a tenth of a whole ``keelscope report``; so it is left to the values that have to become something else.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PlainCommand", "PlainGroup"]


class PlainCommand(TyperCommand):
    """A command that converts only what needs it."""

    def get_params(self, ctx: Any) -> Any:
        """Its parameters, each of which passes on what needs no conversion."""
        return [_spared(param) for param in super().get_params(ctx)]


class PlainGroup(TyperGroup):
    """A group whose own options are converted only where they need it."""

    def get_params(self, ctx: Any) -> Any:
        """Its parameters, each of which passes on what needs no conversion."""
        return [_spared(param) for param in super().get_params(ctx)]


def _spared(param: Any) -> Any:
    if "process_value" not in vars(param):
        param.process_value = partial(_processed, param, param.process_value)
    return param


def _processed(param: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """What typer makes of a value, without its help where that is known."""
    if not _is_plain(param, value):
        return convert(ctx, value)
    kept = () if param.multiple else value
    return kept if param.callback is None else param.callback(ctx, param, kept)


def _is_plain(param: Any, value: Any) -> bool:
    """Whether an option was left out, or is a text that is to be one; older versions of typer do not tell its type."""
    kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    if kind is None or param.nargs != 1:
        return False
    if value is None:
        return not param.required
    return not param.multiple and (kind is str or (kind is int and value == param.default)) and isinstance(value, kind)
