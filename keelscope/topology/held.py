"""Names of the parameters that modules hold while they run, which may be others than outside (FSDP)."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Container

from torch import nn

from keelscope.identities import Identities

__all__ = ["Held", "Own"]


class Own:
    """The parameters of a model by identity; their names are made when the first one is asked for, as few models do.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = Identities(map(id, model.parameters()))

    def __contains__(self, key: object) -> bool:
        return key in self._known

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """Of all of them."""
        return {id(parameter): name for name, parameter in self._model.named_parameters()}


class Held:
    """Collects them, side by side: nearly all are those that the model has anyway, and need no name."""

    def __init__(self) -> None:
        self._identities = array("Q")
        self._paths: list[str] = []
        self._names: list[str] = []

    def note(self, path: str, module: nn.Module) -> None:
        """A module starts.

        Args:
            path: its path.
            module: the module.
        """
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self._identities.append(id(parameter))
                self._paths.append(path)
                self._names.append(name)

    def beside(self, own: Container[int]) -> dict[int, str]:
        """Names of the others.

        Args:
            own: identity of the parameters that are left out.

        Returns:
            Identity -> name under the latest module that held it.
        """
        held = zip(self._identities, self._paths, self._names, strict=True)
        return {key: f"{path}.{name}" if path else name for key, path, name in held if key not in own}
