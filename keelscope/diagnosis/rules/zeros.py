"""The rule on gradients that arrive and are exactly 0; those that are missing are the subject of `coverage`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from keelscope.diagnosis.asleep import asleep, explains, zero_sites
from keelscope.diagnosis.evidence import OUTPUT_GRADIENT, PARAMETER_GRADIENT
from keelscope.diagnosis.finding import Finding, Severity, name_sites
from keelscope.diagnosis.losses import bad_loss
from keelscope.diagnosis.units import is_cut_by_units
from keelscope.formatting import count

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["RULES", "zero_gradient"]


def zero_gradient(evidence: Evidence) -> Iterator[Finding]:
    """A gradient arrived and is exactly 0, entry by entry, on every recent step.

    Formula: output-gradient RMS, or parameter-gradient norm, equal to 0 on all recent recorded steps. Zero is not
    missing: the graph is connected, but something multiplies by 0. A layer whose gradients underflow is not meant
    (see `vanishing`), nor a branch behind a weight of exactly 0 (see `zero_grad_by_init`, `gate_dead`), nor a model in
    which a rectifier puts out nothing but 0 (see `dead_units`), nor a loss of NaN over no label (see
    `nonfinite_forward`). Biases alone
    are only worth knowing: a convolution bias before BatchNorm and a key bias in attention have gradient 0 by
    construction. ERROR when the input end of a stack, or most of it, is at 0. With a single recorded step the
    severity is INFO if the stack is alive or a weight is 0.

    Source: None against 0.0 in PyTorch; awslabs smdebug "AllZero".

    Remedy: look for a multiplication by 0 (gate, mask, dead activation) towards the output of the named modules.

    Args:
        evidence: a run at one step.

    Yields:
        One finding for modules and weights, one for biases whose module does receive a gradient.
    """
    loss = bad_loss(evidence)
    if is_cut_by_units(evidence) or (loss is not None and loss.of_nothing and evidence.step in loss.steps):
        return  # one cause, one finding: `dead_units` names these modules, or `nonfinite_forward` the loss
    sleepers = asleep(evidence)
    modules = [path for path in zero_sites(evidence, OUTPUT_GRADIENT) if not explains(sleepers, path)]
    silent = [path for path in zero_sites(evidence, PARAMETER_GRADIENT) if not explains(sleepers, path)]
    parameters = [path for path in silent if not _inside(path, modules)]
    biases = [path for path in parameters if path.rpartition(".")[2].endswith("bias")]
    weights = [path for path in parameters if path not in biases]
    if modules and not any(p.shape.floored for chain in evidence.chains for p in chain.profiles.values()):
        also = f", and in {_named(weights, 'parameter')} of others" if weights else ""
        last = f"; nearest the loss: {modules[-1]}" if len(modules) > 1 else ""
        statement = f"The output gradient is exactly 0 in {_named(modules, 'module')}{also}{last}."
        yield _zero_finding(evidence, [*modules, *weights], statement, _module_severity(evidence, modules))
    elif weights:
        statement = f"The gradient is exactly 0 in {_named(weights, 'parameter')}, in modules that do receive one."
        yield _zero_finding(evidence, weights, statement, Severity.WARNING)
    if biases:
        statement = (
            f"The gradient is exactly 0 in {_named(biases, 'bias')}, as it is by construction before BatchNorm "
            "and for attention keys."
        )
        yield _zero_finding(evidence, biases, statement, Severity.INFO)


def _module_severity(evidence: Evidence, modules: Sequence[str]) -> Severity:
    """ERROR when the gradient of the stack stops there, unless a zero weight at the start explains it."""
    if not any(_stops_in(chain, modules) for chain in evidence.chains):
        return Severity.WARNING
    weights = [path for path in zero_sites(evidence, "parameters/norm") if not path.endswith("bias")]
    return Severity.WARNING if weights and evidence.steps.size == 1 else Severity.ERROR


def _stops_in(chain: Evidence, modules: Sequence[str]) -> bool:
    gradient = chain.gradient
    return gradient is not None and gradient.shape.stops and any(site.path in modules for site in chain.axis.sites)


def _inside(parameter: str, modules: Sequence[str]) -> bool:
    return any(not module or parameter.startswith(f"{module}.") for module in modules)


def _zero_finding(evidence: Evidence, sites: Sequence[str], statement: str, severity: Severity) -> Finding:
    single = evidence.steps.size == 1
    if single and severity is Severity.WARNING:
        statement += " Only one step is recorded: zero initialisation (ReZero, LoRA, Fixup) looks the same."
        severity = Severity.INFO
    return Finding(
        "zero_gradient",
        severity,
        statement,
        sites=tuple(sites),
        steps=_recent(evidence),
        value=0.0,
        threshold=0.0,
        remedy="Look towards the output for a multiplication by 0: a closed gate, a mask, a dead activation.",
    )


def _named(paths: Sequence[str], noun: str) -> str:
    """``3 modules (a, b and c)``."""
    return f"{count(len(paths), noun, 'biases' if noun == 'bias' else '')} ({name_sites(paths)})"


def _recent(evidence: Evidence) -> tuple[int, int] | None:
    return (int(evidence.steps[0]), int(evidence.steps[-1])) if evidence.steps.size else None


RULES = (zero_gradient,)
