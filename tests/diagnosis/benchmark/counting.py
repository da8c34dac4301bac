"""Verdicts on models that were labelled without a look at any: each is judged once, and what is wrong is counted.

A set of such models is a folder of builders; `test_unseen.py` counts two.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch

BENCHMARK = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("collect.py"))))
WORDS = {"healthy", "vanishing", "exploding", "non-finite", "dead", "not enough data"}
"""Labels of which a set needs each."""
ABSENT = [package for package in ("transformers", "timm", "torchvision") if find_spec(package) is None]
KINDS = {"headline": ("headline",), "alarm": ("false alarm",), "site": ("finding", "sites")}
"""Kind -> how a sentence of `faults_of` begins."""


@dataclass(frozen=True)
class Count:
    """The models of a folder and what was said of those asked for so far."""

    models: list
    outcomes: dict = field(default_factory=dict)

    @property
    def here(self):
        """Models whose library is installed."""
        return [model for model in self.models if not any(package in model.needs for package in ABSENT)]

    @property
    def sound(self):
        """The share of models of which an alarm would be false."""
        return sum(model.healthy for model in self.models) / len(self.models)

    @property
    def unmeasured(self):
        """Names of models whose label has no numbers behind it."""
        return [model.name for model in self.models if "Measured:" not in model.why]

    def judged(self, model):
        """The outcome, once for all tests."""
        if model.name not in self.outcomes:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # tensors are tiny
            try:
                self.outcomes[model.name] = BENCHMARK.outcome_of(model)
            finally:
                torch.set_num_threads(threads)
        return self.outcomes[model.name]

    def faults(self, kind):
        """Model -> what is wrong with its verdict, of one kind, where anything is."""
        said = {model.name: BENCHMARK.faults_of(model, self.judged(model)) for model in self.here}
        found = {name: [f for f in faults if f.startswith(KINDS[kind])] for name, faults in said.items()}
        return {name: faults for name, faults in found.items() if faults}


def count(folder, files):
    """A set of models: builders of these files in a folder."""
    return Count(BENCHMARK.collect(folder=folder, files=files))
