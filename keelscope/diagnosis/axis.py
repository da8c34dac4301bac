"""Which sites make up the depth axis of a run, and the rows of its layer table.

The write half has labelled the sites (role, stack, position); here they become one chain from input to output.
`evidence` reads series onto it, `layers` fills the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from keelscope.analysis.profile import MIN_LAYERS
from keelscope.store.schema import Site, Stack

if TYPE_CHECKING:
    from keelscope.store.reader import Run

__all__ = ["DepthAxis", "Unit", "depth_axis", "entries_of", "row_owner", "row_sites"]

Unit = Literal["sub-layer", "block", "module"]

_CHAIN = 8
_PROJECTION = re.compile(
    r"((w|to|linear|lin|proj)_?)?(?P<what>q|k|v|query|key|value|queries|keys|values)(_?(proj|linear|lin|layer))?"
)
_MODULE_GROUPS = ("outputs", "gradients")
_PARAMETER_GROUPS = ("parameter_gradients", "parameters", "updates")


@dataclass(frozen=True, slots=True)
class DepthAxis:
    """The chain of layers that depth is counted along."""

    sites: tuple[Site, ...]
    """One per layer, input side first."""
    stack: Stack | None
    """The main stack; None when the model has none, or only a short one beside a long chain of other layers."""

    @property
    def unit(self) -> Unit:
        """What depth counts: sub-layers where blocks say how many they hold, else blocks; modules without a stack."""
        if self.stack is None:
            return "module"
        return "sub-layer" if self.stack.sublayers else "block"

    @property
    def per_layer(self) -> int:
        """Units of depth per layer."""
        return self.stack.sublayers if self.stack is not None and self.stack.sublayers else 1

    @property
    def depth(self) -> NDArray[np.float64]:
        """``[layer]``: units between the input of the chain and the output of each layer."""
        if self.stack is None:
            return np.arange(1.0, len(self.sites) + 1)
        return np.array([(site.position + 1.0) * self.per_layer for site in self.sites])

    @property
    def length(self) -> float:
        """L: depth of the whole chain."""
        return float(self.per_layer * (self.stack.length if self.stack is not None else len(self.sites)))

    @property
    def first_block(self) -> int:
        """Layers of the first block (two sub-layers), which some schemes treat differently by design."""
        return 0 if self.stack is None else max(1, 2 // self.per_layer)

    def __len__(self) -> int:
        return len(self.sites)


def depth_axis(run: Run) -> DepthAxis:
    """The depth axis of a run: the entries of its main stack, else its layer rows in execution order.

    A main stack of less than 4 entries is passed over only where at least 8 other layers make up a chain, or where
    several short stacks (the two sides of a U-Net) hold 4 entries together: embedding and head beside a short stack are
    no depth. Of an encoder and a decoder with short stacks, the decoder is the chain. Outside stacks, those of an
    attention that project to queries and keys lie beside the one to values and are left out.

    Args:
        run: any run.

    Returns:
        The axis; empty when the run holds no module and no parameter.
    """
    rows = row_sites(run)
    stack = _main_stack(run)
    entries = [] if stack is None else entries_of(rows, stack, run.info.stacks)
    stacked = sum(site.role == "layer" for site in rows)
    if len(entries) >= MIN_LAYERS or (entries and stacked < MIN_LAYERS and len(rows) - len(entries) < _CHAIN):
        return DepthAxis(tuple(sorted(entries, key=lambda site: site.position)), stack)
    return DepthAxis(_one_way(_last_chain(rows)), None)


def _last_chain(rows: tuple[Site, ...]) -> tuple[Site, ...]:
    """The rows from the last input on: an embedding behind a stack begins a chain of its own, as that of a decoder."""
    for start in range(len(rows) - MIN_LAYERS, 0, -1):
        behind = any(site.role == "layer" for site in rows[:start])
        begins = "Embedding" in rows[start].kind and "Embedding" not in rows[start - 1].kind
        if behind and begins and any(site.role == "layer" for site in rows[start:]):
            return rows[start:]
    return rows


def _one_way(rows: tuple[Site, ...]) -> tuple[Site, ...]:
    """The rows without projections to queries and keys where one to values, of the same class, lies beside them."""
    places = [(site, _projection(site.path), (site.path.rpartition(".")[0], site.kind)) for site in rows]
    values = {place for _, what, place in places if what == "v"}
    chain = tuple(site for site, what, place in places if what not in ("q", "k") or place not in values)
    return chain if len(chain) >= MIN_LAYERS else rows


def _projection(path: str) -> str:
    """q, k or v for a module that is called like a projection of an attention, else empty."""
    found = _PROJECTION.fullmatch(path.rpartition(".")[2].lower())
    return found["what"][0] if found else ""


def entries_of(rows: Sequence[Site], stack: Stack, stacks: Sequence[Stack]) -> list[Site]:
    """The entries of a stack; where one container holds several stacks, by class.

    Args:
        rows: the rows of the layer table.
        stack: one of `stacks`.
        stacks: all of them.

    Returns:
        Sites, in the order of the rows.
    """
    entries = [site for site in rows if site.role == "layer" and site.stack == stack.path]
    if sum(other.path == stack.path for other in stacks) > 1:
        entries = [site for site in entries if site.kind in stack.kind.split("/")]
    return entries


def _main_stack(run: Run) -> Stack | None:
    stacks = run.info.stacks
    flagged = [stack for stack in stacks if stack.main]
    return flagged[0] if flagged else max(stacks, key=lambda stack: stack.length, default=None)


def row_sites(run: Run) -> tuple[Site, ...]:
    """The rows of the layer table: entries of every stack, and parameter-owning modules outside them.

    Args:
        run: any run.

    Returns:
        Sites in execution order; from the parameters' owners when no module was observed.
    """
    modules = _sites_of(run, _MODULE_GROUPS)
    if not modules:
        return _owner_sites(_sites_of(run, _PARAMETER_GROUPS), run.info.stacks)
    layers = [site for site in modules if site.role == "layer"]
    stacked = {site.stack for site in layers}
    return tuple(s for s in modules if s.role == "layer" or (s.numel > 0 and (not s.stack or s.stack not in stacked)))


def _sites_of(run: Run, groups: Iterable[str]) -> list[Site]:
    """Sites of the groups that exist, each path once, in the order of the first group that has it."""
    found: dict[str, Site] = {}
    for name in groups:
        spec = run.groups.get(name)
        for site in spec.sites if spec is not None else ():
            found.setdefault(site.path, site)
    return list(found.values())


def _owner_sites(parameters: Sequence[Site], stacks: Sequence[Stack]) -> tuple[Site, ...]:
    """Stand-ins for modules: the stack entries and the modules that own the parameters outside."""
    kinds = {stack.path: stack.kind for stack in stacks}
    groups: dict[tuple[str, int, str], list[str]] = {}
    for site in parameters:
        owner = "" if site.stack else site.path.rpartition(".")[0]
        groups.setdefault((site.stack, site.position, owner), []).append(site.path)
    sites = []
    for (stack, position, owner), paths in groups.items():
        path = _entry_path(paths) if stack else owner
        sites.append(Site(path, kinds.get(stack, ""), "layer" if stack else "other", stack, position))
    return tuple(sites)


def _entry_path(paths: Sequence[str]) -> str:
    """The dotted path that all parameters of one stack entry share, at most down to the last number in it."""
    split = [path.split(".")[:-1] for path in paths]
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*split, strict=False))
    shared = [parts[0] for parts in alike]
    while len(shared) > 1 and not shared[-1].isdigit() and any(part.isdigit() for part in shared):
        shared.pop()
    return ".".join(shared)


def row_owner(path: str, rows: dict[str, int]) -> int:
    """The row that a parameter belongs to: the innermost listed module that contains it.

    Args:
        path: dotted path of the parameter.
        rows: row number by module path.

    Returns:
        The row number, -1 when no row contains it.

    Example:
        >>> row_owner("blocks.0.mlp.weight", {"": 0, "blocks.0": 1}), row_owner("cls", {"": 0, "blocks.0": 1})
        (1, 0)
    """
    owner = path
    while owner:
        owner = owner.rpartition(".")[0]
        if owner in rows:
            return rows[owner] if owner or "." not in path else -1
    return -1
