"""Compiled from native/kernel.c where a C compiler was found; `keelscope.kernel` knows whether it is there."""

from typing import TypeVar

from torch import Tensor

_Key = TypeVar("_Key")

def prepare(*of_torch: object) -> None: ...
def measure(program: tuple[object, ...], tensor: Tensor, /) -> dict[_Key, bytes] | None: ...
def measure_all(routine: int, tensors: list[Tensor], /) -> list[bytes | None]: ...
