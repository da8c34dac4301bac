"""The probe contract: which tensor is observed, for which modules, and what is kept of it.

A probe is any object with the attributes of `Probe`; nothing needs to be inherited. `TensorProbe` is the ready-made
form. Built-in and third-party probes enter through the entry point group ``keelscope.probes``; `keelscope.testing`
holds the conformance check.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from keelscope import plugins
from keelscope.errors import ProbeError, UnknownNameError
from keelscope.jacobian.passage import Passage
from keelscope.sites import SOUGHT
from keelscope.statistics import Statistic
from keelscope.taps import Axis, Tap

__all__ = [
    "DEFAULT_PROBES",
    "Axis",
    "JacobianProbe",
    "Probe",
    "Tap",
    "TensorProbe",
    "available_probes",
    "fits_site",
    "group_of",
    "resolve_probes",
    "seeks",
    "sees_everything",
]

DEFAULT_PROBES = (
    "outputs",
    "gradients",
    "parameters",
    "parameter_gradients",
    "norms",
    "gates",
    "activations",
    "saturation",
)

Tensors = tuple[Tensor, ...]
Together = Callable[[Sequence[Tensors], Sequence[nn.Module]], tuple[NDArray[np.float64], Sequence[int]] | None]
"""Observations and their owners -> ``[observation, column]``, and the places of those that it left out."""


@runtime_checkable
class Probe(Protocol):
    """One phenomenon: a tap, its statistics and the modules it fits.

    Probes with the same `group` are recorded side by side on one site axis; asking for the group asks for all of them.

    `view` picks what is measured (all entries, per head, later tokens) and runs inside the hook: it may not change the
    tensors, keep them, wait for the device or draw random numbers. It returns None where the probe has nothing to say.
    """

    @property
    def name(self) -> str:
        """Name of the probe."""

    @property
    def group(self) -> str:
        """Group in the run file; empty means the name."""

    @property
    def version(self) -> int:
        """Raised when the meaning of a statistic changes."""

    @property
    def tap(self) -> Tap:
        """The tensors it is shown."""

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """What is recorded."""

    @property
    def optional(self) -> tuple[Statistic, ...]:
        """Statistics recorded only when asked for as ``"name+statistic"``."""

    @property
    def every(self) -> int:
        """Recorded on every n-th recorded step."""

    def fits(self, owner: nn.Module) -> bool:
        """Whether this module (or the owner of this parameter) is observed."""

    def view(self, tensors: Tensors, owner: nn.Module) -> Tensors | None:
        """The tensors handed to the terms of every statistic."""


def _every_module(_: nn.Module) -> bool:
    return True


def _no_module(_: nn.Module) -> bool:
    return False


def _as_they_are(tensors: Tensors, _: nn.Module) -> Tensors | None:
    return tensors


@dataclass(frozen=True, slots=True)
class TensorProbe:
    """A probe given by its parts.

    Example:
        >>> from keelscope.statistics import RMS
        >>> isinstance(TensorProbe("outputs", Tap.OUTPUT, (RMS,)), Probe)
        True
    """

    name: str
    tap: Tap
    statistics: tuple[Statistic, ...]
    optional: tuple[Statistic, ...] = ()
    version: int = 1
    every: int = 1
    group: str = ""
    chooses: Callable[[nn.Module], bool] = _every_module
    views: Callable[[Tensors, nn.Module], Tensors | None] = _as_they_are
    seeks: Callable[[nn.Module], bool] = _no_module
    """Modules that it observes even where the selection of sites leaves them out; with the tap `Tap.INPUT` only."""
    computed_only: bool = False
    """Whether tensors that depend on no parameter are left out; that is not known while gradients are disabled."""
    worth: Callable[[Mapping[str, NDArray[np.float64]]], NDArray[np.bool_]] | None = None
    """Optional, with the tap `Tap.INPUT`: values of the first recorded row, ``[site]`` each and NaN where not seen ->
    the sites that are worth recording."""
    together: Together | None = None
    """Optional, with the tap `Tap.RESIDUAL_SUM` and statistics of one kind of terms: what `views` and the terms make of
    many observations, in one call; the tensors are still in the graph."""

    def fits(self, owner: nn.Module) -> bool:
        """Whether `chooses` takes the module."""
        return self.chooses(owner)

    def view(self, tensors: Tensors, owner: nn.Module) -> Tensors | None:
        """What `views` makes of the tensors."""
        return self.views(tensors, owner)


@dataclass(frozen=True, slots=True)
class JacobianProbe:
    """A probe of the Jacobians of stack entries, given by its parts."""

    name: str
    measures: Callable[[Passage, nn.Module], Tensors | None]
    """The Jacobian at one call -> the tensors handed to the terms. Runs inside the hook, under the rules of `view`;
    random numbers come from the passage's own generator."""
    statistics: tuple[Statistic, ...]
    optional: tuple[Statistic, ...] = ()
    version: int = 1
    every: int = 1
    group: str = ""
    chooses: Callable[[nn.Module], bool] = _every_module
    forward_products: bool = False
    """Whether it multiplies with J and not only with J': that takes operations with a second derivative."""
    tap: Tap = field(default=Tap.JACOBIAN, init=False)

    def fits(self, owner: nn.Module) -> bool:
        """Whether `chooses` takes the module."""
        return self.chooses(owner)

    def view(self, tensors: Tensors, owner: nn.Module) -> Tensors | None:  # noqa: ARG002 - part of the contract
        """Nothing: it measures a Jacobian, no tensors."""
        return None


