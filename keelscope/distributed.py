"""What this rank holds of a model that runs on several: asked from the model itself, without any communication.

Other ranks may not be watching, and a collective that they do not join hangs the training. So each rank records what it
can know alone, once: `survey` says which parameters are whole, split or repeated here, and what a rank's share of the
batch stands for. The reader combines the ranks (`StatisticSpec.across_ranks`).

```
                    replica                     shard                        local
DDP, replicate      rank 0 records the whole
fully_shard, TP                                 each rank its own entries
anything else                                                                each rank its own, rank 0 is shown
```
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keelscope.entries import is_measurable, local_shard
from keelscope.instances import living
from keelscope.probe import Probe
from keelscope.sites import SitePlan
from keelscope.statistics import Statistic
from keelscope.store.schema import PartInfo
from keelscope.taps import Axis, Tap

__all__ = ["Ranks", "is_awaiting_sync", "is_sharded", "place", "survey"]

Values = dict[str, NDArray[np.float64]]
_Group = tuple[int, ...]
"""Ranks that hold the same or parts of the same, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """What one rank knows of its part in a run; the default is a run on one process."""

    rank: int = 0
    size: int = 1
    batches: int = 1
    """Number of ranks that train on other data and average their gradients, this one included."""
    divisor: float = 1.0
    """What the gradients of a rank are divided by when they are summed over the ranks."""
    kinds: tuple[str, ...] = ()
    """Of each parameter: ``"replica"``, ``"shard"`` or ``"local"``."""
    counted: NDArray[np.bool_] = field(default_factory=lambda: np.ones(0, np.bool_))
    """Of each parameter, whether this rank records it: of several ranks with the same entries the first does."""
    parts: NDArray[np.float64] = field(default_factory=lambda: np.ones(0))
    """Of each parameter, all its entries over those on this rank; NaN where none is."""
    widths: NDArray[np.float64] = field(default_factory=lambda: np.ones(0))
    """Of each module, the number of ranks that its output is spread over."""

    @property
    def reduce(self) -> str:
        """Of the groups of parameters: ``"shard"`` as soon as one is split, ``""`` on one process."""
        if self.size == 1:
            return ""
        return next((kind for kind in ("shard", "replica") if kind in self.kinds), "local")

    def records(self, statistic: Statistic, tap: Tap) -> bool:
        """Whether a statistic is recorded: of the entries on one rank only those that can be put together again.

        Args:
            statistic: the statistic.
            tap: what it is taken from.

        Returns:
            False for what cannot be known of a parameter of which this rank holds a part.
        """
        return bool(statistic.across_ranks) or tap.axis is not Axis.PARAMETER or self.reduce != "shard"

    def combination(self, statistic: Statistic, tap: Tap) -> str:
        """How the values of the ranks combine here, see `StatisticSpec.across_ranks`.

        Args:
            statistic: the statistic.
            tap: what it is taken from.

        Returns:
            The statistic's own way; ``""`` for parameters that no rank holds a part of.
        """
        whole = tap.axis is Axis.PARAMETER and self.size > 1 and self.reduce != "shard"
        return "" if whole else statistic.across_ranks

    def share(self, tap: Tap) -> float:
        """What gradients of this rank's loss are multiplied by to be those of the mean over all ranks.

        Args:
            tap: what is observed.

        Returns:
            The factor; 1 for parameters, whose gradients are averaged already, and for gates, see `whole`.
        """
        return 1.0 / self.divisor if tap.of_gradient and tap.axis in {Axis.MODULE, Axis.SUBLAYER} else 1.0

    def whole(self, probe: Probe, values: Values, observed: NDArray[np.bool_], gates: Sequence[int]) -> None:
        """Turn what this rank saw into what it records, in place.

        Args:
            probe: the probe.
            values: statistic -> ``[site, ...]``.
            observed: ``[site]``.
            gates: of each gate the index of the parameter that it is, or -1; only looked at for sites that are gates.
        """
        if self.size == 1:
            return
        if probe.tap.axis is Axis.PARAMETER:
            observed &= self.counted
            for statistic in probe.statistics:
                if self.records(statistic, probe.tap):
                    self._of_shards(statistic, values[statistic.name], observed)
                else:
                    del values[statistic.name]
            return
        for statistic in probe.statistics:
            if probe.tap is Tap.GATE_GRADIENT or statistic.grows:
                factors = self._like_this(probe.tap, statistic.grows, gates)
                values[statistic.name] *= factors.reshape(-1, *[1] * len(statistic.dims))

    def _of_shards(self, statistic: Statistic, values: NDArray[np.float64], observed: NDArray[np.bool_]) -> None:
        """What the entries here add to the whole, in place: a part of a mean square, and 0 where there are none."""
        values[~self.counted] = np.nan
        if self.reduce == "shard" and statistic.across_ranks == "root_sum_squares":
            values *= (self.parts ** (statistic.grows - 0.5)).reshape(-1, *[1] * len(statistic.dims))
            values[observed & np.isnan(self.parts)] = 0.0

    def _like_this(self, tap: Tap, grows: float, gates: Sequence[int]) -> NDArray[np.float64]:
        """``[site]`` or ``[1]``: what turns a value of this rank's entries into that of all, were they like them."""
        if tap.axis is Axis.MODULE:
            return np.asarray((self.batches * self.widths) ** grows)
        if tap is Tap.GATE_GRADIENT:
            of_batch = self.batches**grows / self.divisor
            return np.array([self.parts[i] ** grows if i >= 0 else of_batch for i in gates])
        return np.array([float(self.batches) ** grows])

    def part(self) -> PartInfo:
        """What a run file says of where it comes from."""
        return PartInfo(rank=self.rank, world_size=self.size)

    def provenance(self, tap: Tap) -> dict[str, str]:
        """How numbers were taken, for the provenance of a group.

        Args:
            tap: what is observed.

        Returns:
            Key -> text; empty on one process.
        """
        if self.size == 1:
            return {}
        if tap.axis is Axis.PARAMETER:
            return {"reduce": self.reduce, "ranks": _PARAMETERS[self.reduce]}
        said = {"reduce": "local", "ranks": "each its own calls"}
        if self.batches > 1:
            said["ranks"] = f"each its own batch, norms and counts as if all {self.batches} batches were like it"
            said |= {"average": f"divided by {self.divisor:g}, as gradients are averaged"} if tap.of_gradient else {}
        return said


