"""One watched run of a hard case, with everything that a check may ask for; made once and shared by the checks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from adapter import optimizers_of
from torch import nn

import keelscope as ks
from keelscope.calls import Call, ParameterCalls

PROBES = ("default", "inputs", "updates", "clipped_gradients", "norms+sigma_max_exact", "sublayers", "tokens")


@dataclass
class Seen:
    """What was recorded of a case, step by step, and what was said of it."""

    case: ModuleType
    model: nn.Module
    step: Callable[[nn.Module], Any]
    watch: ks.Watch
    reports: list[ks.Report] = field(default_factory=list)
    """After each step, as somebody who looks at the run while it grows sees it."""
    calls: list[Mapping[str, list[Call]]] = field(default_factory=list)
    gradients: list[Mapping[str, ParameterCalls]] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    error: Exception | None = None
    """What the step raised, by design."""
    found: dict[str, list[str]] = field(default_factory=dict)
    """What checks that ran the case again have found, by their name."""

    @property
    def report(self) -> ks.Report:
        """After the last step."""
        return self.reports[-1]

    def value(self, key: str, path: str, step: int = 0) -> float:
        """One recorded number; NaN where nothing was observed."""
        series = self.watch.run[key]
        return float(np.asarray(series.at(step))[series.paths.index(path)])

    def norm(self, path: str) -> float:
        """Gradient norm at the output of a module, or of a parameter."""
        key = "parameter_gradients/norm" if path in dict(self.parameters()) else "gradients/norm"
        return self.value(key, path)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names that a user knows, without those of wrappers."""
        for name, parameter in self.model.named_parameters():
            yield name.removeprefix("_orig_mod.").removeprefix("module."), parameter

    def paths(self) -> set[str]:
        """Every module and parameter."""
        modules = {n.removeprefix("_orig_mod.").removeprefix("module.") for n, _ in self.model.named_modules()}
        return modules | {name for name, _ in self.parameters()}


def watched(case: ModuleType, model: nn.Module, step: Callable[[nn.Module], Any], **options: Any) -> ks.Watch:
    """A watch as a user would make it, over all modules."""
    chosen = {"sites": "all", "probes": PROBES, "calls": True} | options
    return ks.watch(model, optimizer=optimizers_of(case, model, step), **chosen)


def look(case: ModuleType) -> Seen:
    """Build the case and watch all its steps."""
    model, step = case.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch = watched(case, model, step)
        seen = Seen(case, model, step, watch)
        try:
            for _ in range(getattr(case, "N_STEPS", 1)):
                _one_step(seen)
        except Exception as error:
            seen.error = error
        finally:
            watch.close()
    return seen


def _one_step(seen: Seen) -> None:
    loss = seen.step(seen.model)
    if loss is not None:
        seen.watch.log(loss=loss)
    seen.watch.step()
    seen.losses.append(None if loss is None else float(loss))
    seen.calls.append(dict(seen.watch.calls))
    seen.gradients.append(dict(seen.watch.gradients))
    seen.reports.append(ks.diagnose(seen.watch.run))


def close(want: float, got: float, rtol: float = 1e-4) -> bool:
    """Whether two numbers agree, NaN with NaN."""
    return bool(torch.isclose(torch.tensor(got).double(), torch.tensor(want).double(), rtol, 0.0, equal_nan=True))