def available_probes() -> dict[str, Probe]:
    """Every installed probe by name, built-in ones first.

    Returns:
        Name -> probe. A package that cannot be loaded is left out with a warning.
    """
    found: dict[str, Probe] = {}
    for _, probe in plugins.load("keelscope.probes"):
        if isinstance(probe, Probe):
            found.setdefault(probe.name, probe)
    return found


def resolve_probes(wanted: str | Probe | Iterable[str | Probe]) -> tuple[Probe, ...]:
    """Probe names and objects as probe objects, each group once.

    Args:
        wanted: ``"default"``, a name, ``"name+statistic"`` for an optional statistic, a probe object, or several; in
            one text with commas between them, too. The name of a probe that has optional ones only stands for them.

    Returns:
        The probes in the order given, those left out that have optional statistics only and none was asked for.

    Raises:
        UnknownNameError: if a name is not installed; near matches are listed.
        ProbeError: if an object is no probe, or two probes would write the same statistic.
    """
    asked = [name.strip() for name in wanted.split(",") if name.strip()] if isinstance(wanted, str) else wanted
    items = [asked] if isinstance(asked, Probe) else list(asked)
    installed = available_probes()
    chosen: dict[str, Probe] = {}
    for item in items:
        for probe in _resolve(item, installed):
            if not isinstance(item, str) and probe.name in chosen and chosen[probe.name] is not probe:
                raise ProbeError(f"two probes are called {probe.name!r}; give one of them another name.")
            chosen[probe.name] = probe
    _check_groups(chosen.values())
    return tuple(probe for probe in chosen.values() if probe.statistics)


def group_of(probe: Probe) -> str:
    """The group a probe writes: its own, or its name."""
    return probe.group or probe.name


def sees_everything(probe: Probe) -> bool:
    """Whether a probe takes the tensors that it is shown as they are."""
    return isinstance(probe, TensorProbe) and probe.views is _as_they_are


def seeks(probe: Probe, module: nn.Module) -> bool:
    """Whether a probe observes a module that the selection of sites leaves out."""
    return isinstance(probe, TensorProbe) and probe.tap is Tap.INPUT and probe.seeks(module)


def fits_site(probe: Probe, module: nn.Module, role: str) -> bool:
    """Whether a probe observes a module that stands at a site of this role."""
    if role == SOUGHT:
        return seeks(probe, module)
    return probe.tap.of_module and (probe.tap is not Tap.JACOBIAN or role == "layer") and probe.fits(module)


def _check_groups(probes: Iterable[Probe]) -> None:
    owners: dict[tuple[str, str], str] = {}
    axes: dict[str, Probe] = {}
    for probe in probes:
        first = axes.setdefault(group_of(probe), probe)
        if first.tap.axis is not probe.tap.axis:
            raise ProbeError(
                f"probes {first.name!r} and {probe.name!r} share the group {group_of(probe)!r}, but one observes "
                f"{first.tap.axis.value}s and the other {probe.tap.axis.value}s; give one of them another group."
            )
        for statistic in probe.statistics:
            other = owners.setdefault((group_of(probe), statistic.name), probe.name)
            if other != probe.name:
                raise ProbeError(
                    f"probes {other!r} and {probe.name!r} both write {group_of(probe)}/{statistic.name}; give one of "
                    "them another group."
                )


def _resolve(item: str | Probe, installed: dict[str, Probe]) -> list[Probe]:
    if item == "default":
        return [
            probe for name in DEFAULT_PROBES for probe in installed.values() if name in {probe.name, group_of(probe)}
        ]
    if isinstance(item, str):
        return _named(item, installed)
    if not isinstance(item, Probe) or isinstance(item, type):
        raise ProbeError(
            f"{item!r} is not a probe: expected name, group, version, tap, statistics, optional, every, fits() and "
            "view(); keelscope.testing.check_probe says what is missing."
        )
    if item.tap is Tap.JACOBIAN and not isinstance(item, JacobianProbe):
        raise ProbeError(f"probe {item.name!r} has the tap JACOBIAN; only a JacobianProbe is shown Jacobians.")
    return [item]


def _called(name: str, installed: dict[str, Probe]) -> list[Probe]:
    """Probes with that name or group."""
    return [probe for probe in installed.values() if name in {probe.name, group_of(probe)}]


def _named(item: str, installed: dict[str, Probe]) -> list[Probe]:
    name, *extras = item.split("+")
    found = _called(name, installed)
    if not found:
        known = sorted({"default", *installed, *map(group_of, installed.values())})
        near = difflib.get_close_matches(name, known, n=3) or known
        raise UnknownNameError(f"no probe is called {name!r}; did you mean {', '.join(near)}?")
    offered = {statistic.name for probe in found for statistic in probe.optional}
    missing = [extra for extra in extras if extra not in offered]
    if missing:
        has = ", ".join(sorted(offered)) or "none"
        raise UnknownNameError(f"probe {name!r} has no optional statistic {missing[0]!r}; it has {has}.")
    if not extras and len(found) == 1 and not found[0].statistics:  # it would record nothing
        extras = sorted(offered)
    return [_extended(probe, extras) for probe in found]


def _extended(probe: Probe, extras: list[str]) -> Probe:
    """The probe with those of its optional statistics that were asked for."""
    more = tuple(statistic for statistic in probe.optional if statistic.name in extras)
    if more and isinstance(probe, TensorProbe | JacobianProbe):
        return replace(probe, statistics=(*probe.statistics, *more))
    return probe