_PARAMETERS = {
    "replica": "the first of those with the same parameters",
    "shard": "each its own entries, those that several hold once",
    "local": "each its own parameters",
}


def place() -> tuple[int, int]:
    """Rank of this process and number of ranks; 0 and 1 without a process group."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def survey(plan: SitePlan) -> Ranks:
    """What this rank holds, from the model as it is now.

    Args:
        plan: the sites of the model.

    Returns:
        The record; without a process group of several ranks that of a run on one process.
    """
    rank, size = place()
    if size == 1:
        return Ranks()
    parameters = [watched.parameter for watched in plan.parameters]
    averaging = _Averaging.of(plan)
    synchronised = _data_parallel(parameters)
    groups = {group for p in parameters for group in _groups(p)} | set(synchronised.values()) | averaging.groups
    holders = [_holders(p, rank) for p in parameters]
    batches = max([len(averaging.ranks), *map(len, synchronised.values())])
    return Ranks(
        rank,
        size,
        batches,
        averaging.divisor or float(batches),
        tuple(_kind(p, groups) for p in parameters),
        np.array([_counted(rank, held, groups) for held in holders], np.bool_),
        np.array([_parts(p) for p in parameters]),
        np.array([_width(watched.module, averaging.groups) for watched in plan.modules]),
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the module."""
    return hasattr(module, "_get_fsdp_state")


def is_awaiting_sync(modules: Iterable[nn.Module]) -> bool:
    """Whether gradients lie on this rank that ``fully_shard`` has not reduced yet: more micro-batches will come.

    Args:
        modules: of the model.

    Returns:
        True between the backward passes of one step under ``set_requires_gradient_sync(False)``.
    """
    for group in _sharded(modules):
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            if parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                return True
    return False


