"""Stacks: chains of like blocks, found from the module tree alone.

A stack is a ``ModuleList`` (or ``Sequential``) of blocks, or several sibling ones of the same block class, as the
stages of a ResNet. A ``ModuleDict`` with the keys 0, 1, 2, ... is one too; one that begins with a later key is a stage
of a model that lies on several ranks. Only the outermost stack counts: an expert list inside a block is not depth. Two
or three stages that hold lists of blocks each (Swin) are no depth either, but their blocks are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from keelscope.store.schema import Stack

__all__ = ["class_name", "find_stacks", "is_container", "is_wrapper", "unwrapped"]

Members = dict[str, tuple[str, int]]
_Entry = tuple[str, str, nn.Module]
"""Path of the container, path of the entry, the entry."""

_LISTS = frozenset({"blocks", "block", "layers", "layer"})
_FEW_STAGES = 3  # a slope over depth needs more
_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "OptimizedModule", "CheckpointWrapper"})


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module only wraps the user's one: data-parallel, compiled, checkpointed."""
    return type(module).__name__ in _WRAPPERS


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module inside wrappers."""
    while is_wrapper(module):
        module = next(module.children())
    return module


def class_name(module: nn.Module) -> str:
    """The user's class name, also after FSDP2 (``FSDPLinear``) or a parametrization (``ParametrizedLinear``)."""
    return _user_class(module).__name__


def _user_class(module: nn.Module) -> type[nn.Module]:
    cls = type(unwrapped(module))
    for prefix in ("FSDP", "Parametrized"):
        if cls.__name__.startswith(prefix) and len(cls.__mro__) > 2:
            inner = [base for base in cls.__mro__[1:] if base.__name__ == cls.__name__[len(prefix) :]]
            cls = inner[0] if inner else cls
    return cls


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others: ModuleList, ModuleDict, Sequential, ParameterList, ParameterDict."""
    plain = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
    return isinstance(module, plain) and type(module).__module__.startswith("torch.")


def find_stacks(modules: Iterable[tuple[str, nn.Module]]) -> tuple[tuple[Stack, ...], Members]:
    """Find the stacks of a model.

    Args:
        modules: ``(path, module)`` of the whole model in registration order.

    Returns:
        The stacks, the longest one marked as main, and ``{entry path: (stack path, position)}``.

    Example:
        >>> net = nn.Sequential(nn.Embedding(9, 4), *[nn.TransformerEncoderLayer(4, 1, 8) for _ in range(3)])
        >>> stacks, members = find_stacks(net.named_modules())
        >>> stacks[0].kind, stacks[0].length, members["3"]
        ('TransformerEncoderLayer', 3, ('.', 2))
    """
    families: dict[tuple[str, str], list[_Entry]] = {}
    begins: dict[str, int] = {}
    for path, module in modules:
        begins[path] = next(iter(_numbers(module)), 0)
        for entries in _entry_groups(path, module):
            key = _family(path, module, entries)
            families.setdefault(key, []).extend((path, name, child) for name, child in entries)
    chains = [family for family in families.values() if len(family) > 1 or begins[family[0][0]]]
    return _as_stacks(_outermost(chains), begins)


def _outermost(families: list[list[_Entry]]) -> list[list[_Entry]]:
    """Leave out what lies inside an entry of another stack: an expert list inside a block is not depth."""
    lists = {container for family in families for container, _, _ in family}
    kept = [family for family in families if not _holds_stages(family, lists)]
    entries = {name for family in kept for _, name, _ in family}
    return [family for family in kept if not any(above in entries for above in _ancestors(family[0][0]))]


def _holds_stages(family: list[_Entry], lists: Iterable[str]) -> bool:
    """Whether these few entries are stages: each holds a list of blocks that goes by such a name."""
    named = {path.rpartition(".")[0] for path in lists if path.rpartition(".")[2] in _LISTS}
    return len(family) <= _FEW_STAGES and all(name in named for _, name, _ in family)


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _entry_groups(path: str, container: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The blocks of one container, by class; empty where it holds none."""
    if not isinstance(container, nn.ModuleList | nn.Sequential) and not _numbers(container):
        return []
    children = [(f"{path}.{name}" if path else name, child) for name, child in container.named_children()]
    blocks = [(name, child) for name, child in children if _is_block(child)]
    if not isinstance(container, nn.Sequential) and len(blocks) == len(children):
        return [blocks] if blocks else []
    by_class: dict[type[nn.Module], list[tuple[str, nn.Module]]] = defaultdict(list)
    for name, child in blocks:
        by_class[_user_class(child)].append((name, child))
    uniform = len(children) > 1 and len({_user_class(child) for _, child in children}) == 1
    if uniform and not blocks and not is_container(children[0][1]) and any(True for _ in children[0][1].parameters()):
        return [children]
    return [group for group in by_class.values() if len(group) > 1 or isinstance(container, nn.Sequential)]


def _numbers(container: nn.Module) -> list[int]:
    """The keys of a ModuleDict that are consecutive numbers."""
    keys = list(container._modules) if isinstance(container, nn.ModuleDict) else []
    numbers = [int(key) for key in keys if key.isdecimal()]
    consecutive = numbers == list(range(numbers[0], numbers[0] + len(keys))) if numbers else False
    return numbers if consecutive else []


def _is_block(module: nn.Module) -> bool:
    module = unwrapped(module)
    return not is_container(module) and any(module.children()) and any(True for _ in module.parameters())


def _family(path: str, container: nn.Module, entries: list[tuple[str, nn.Module]]) -> tuple[str, str]:
    """Sequential siblings of the same block class are one stack; a ModuleList stands for itself."""
    kind = _user_class(entries[0][1]).__qualname__
    return (path.rpartition(".")[0], kind) if type(container) is nn.Sequential and path else (path + "/", kind)


def _as_stacks(families: list[list[_Entry]], begins: Mapping[str, int]) -> tuple[tuple[Stack, ...], Members]:
    stacks: list[Stack] = []
    members: Members = {}
    for family in families:
        containers = list(dict.fromkeys(container for container, _, _ in family))
        path = ",".join(container or "." for container in containers)
        kinds = list(dict.fromkeys(class_name(child) for _, _, child in family))
        if any(stack.path == path for stack in stacks):
            path = f"{path}:{kinds[0]}"
        begin = begins[containers[0]]
        stacks.append(Stack(path, "/".join(kinds[:3]), begin + len(family), _declared_sublayers(family)))
        members.update({name: (path, position) for position, (_, name, _) in enumerate(family, begin)})
    longest = max((stack.length for stack in stacks), default=0)
    main = next((i for i, stack in enumerate(stacks) if stack.length == longest), -1)
    return tuple(replace(stack, main=i == main) for i, stack in enumerate(stacks)), members


def _declared_sublayers(family: list[_Entry]) -> int:
    """Residual sub-layers per entry, if the block class says so with an int attribute `residual_sublayers`."""
    declared = {getattr(_user_class(child), "residual_sublayers", 0) for _, _, child in family}
    value = declared.pop() if len(declared) == 1 else 0
    return value if isinstance(value, int) else 0
