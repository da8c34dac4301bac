"""Trainable tensors that a model holds but has not registered: modules in a Python list, tensors as plain attributes.

``parameters()``, ``state_dict()`` and ``.to()`` pass them over, so that no optimizer trains them; nothing in PyTorch
says so. Looked for once, before the model runs, in what the modules hold themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["Unregistered", "find_unregistered"]

_DEPTH = 3
_MOST = 10_000
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


@dataclass(frozen=True, slots=True, eq=False)
class Unregistered:
    """A trainable leaf tensor in no registry."""

    path: str
    """As it is reached in Python, for example ``layers[0].weight``."""
    tensor: Tensor


def find_unregistered(everything: Iterable[tuple[str, nn.Module]]) -> tuple[Unregistered, ...]:
    """Everything trainable that the modules of a model hold without having registered it.

    Args:
        everything: the registered modules by path.

    Returns:
        Each tensor once, in the order of the modules.
    """
    modules = list(everything)
    known = {id(tensor) for _, module in modules for tensor in (*module.parameters(), *module.buffers())}
    known |= {id(module) for _, module in modules}
    found: list[Unregistered] = []
    for path, module in modules:
        for name, value in vars(module).items():
            if name not in _OWN and len(found) < _MOST:
                found += _held(value, f"{path}.{name}" if path else name, known, _DEPTH)
    return tuple(found)


def _held(value: object, path: str, known: set[int], depth: int) -> Iterator[Unregistered]:
    """What a value holds; whatever is met is known from then on."""
    if id(value) in known:
        return
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            known.add(id(value))
            yield Unregistered(path, value)
    elif isinstance(value, nn.Module):
        known.add(id(value))
        for name, parameter in value.named_parameters():
            yield from _held(parameter, f"{path}.{name}", known, depth)
    elif depth and isinstance(value, list | tuple | Mapping) and len(value) <= _MOST:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _held(item, f"{path}[{key!r}]", known, depth - 1)
