"""`Diagnosis`: everything that was decided about a run at one step, as a frozen record without rendering.

`Diagnosis.of` runs headline, rules and layer table on one `Evidence`. `keelscope.diagnosis.report.Report` adds the
formats; `keelscope.terminal` and `keelscope.tables` draw it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

from keelscope.diagnosis.evidence import Evidence
from keelscope.diagnosis.explanation import explanation
from keelscope.diagnosis.finding import Severity
from keelscope.diagnosis.headline import Headline, Verdict, Word, verdicts, worst_of
from keelscope.diagnosis.layers import Layer, layer_rows
from keelscope.diagnosis.paths import Paths, paths_of
from keelscope.diagnosis.rules import DEFAULT, findings_of
from keelscope.diagnosis.structure import structure_note
from keelscope.diagnosis.thresholds import thresholds_with
from keelscope.formatting import count, decades

if TYPE_CHECKING:
    from keelscope.diagnosis.axis import DepthAxis
    from keelscope.diagnosis.finding import Finding
    from keelscope.diagnosis.profiles import NamedProfile
    from keelscope.store.reader import Run

__all__ = ["Diagnosis"]

_SEVERAL = 2


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Diagnosis:
    """Verdict, evidence and layer table of a run at one step."""

    run: Run
    step: int
    """The step that the layer table shows; -1 when nothing is recorded."""
    steps: tuple[int, ...]
    """The recorded steps whose median the profiles and the verdict rest on."""
    verdict: Headline
    findings: tuple[Finding, ...]
    """The gravest first."""
    layers: tuple[Layer, ...]
    """In execution order, input side first."""
    profiles: Mapping[str, NamedProfile]
    """Depth profiles by the series they are drawn from, along `axis`."""
    axis: DepthAxis
    """Of the main stack; of the worst one where several are judged."""
    weights_step: int = -1
    """The recorded step that the weights of the layer table are from; -1 when none are recorded."""
    paths: Paths | None = None
    """Shortcut, branches and attribution per residual stream; None where the group ``sublayers`` is not recorded."""

    rules: str = DEFAULT
    """The rule set that the findings come from."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Those that were changed."""
    stacks: tuple[Verdict, ...] = ()
    """What is said of each stack that is judged, the main one first."""

    @classmethod
    def of(
        cls, run: Run, *, step: int = -1, rules: str = DEFAULT, thresholds: Mapping[str, float] | None = None
    ) -> Self:
        """Diagnose a run.

        Args:
            run: any run.
            step: the recorded step to show; -1 is the last one. The verdict rests on it and the steps before it.
            rules: the set that findings come from, ``"default"`` or ``"classic"``; the verdict is the same.
            thresholds: new values of some thresholds, by name.

        Returns:
            The diagnosis.

        Raises:
            UsageError: if a threshold cannot be used.
            UnknownNameError: if that step was not recorded, or there is no such set or threshold.
        """
        evidence = Evidence(run, step=step, thresholds=thresholds_with(thresholds))
        stacks = verdicts(evidence)
        worst = worst_of(stacks)
        return cls(
            run=run,
            step=evidence.step,
            steps=tuple(int(s) for s in evidence.steps),
            verdict=worst.headline,
            findings=findings_of(evidence, rules),
            layers=layer_rows(worst.chain),
            profiles=worst.chain.profiles,
            axis=worst.chain.axis,
            weights_step=evidence.last_step("parameters/norm") if _has_weights(evidence) else -1,
            paths=paths_of(worst.chain),
            rules=rules,
            thresholds=dict(thresholds or {}),
            stacks=stacks,
        )

    @property
    def headline(self) -> Word:
        """The verdict in one word, e.g. ``"vanishing"``."""
        return self.verdict.word

    @property
    def sentence(self) -> str:
        """The verdict in one sentence with its numbers."""
        return self.verdict.sentence

    @property
    def explanation(self) -> str:
        """Why the profile is what it is: shortcut path, total gradient, largest cause; empty where it is not known."""
        why = "" if self.paths is None or self.headline == "dead" else explanation(self.paths)
        earlier = self.paths is not None and self.paths.step not in (-1, self.step)
        if why and earlier and self.paths is not None:
            why = f"At step {self.paths.step}, the last one with paths: {why[0].lower()}{why[1:]}"
        return " ".join(part for part in (self._caveat(), why) if part)

    def _caveat(self) -> str:
        """Said first where the gradient is level and something else is broken."""
        errors = dict.fromkeys(finding.rule for finding in self.findings if finding.severity is Severity.ERROR)
        if not errors or self.headline not in {"flat", "drifting"}:
            return ""
        return f"The gradient alone looks sound, the model is not: {', '.join(errors)}."

    @property
    def profile(self) -> NamedProfile | None:
        """The depth profile that decided, else the first one there is; None without any gradient."""
        decided = self.profiles.get(self.verdict.decided_by)
        return decided if decided is not None else next(iter(self.profiles.values()), None)

    @property
    def total(self) -> str:
        """S of the profile that decided, as text; a dash when none did."""
        profile = self.profiles.get(self.verdict.decided_by)
        return decades(None if profile is None else profile.shape.total)

    @property
    def title(self) -> str:
        """How the run is called: its title, else its file name, else the model's class."""
        path = self.run.path
        return self.run.info.title or (path.stem if path is not None else "") or self.run.info.model_class or "run"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know about the numbers: steps, unit of depth, what was left out."""
        remarks = (profile.remark for profile in self.profiles.values() if profile.remark)
        structure = f"{structure_note(self.run.info.sublayers)} {self._about_first()}".strip()
        steps = (self._about_end(), self._about_steps(), self._about_weights(), self._about_paths())
        depth = (self._about_depth(), self._about_stacks())
        about = (*steps, *self.run.notes, self._about_parameters(), *depth, structure, self._about_rules())
        return (*(note for note in about if note), *remarks)

    def _about_rules(self) -> str:
        changed = ", ".join(f"{name} = {value:g}" for name, value in self.thresholds.items())
        notes = [f"Thresholds differ from their defaults: {changed}."] if changed else []
        if self.rules != DEFAULT:
            notes.append(f"Findings are those of the rule set {self.rules}: absolute limits, not free of scale.")
        return " ".join(notes)

    def _about_end(self) -> str:
        if not self.run.stopped:
            return ""
        rows = count(len(self.run.steps), "row")
        verb = "was" if len(self.run.steps) == 1 else "were"
        return f"The recording process ended without closing the file; {rows} {verb} recovered."

    def _about_weights(self) -> str:
        if self.weights_step in (-1, self.step):
            return ""
        return f"Weights were measured at step {self.weights_step}, the last one with them up to the table's."

    def _about_parameters(self) -> str:
        """Said where columns are gone because of ranks that are missing."""
        recorded = [key for key in ("parameters/norm", "parameter_gradients/norm") if key in self.run]
        shown = any(layer.weight_norm is not None or layer.parameter_gradient_norm is not None for layer in self.layers)
        if not recorded or shown or not self.layers or not self.run.history.absences:
            return ""
        return "Weights and their gradients are left out: the ranks that are missing recorded them, or parts of them."

    def _about_paths(self) -> str:
        if self.paths is None or self.paths.step in (-1, self.step):
            return ""
        return f"Shortcut and branch gains were measured at step {self.paths.step}, the last one with them."

    def _about_steps(self) -> str:
        if not self.steps:
            return "Nothing is recorded."
        if len(self.steps) == 1:
            return f"Verdict and table: step {self.step}, the only recorded step."
        first, last = self.steps[0], self.steps[-1]
        return (
            f"Verdict: median of {count(len(self.steps), 'recorded step')}, {first} to {last}. Table: step {self.step}."
        )

    def _about_first(self) -> str:
        """Why the structure counts fewer sub-layers than the depth axis."""
        found, sites = self.run.info.sublayers, self.axis.sites
        inside = [
            any(f"{path}.".startswith(f"{site.path}.") for i in found for path in (i.site, i.branch)) for site in sites
        ]
        if len(sites) < _SEVERAL or inside[0] or not all(inside[1:]):
            return ""
        return (
            f"None is seen in {sites[0].path}: what enters it needs no gradient, so that no shortcut leads back there."
        )

    def _about_depth(self) -> str:
        stack, total = self.axis.stack, self.axis.length
        if stack is None:
            return f"There is no long stack of like blocks: depth is counted in modules with parameters ({total:g})."
        if not stack.sublayers:
            return f"Depth is counted in blocks ({total:g} of {stack.kind}); sub-layers per block are not known."
        return f"Depth is counted in sub-layers: {total:g} in {count(stack.length, 'entry')} of {stack.kind}."

    def _about_stacks(self) -> str:
        """What is said of every stack, where there are several."""
        if len(self.stacks) < _SEVERAL:
            return ""
        each = [f"{stack.path} {stack.headline.word}{_total_of(stack)}" for stack in self.stacks]
        return f"{len(each)} stacks are judged, the worst makes the headline: {', '.join(each)}."


def _total_of(verdict: Verdict) -> str:
    profile = verdict.chain.profiles.get(verdict.headline.decided_by)
    return "" if profile is None or np.isnan(profile.shape.total) else f" (S {decades(profile.shape.total)})"


def _has_weights(evidence: Evidence) -> bool:
    """Whether any weight is known at the last step that holds their group."""
    key = "parameters/norm"
    return key in evidence.run and evidence.steps.size > 0 and bool(evidence.observed(key)[-1:].any())
