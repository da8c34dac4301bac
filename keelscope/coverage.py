"""What was observed and what was not, with the reason: the table behind ``watch.coverage``.

Nothing that is missing here is written as 0 anywhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parameter import UninitializedParameter

from keelscope.sites import SOUGHT, SitePlan, WatchedParameter
from keelscope.stacks import is_container
from keelscope.store.columns import Columns
from keelscope.store.schema import CoverageEntry
from keelscope.unregistered import Unregistered

__all__ = ["Coverage", "Seen", "compact", "coverage_table"]

_UNSUMMED = (
    "The ranks hold parts of its gradient that were not added up when the optimizer began; the norm of a sum cannot be "
    "told from them."
)
_REPLACED = (
    "The module has another parameter in its place since: call watch() after fully_shard(), "
    "load_state_dict(assign=True) and the like."
)
_TAKEN_OUT = "Its module is no longer part of the model."
_CONTAINER = ("container", "It only holds other modules and is not called itself.")


_EXPECTED = {"observed", "not_selected", "container"}
_MOST_SHOWN = 20


class Coverage(tuple[CoverageEntry, ...]):
    """The coverage of a watch: a tuple of entries that prints as a short table.

    Example:
        >>> print(Coverage([CoverageEntry("a", "module", "observed"), CoverageEntry("b", "module", "frozen", "Why.")]))
        1 observed, 1 frozen
          b (module): frozen. Why.
    """

    __slots__ = ()

    def __str__(self) -> str:
        counts = Counter(entry.status for entry in self)
        missed = [entry for entry in self if entry.status not in _EXPECTED]
        lines = [f"  {e.path or 'the model'} ({e.what}): {e.status}. {e.reason}" for e in missed[:_MOST_SHOWN]]
        more = [f"  ... {len(missed) - _MOST_SHOWN} more"] if len(missed) > _MOST_SHOWN else []
        return "\n".join([", ".join(f"{number} {status}" for status, number in counts.most_common()), *lines, *more])


def compact(coverage: Coverage) -> Columns[CoverageEntry]:
    """Coverage to be kept as long as a run is written.

    Args:
        coverage: of a watch.

    Returns:
        The same entries, in less room.
    """
    return Columns(CoverageEntry, coverage)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the steps recorded so far have shown."""

    called: Container[int]
    """Identity of modules with a recorded call."""
    with_gradient: Container[int] | None
    """Identity of modules whose output received a gradient; None if no probe looks at gradients of outputs."""
    parameters: Container[int] | None
    """Identity of parameters that received a gradient; None if no probe looks at gradients of parameters."""
    lost: Mapping[int, str]
    """Identity of modules with calls that could not be observed -> why."""
    backward: bool
    """Whether any backward pass was seen."""
    partly: Mapping[int, str] = field(default_factory=dict)
    """Identity of observed modules of which something is missing -> what, and why."""
    unsummed: Container[int] = ()
    """Identity of parameters whose gradient lies on several ranks in parts that were not added up."""
    trainable: Container[int] | None = None
    """Identity of parameters that required a gradient on a recorded step; None if nobody looked."""
    ran: Container[int] = ()
    """Identity of modules that ran on a step when all were listened to, whatever the sites; empty if none was."""

    def is_frozen(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter required no gradient on the recorded steps, whatever it does by now."""
        watched = self.trainable is not None and parameter.is_leaf and not isinstance(parameter, UninitializedParameter)
        return not parameter.requires_grad or (watched and id(parameter) not in self.trainable)  # type: ignore[operator]


def coverage_table(plan: SitePlan, seen: Seen) -> Coverage:
    """One entry per module and parameter of the model.

    Args:
        plan: the sites.
        seen: what happened.

    Returns:
        Modules in registration order, then parameters, then trainable tensors that are in no registry.
    """
    chosen = {id(watched.module) for watched in plan.modules if watched.site.role != SOUGHT}
    modules = (_module(path, module, chosen, seen) for path, module in plan.everything)
    latest = {watched.site.path: watched for watched in plan.parameters}  # what was replaced comes before
    held = {id(module) for module in plan.everything[0][1].modules()}
    parameters = (_parameter(watched, plan, seen, held) for watched in latest.values())
    there = {path for path, _ in plan.everything}
    gone = dict.fromkeys(watched.site.path for watched in plan.modules if watched.site.path not in there)
    left = (CoverageEntry(path, "module", "not_observed", _TAKEN_OUT) for path in gone)
    return Coverage([*modules, *left, *parameters, *map(_unregistered, plan.unregistered)])


def _unregistered(held: Unregistered) -> CoverageEntry:
    """Nobody clears its gradient, unless an optimizer was given it by hand."""
    got = held.tensor.grad is not None
    reason = "parameters() and state_dict() do not hold it. " + ("It got a gradient." if got else "It got no gradient.")
    return CoverageEntry(held.path, "parameter", "unregistered" if got else "unregistered_unused", reason)


def _module(path: str, module: nn.Module, chosen: Container[int], seen: Seen) -> CoverageEntry:
    status, reason = _module_status(module, chosen, seen)
    return CoverageEntry(path, "module", status, reason)


def _module_status(module: nn.Module, chosen: Container[int], seen: Seen) -> tuple[str, str]:
    key = id(module)
    if key in seen.lost and key in chosen and key not in seen.called:
        return "not_observed", f"It was {seen.lost[key]}."
    if key not in chosen:
        uncallable = is_container(module) and not isinstance(module, nn.Sequential)
        return _CONTAINER if uncallable else ("not_selected", "The site selection leaves it out.")
    if key not in seen.called:
        return _uncalled(module, seen)
    if seen.backward and seen.with_gradient is not None and key not in seen.with_gradient:
        if all(map(seen.is_frozen, module.parameters())) and any(True for _ in module.parameters()):
            return "frozen", "None of its parameters requires a gradient and none passes through it."
        return "disconnected", "It ran, but no gradient reached its output."
    return "observed", seen.partly.get(key, "")


def _uncalled(module: nn.Module, seen: Seen) -> tuple[str, str]:
    """A module that did not run as a module: idle, or used without calling it."""
    if is_container(module):
        return _CONTAINER
    if seen.parameters and any(id(p) in seen.parameters for p in module.parameters(recurse=False)):
        return "coverage_gap", (
            "Its parameters received gradients, but no call of the module was seen: the model uses the parameters or "
            "module.forward() directly."
        )
    return "never_called", "The model did not call it on the recorded steps."


def _parameter(watched: WatchedParameter, plan: SitePlan, seen: Seen, held: Container[int]) -> CoverageEntry:
    path, parameter = watched.site.path, watched.parameter
    if seen.parameters is not None and id(parameter) in seen.parameters:
        lost = _is_assigned_anew(watched)
        return CoverageEntry(path, "parameter", *(("not_observed", _REPLACED) if lost else ("observed", "")))
    out_of_sight = _out_of_sight(watched, seen, held)
    if out_of_sight:
        return CoverageEntry(path, "parameter", "not_observed", out_of_sight)
    if isinstance(parameter, UninitializedParameter):
        return CoverageEntry(path, "parameter", "uninitialized", "A lazy parameter that no forward has shaped yet.")
    if seen.is_frozen(parameter):
        return CoverageEntry(path, "parameter", "frozen", "requires_grad is False.")
    if seen.parameters is None:
        return CoverageEntry(path, "parameter", "not_selected", "No probe on gradients of parameters was asked for.")
    status, reason = "no_backward", "No backward pass was seen."
    if seen.backward:
        status, reason = _gradientless(watched, plan.everything, seen)
    return CoverageEntry(path, "parameter", status, reason)


def _is_assigned_anew(watched: WatchedParameter) -> bool:
    """Whether the module has another parameter of the same kind by now; sharded ones take turns in any forward."""
    now = _now(watched)
    return now is not watched.parameter and type(now) is type(watched.parameter) is nn.Parameter


def _now(watched: WatchedParameter) -> nn.Parameter | None:
    """What its module holds under the parameter's name by now."""
    name, held = watched.site.path.rpartition(".")[2], watched.owner._parameters
    return held[name] if name in held else None  # noqa: SIM401 - that of a scripted module has no get()


def _out_of_sight(watched: WatchedParameter, seen: Seen, held: Container[int]) -> str:
    """Why the gradient of a parameter could not be seen although there may be one; empty if it could."""
    if id(watched.parameter) in seen.unsummed:
        return _UNSUMMED
    if id(watched.owner) not in held:
        return _TAKEN_OUT
    now = _now(watched)
    return _REPLACED if watched.parameter.requires_grad and now is not watched.parameter and now is not None else ""


def _gradientless(
    watched: WatchedParameter, everything: Iterable[tuple[str, nn.Module]], seen: Seen
) -> tuple[str, str]:
    """Why a trainable parameter has no gradient although a backward pass ran."""
    path = watched.site.path.rpartition(".")[0]
    line = [module for name, module in everything if path == name or path.startswith(f"{name}.") or not name]
    idle = bool(seen.ran) and id(watched.owner) not in seen.ran
    if id(watched.owner) not in seen.called and (idle or not any(id(module) in seen.called for module in line[1:])):
        return "never_called", "Its module did not run on the recorded steps."
    return "disconnected", "Its module ran, but the loss does not depend on the parameter through the graph."
