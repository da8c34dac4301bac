"""Rules on what trains and what was seen: missing and unobserved gradients, each with its own name and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keelscope.diagnosis.evidence import OUTPUT_GRADIENT, PARAMETER_GRADIENT
from keelscope.diagnosis.finding import Finding, Severity, name_sites
from keelscope.diagnosis.silence import disconnected_parameters
from keelscope.formatting import count

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["RULES", "coverage_gap", "disconnected", "frozen", "never_called", "no_backward", "unregistered_parameters"]

_SILENT = frozenset({"observed", "container", "not_selected"})
_OWN_RULE = frozenset({"unregistered", "unregistered_unused", "frozen", "disconnected", "never_called", "no_backward"})


def disconnected(evidence: Evidence) -> Iterator[Finding]:
    """A trainable parameter of a module that ran gets no gradient at all: the loss does not depend on it.

    Formula: coverage status "disconnected" and no value on the recent steps. ERROR when it concerns the main stack or
    most of the parameters, else WARNING.

    Source: gradient None although requires_grad; detach, .data, numpy, no_grad and reentrant checkpointing do it.

    Remedy: search for detach(), .data, torch.no_grad or an unused output between the named module and the loss.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    paths = disconnected_parameters(evidence)
    if not paths:
        return
    everything = _parameter_paths(evidence)
    stack = {site.path for site in evidence.sites(PARAMETER_GRADIENT) if site.stack}
    grave = 2 * len(paths) > len(everything) or any(path in stack for path in paths)
    owners = _from_the_loss(evidence, owners_of(paths, everything))
    yield Finding(
        "disconnected",
        Severity.ERROR if grave else Severity.WARNING,
        f"No gradient reaches {count(len(paths), 'trainable parameter')} of {name_sites(owners)}, although the "
        f"{'module' if len(owners) == 1 else 'modules'} ran{_nearest(owners)}.",
        sites=owners,
        steps=_recent(evidence),
        value=float(len(paths)),
        threshold=0.0,
        remedy="Search between there and the loss: detach(), .data, no_grad, unused outputs, reentrant checkpointing.",
    )


def _nearest(owners: Sequence[str]) -> str:
    return f"; nearest the loss: {owners[0]}" if len(owners) > 1 else ""


def _from_the_loss(evidence: Evidence, owners: Sequence[str]) -> tuple[str, ...]:
    """Modules in order of execution, the last one first; what was not watched comes last, as listed."""
    order: dict[str, int] = {}
    for index, site in enumerate(evidence.sites(OUTPUT_GRADIENT) or evidence.rows):
        for prefix in _prefixes(site.path):
            order[prefix] = index

    def place(owner: str) -> int:
        return next((order[prefix] for prefix in reversed(_prefixes(owner)) if prefix in order), -1)

    return tuple(sorted(owners, key=place, reverse=True))


def frozen(evidence: Evidence) -> Iterator[Finding]:
    """Parameters with requires_grad=False: no gradient by intent.

    Formula: coverage status "frozen" and no value on the recent steps.

    Source: fine-tuning with a frozen backbone must not read as vanishing.

    Remedy: none needed; unfreezing later is noticed.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    paths = _with_status(evidence, "frozen")
    if paths:
        owners = owners_of(paths, _parameter_paths(evidence))
        statement = f"Frozen (requires_grad is False): {count(len(paths), 'parameter')} of {name_sites(owners)}."
        yield _listed(evidence, "frozen", statement, owners, number=len(paths))


def never_called(evidence: Evidence) -> Iterator[Finding]:
    """Modules with parameters that the forward pass never ran.

    Formula: coverage status "never_called" of parameters that have no value on the recent steps. Only worth knowing
    where all are entries of lists inside a block of which other entries ran: experts that no token chose.

    Source: None gradients of unused modules read as dead layers in most tools; under DDP they are an error.

    Remedy: remove the module, or call it.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    paths = _with_status(evidence, "never_called")
    if paths:
        owners = owners_of(paths, _parameter_paths(evidence))
        statement = f"The forward pass never ran {name_sites(owners)} ({count(len(paths), 'parameter')})."
        chosen = all(_is_passed_over(owner, evidence) for owner in owners)
        remedy = "Remove it, or call it: it costs memory and does not train."
        if chosen:
            statement += " Others of the same lists ran: a choice, as of experts."
            remedy = "None needed, unless the same ones are never chosen."
        severity = Severity.INFO if chosen else Severity.WARNING
        yield _listed(evidence, "never_called", statement, owners, number=len(paths), remedy=remedy, severity=severity)


def _is_passed_over(owner: str, evidence: Evidence) -> bool:
    """Whether a module is an entry of a list, other than a stack, of which another entry has a gradient."""
    container, _, index = owner.rpartition(".")
    if any(container in stack.path.split(",") for stack in evidence.run.info.stacks):
        return False
    others = (path.removeprefix(f"{container}.") for path in _valued(evidence) if path.startswith(f"{container}."))
    return bool(container) and index.isdecimal() and any(other.partition(".")[0].isdecimal() for other in others)


