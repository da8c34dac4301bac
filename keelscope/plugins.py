"""The door for plugin packages: probes, rules, commands and renderers found by entry point.

Built-in and third-party packages enter alike: one entry point per package, naming one object or a tuple of them.
The session asks for probes, the diagnosis for rules, the command line for commands, `Report.to_html` for renderers.
Nothing is looked up at import: a look-up reads the metadata of every installed package (about 50 ms).
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from keelscope.errors import PluginWarning, UnknownNameError

__all__ = ["GROUPS", "load"]

GROUPS = ("keelscope.commands", "keelscope.probes", "keelscope.renderers", "keelscope.rules")


def load(group: str) -> list[tuple[str, object]]:
    """Everything that installed packages offer in one group, as ``(package name, object)``.

    An entry point that names a tuple or a list offers each of its entries. A package whose entry point does not load
    warns with `PluginWarning` and is left out; the others are not affected.

    Args:
        group: one of `GROUPS`, e.g. ``"keelscope.probes"``.

    Returns:
        Pairs sorted by package name; the order inside one package is its own.

    Raises:
        UnknownNameError: if there is no such group.

    Example:
        >>> sorted({package for package, _ in load("keelscope.probes")})[:1]
        ['keelscope']
    """
    if group not in GROUPS:
        raise UnknownNameError(f"there is no plugin group {group!r}; groups are {', '.join(GROUPS)}.")
    named = [(_package(point), point) for point in entry_points(group=group)]  # each name parses a metadata file
    found = sorted(named, key=lambda pair: (pair[0], pair[1].name))
    return [(package, item) for package, point in found for item in _items(point)]


def _items(point: EntryPoint) -> tuple[object, ...]:
    try:
        loaded = point.load()
    except Exception as error:  # whatever a foreign package raises while it is imported, keelscope must go on
        reason = f"{type(error).__name__}: {error}"
        _warn_once(
            f"plugin {_package(point)} is left out: its entry point {point.name} = {point.value} ({point.group}) "
            f"does not load ({reason}); update or uninstall the package."
        )
        return ()
    return tuple(loaded) if isinstance(loaded, (tuple, list)) else (loaded,)


@cache
def _warn_once(message: str) -> None:
    """Python's own register of warnings forgets whenever an import changes a filter, and plugins import much."""
    warnings.warn(message, PluginWarning, stacklevel=5)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value.partition(":")[0]
