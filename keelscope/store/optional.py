"""Libraries that keelscope uses if they are there, such as pandas and xarray."""

from __future__ import annotations

import importlib
from typing import Any

from keelscope.errors import UsageError

__all__ = ["needed"]


def needed(module: str, extra: str) -> Any:
    """A module of an optional library.

    Args:
        module: its dotted name.
        extra: the extra of keelscope that installs the library.

    Returns:
        The module.

    Raises:
        UsageError: if it is not installed; the message says what to install.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not (error.name and module.startswith(error.name)):
            raise UsageError(f"{package} does not import here: {error}.") from error
        raise UsageError(f"{package} is not installed; pip install 'keelscope[{extra}]'.") from error
