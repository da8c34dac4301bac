"""What is to be given back when a step ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

__all__ = ["Handles"]


class Handles:
    """Calls to make, in the reverse order; `contextlib.ExitStack` for places that nearly always hold none.

    Example:
        >>> handles, said = Handles(), []
        >>> handles.callback(said.append, 1)
        >>> handles.callback(said.append, 2)
        >>> handles.close()
        >>> said
        [2, 1]
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    def callback(self, call: Callable[..., object], *arguments: object) -> None:
        """Take in a call.

        Args:
            call: what to call once.
            arguments: with what.
        """
        self._calls.append(partial(call, *arguments) if arguments else call)

    def close(self) -> None:
        """Make them, each once, and forget them; the others also where one raises."""
        while self._calls:
            try:
                self._calls.pop()()
            except BaseException:
                self.close()
                raise