@dataclass(frozen=True, slots=True)
class _Averaging:
    """How ``fully_shard`` averages gradients."""

    groups: frozenset[_Group] = frozenset()
    ranks: _Group = (0,)
    divisor: float | None = None

    @classmethod
    def of(cls, plan: SitePlan) -> _Averaging:
        found = list(_sharded(module for _, module in plan.everything))
        if not found:
            return cls()
        largest = max(found, key=lambda group: len(_data_ranks(group.mesh_info)))
        groups = frozenset(one for group in found for one in _data_groups(group.mesh_info))
        return cls(groups, _data_ranks(largest.mesh_info), getattr(largest, "gradient_divide_factor", None))


def _sharded(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The parameter groups of ``fully_shard``."""
    for module in modules:
        state: Any = module._get_fsdp_state() if is_sharded(module) else None  # type: ignore[operator]
        several = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in several if group is not None)


def _data_dims(info: Any) -> list[int]:
    dims = (getattr(info, "replicate_mesh_dim", None), getattr(info, "shard_mesh_dim", None))
    return [dim for dim in dims if dim is not None]


def _data_ranks(info: Any) -> _Group:
    return _along(info.mesh, _data_dims(info))


def _data_groups(info: Any) -> list[_Group]:
    return [_along(info.mesh, [dim]) for dim in _data_dims(info)]


def _along(mesh: Any, dims: Sequence[int]) -> _Group:
    """The ranks that differ from this one in some coordinates of a mesh only."""
    here = mesh.get_coordinate()
    if here is None:
        return ()
    place = tuple(slice(None) if dim in dims else at for dim, at in enumerate(here))
    return tuple(sorted(int(rank) for rank in mesh.mesh[place].reshape(-1)))


def _groups(parameter: Tensor) -> list[_Group]:
    """The groups of ranks that a distributed parameter lies on, one for each dimension of its mesh."""
    mesh = getattr(parameter, "device_mesh", None)
    return [] if mesh is None else [_along(mesh, [dim]) for dim in range(mesh.ndim)]


def _split_dims(parameter: Tensor) -> list[int]:
    placements = getattr(parameter, "placements", ())
    return [dim for dim, one in enumerate(placements) if not one.is_replicate() and not one.is_partial()]


def _holders(parameter: Tensor, rank: int) -> _Group:
    """The ranks that hold entries of the parameter of which each lies on one of them."""
    mesh = getattr(parameter, "device_mesh", None)
    return (rank,) if mesh is None else _along(mesh, _split_dims(parameter))


def _counted(rank: int, holders: _Group, groups: Iterable[_Group]) -> bool:
    """Whether this rank is the first in every group of ranks over which its entries are repeated."""
    repeated = (group for group in groups if set(group) & set(holders) == {rank})
    return bool(holders) and all(rank == group[0] for group in repeated)


def _parts(parameter: nn.Parameter) -> float:
    here = local_shard(parameter.detach()).numel() if is_measurable(parameter) else 0
    return parameter.numel() / here if here else math.nan


def _kind(parameter: Tensor, groups: Iterable[_Group]) -> str:
    if _split_dims(parameter):
        return "shard"
    return "replica" if any(len(group) > 1 for group in groups) else "local"


def _data_parallel(parameters: Sequence[nn.Parameter]) -> dict[int, _Group]:
    """Identity of each parameter inside a live ``DistributedDataParallel`` -> the ranks that share it."""
    from torch.nn.parallel import DistributedDataParallel

    wanted = {id(parameter) for parameter in parameters}
    found: dict[int, _Group] = {}
    for wrapper in living(DistributedDataParallel):
        ranks = tuple(sorted(torch.distributed.get_process_group_ranks(wrapper.process_group)))
        found |= {id(p): ranks for p in wrapper.parameters() if id(p) in wanted}
    return found


def _width(module: nn.Module, data: frozenset[_Group]) -> float:
    """Over how many ranks the output of a tensor-parallel layer is spread: those that its output features are."""
    weight = module._parameters.get("weight")
    features = 0 if isinstance(module, nn.Linear) else 1 if isinstance(module, nn.Embedding) else None
    if weight is None or features is None:
        return 1.0
    groups, placements = _groups(weight), getattr(weight, "placements", ())
    wide = (len(g) for g, one in zip(groups, placements, strict=True) if g not in data and one.is_shard(features))
    return float(math.prod(chain([1], wide)))