def unregistered_parameters(evidence: Evidence) -> Iterator[Finding]:
    """Trainable tensors that got a gradient and are in no registry, so that no optimizer trains them.

    Formula: leaf tensors with requires_grad in plain attributes, lists, tuples and dictionaries of the modules, and
    parameters of modules held there, that are neither in parameters() nor in buffers(); coverage status "unregistered".
    Those without a gradient are only worth knowing: a list may hold a second model on purpose.

    Source: layers in a Python list instead of a ModuleList, the most frequent cause of "the loss does not go down".

    Remedy: ModuleList, ModuleDict, ParameterList, nn.Parameter or register_buffer.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    entries = [entry for entry in evidence.coverage if entry.status.startswith("unregistered")]
    used = [entry.path for entry in entries if entry.status == "unregistered"]
    paths = used or [entry.path for entry in entries]
    if not paths:
        return
    what = "got a gradient but" if used else "require a gradient, got none, and"
    yield Finding(
        "unregistered_parameters",
        Severity.WARNING if used else Severity.INFO,
        f"{count(len(paths), 'tensor')} ({name_sites(paths)}) {what} "
        f"{'is' if len(paths) == 1 else 'are'} in no registry: parameters(), state_dict() and .to() pass over them.",
        sites=tuple(paths),
        steps=_recent(evidence),
        value=float(len(paths)),
        threshold=0.0,
        remedy="Hold modules in a ModuleList or ModuleDict and tensors in nn.Parameter, ParameterList or a buffer.",
    )


def coverage_gap(evidence: Evidence) -> Iterator[Finding]:
    """Something could not be observed, so that numbers are missing where there may be gradients.

    Formula: coverage status that is neither observed nor explained by another rule, one finding per status.

    Source: silence about missing numbers is the most frequent complaint about gradient loggers.

    Remedy: as the reason says.

    Args:
        evidence: a run at one step.

    Yields:
        One finding per status.
    """
    seen = _valued(evidence)
    gaps: dict[str, list[tuple[str, str]]] = {}
    for entry in evidence.coverage:
        if entry.status not in _SILENT | _OWN_RULE and entry.path not in seen:
            gaps.setdefault(entry.status, []).append((entry.path, entry.reason))
    for status, entries in gaps.items():
        paths = [path for path, _ in entries]
        statement = f"Not observed ({status.replace('_', ' ')}): {_named(paths, 'site')}. {entries[0][1]}".strip()
        yield _listed(evidence, "coverage_gap", statement, paths, number=len(paths))


def no_backward(evidence: Evidence) -> Iterator[Finding]:
    """Steps were recorded, but no gradient arrived anywhere.

    Formula: no value in any gradient series.

    Source: a validation loop, a missing loss.backward(), or a loss under no_grad.

    Remedy: call loss.backward() inside the watch, with gradients enabled.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    keys = [key for key in evidence.run.keys() if key in {OUTPUT_GRADIENT, PARAMETER_GRADIENT}]  # noqa: SIM118
    if not keys or evidence.steps.size == 0:
        return
    if any(np.isfinite(_values(evidence, key)).any() or evidence.observed(key).any() for key in keys):
        return
    yield Finding(
        "no_backward",
        Severity.WARNING,
        f"No gradient arrived on {count(evidence.steps.size, 'recorded step')}: only forward passes were seen.",
        steps=_recent(evidence),
        remedy="Call loss.backward() inside the watch, with gradients enabled.",
    )


def _values(evidence: Evidence, key: str) -> NDArray[np.float64]:
    medians = evidence.recent(key)
    return np.empty(0) if medians is None else medians


def _valued(evidence: Evidence) -> set[str]:
    """Parameters that have a gradient on the recent steps, whatever the coverage said at the start."""
    medians = _values(evidence, PARAMETER_GRADIENT)
    sites = evidence.sites(PARAMETER_GRADIENT)
    return {site.path for site, value in zip(sites, medians, strict=False) if not np.isnan(value)}


def _with_status(evidence: Evidence, status: str) -> list[str]:
    seen = _valued(evidence)
    entries = (entry for entry in evidence.coverage if entry.what == "parameter" and entry.status == status)
    return [entry.path for entry in entries if entry.path not in seen]


def _parameter_paths(evidence: Evidence) -> list[str]:
    return [entry.path for entry in evidence.coverage if entry.what == "parameter"]


def owners_of(paths: Sequence[str], everything: Sequence[str]) -> tuple[str, ...]:
    """The largest modules all of whose parameters are in `paths`; a lone parameter stands for itself.

    Args:
        paths: dotted paths of parameters.
        everything: those of all parameters.

    Returns:
        Module or parameter paths, each once.

    Example:
        >>> owners_of(["enc.0.w", "enc.1.w", "head.w"], ["enc.0.w", "enc.1.w", "head.w", "head.b"])
        ('enc', 'head.w')
    """
    inside = Counter(prefix for path in paths for prefix in _prefixes(path))
    total = Counter(prefix for path in everything for prefix in _prefixes(path))
    whole = [next((p for p in _prefixes(path) if inside[p] == total[p]), path) for path in paths]
    return tuple(dict.fromkeys(whole))


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _named(paths: Sequence[str], noun: str) -> str:
    """``3 modules (a, b and c)``."""
    return f"{count(len(paths), noun, 'biases' if noun == 'bias' else '')} ({name_sites(paths)})"


def _listed(
    evidence: Evidence,
    rule: str,
    statement: str,
    sites: Sequence[str],
    *,
    number: int,
    remedy: str = "",
    severity: Severity = Severity.INFO,
) -> Finding:
    return Finding(rule, severity, statement, tuple(sites), _recent(evidence), float(number), 0.0, remedy)


def _recent(evidence: Evidence) -> tuple[int, int] | None:
    return (int(evidence.steps[0]), int(evidence.steps[-1])) if evidence.steps.size else None


RULES = (no_backward, disconnected, frozen, never_called, unregistered_parameters, coverage_gap)
