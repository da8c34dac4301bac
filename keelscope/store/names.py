"""Which strings may name an HDF5 object, and how any other label is kept beside it.

Labels come from users and models and may hold anything; names of objects are plain identifiers, as netCDF asks.
Used by `rows` and `encoding` when writing and by `decoding` when reading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from keelscope.errors import UsageError

__all__ = [
    "ALL",
    "COVERAGE",
    "GRADIENTS",
    "LOGGED_NAN",
    "OBSERVED",
    "RESERVED",
    "SEEN_LATER",
    "SITE",
    "STATUS",
    "STEP",
    "SUBLAYERS",
    "TOTAL_NORM",
    "WALL_TIME",
    "as_json_text",
    "check_name",
    "clean",
    "clean_text",
    "dataset_names",
]

ALL = slice(None)
"""The whole of an axis."""
STEP = "step"
SITE = "site"
OBSERVED = "observed"
WALL_TIME = "wall_time"
GRADIENTS = "parameter_gradients"
SUBLAYERS = "sublayers"
TOTAL_NORM = "grad_norm_total"
"""The scalar that is the norm over all of ``parameter_gradients/norm``."""
STATUS = "status"
COVERAGE = "coverage"
SEEN_LATER = "seen_later"
LOGGED_NAN = "logged_nan/"
"""Before the name of a scalar: 1 where NaN was logged under it, and no number so far."""
RESERVED = frozenset({STEP, SITE, OBSERVED, WALL_TIME, "kind", "role", "stack", "position", "numel", "aliases"})

_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_UNSTORABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_name(name: str, what: str) -> None:
    """Refuse a name that cannot name an HDF5 object.

    Args:
        name: name of a group, statistic or axis.
        what: what it names, for the message.

    Raises:
        UsageError: if it is not a plain identifier, is over 64 characters, or has a meaning of its own in the file.
    """
    if not _IDENTIFIER.fullmatch(name) or len(name) > 64 or name in RESERVED:
        raise UsageError(
            f"{what} cannot be called {name!r}: use at most 64 letters, digits and underscores, a letter first, "
            f"and none of {', '.join(sorted(RESERVED))}."
        )


def clean(label: str) -> str:
    """The label as a file can hold it: control characters and lone surrogates become U+FFFD.

    Args:
        label: any string.

    Returns:
        The same string for every label without such characters.

    Example:
        >>> clean("a/b 층 %2F"), clean("a" + chr(27) + "[31m")
        ('a/b 층 %2F', 'a�[31m')
    """
    return label if str.isprintable(label) else _UNSTORABLE.sub("\ufffd", label)


def clean_text(text: str) -> str:
    """A sentence as a file can hold it: as `clean`, but newlines and tabs stay.

    Args:
        text: any string.

    Returns:
        The same string for ordinary text.
    """
    return "\t".join("\n".join(map(clean, part.split("\n"))) for part in text.split("\t"))


def as_json_text(text: str) -> str:
    """JSON as a file can hold it: what `clean` would replace is escaped instead.

    Args:
        text: JSON.

    Returns:
        JSON of the same value.
    """
    return _UNSTORABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def dataset_names(labels: Iterable[str]) -> dict[str, str]:
    """A distinct object name for each label, equal to the label where that is possible.

    Args:
        labels: distinct labels, such as the names of scalars.

    Returns:
        Label to name, in the same order.

    Example:
        >>> dataset_names(["loss", "loss/val", "step"])
        {'loss': 'loss', 'loss/val': 'loss_val_1', 'step': 'step_2'}
    """
    names: dict[str, str] = {}
    taken: set[str] = set()
    for index, label in enumerate(labels):
        name = label
        if not _IDENTIFIER.fullmatch(name) or name in RESERVED or len(name) > 64 or name.lower() in taken:
            slug = re.sub(r"[^A-Za-z0-9_]+", "_", label)[:48].strip("_")
            name = f"{slug if slug[:1].isalpha() else 'scalar_' + slug}_{index}".replace("__", "_")
        while name.lower() in taken:
            name += "_"
        taken.add(name.lower())
        names[label] = name
    return names
