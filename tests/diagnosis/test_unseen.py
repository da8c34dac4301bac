"""Models that were labelled without a look at any verdict: headlines, false alarms and sites, counted once over all."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path(__file__).parent
BENCHMARK = SimpleNamespace(**runpy.run_path(str(HERE / "benchmark" / "collect.py")))
SOUND = ("language", "encoders", "vision", "sequences", "generative", "structured", "odd", "deep")
SICK = ("fading", "growing", "broken", "dead", "partial")
MODELS = BENCHMARK.collect(folder=HERE / "unseen", files=SOUND + SICK)
ABSENT = [package for package in ("transformers", "timm", "torchvision") if find_spec(package) is None]
OUTCOMES = {}


def judged(model):
    """The outcome, once for all tests."""
    if model.name not in OUTCOMES:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tensors are tiny
        try:
            OUTCOMES[model.name] = BENCHMARK.outcome_of(model)
        finally:
            torch.set_num_threads(threads)
    return OUTCOMES[model.name]


def faults(kind):
    """Model -> what is wrong with its verdict, of one kind, for all models whose library is here."""
    here = [model for model in MODELS if not any(package in model.needs for package in ABSENT)]
    said = {model.name: [fault for fault in BENCHMARK.faults_of(model, judged(model)) if kind(fault)] for model in here}
    return {name: found for name, found in said.items() if found}, len(here)


def test_headlines_are_right(operators):
    wrong, models = faults(lambda fault: fault.startswith("headline"))
    assert 1 - len(wrong) / models >= 0.97, wrong


def test_no_sound_model_alarms(operators):
    wrong, _ = faults(lambda fault: fault.startswith("false alarm"))
    assert wrong == {}


def test_every_labelled_site_is_named(operators):
    wrong, _ = faults(lambda fault: fault.startswith(("finding", "sites")))
    assert wrong == {}


def test_half_of_the_models_are_sound():
    assert len(MODELS) >= 72
    assert 0.5 <= sum(model.healthy for model in MODELS) / len(MODELS) < 0.7


def test_every_illness_is_there():
    words = {model.headline for model in MODELS}
    assert words == {"healthy", "vanishing", "exploding", "non-finite", "dead", "not enough data"}


def test_names_are_unique_and_every_label_has_its_numbers():
    assert len({model.name for model in MODELS}) == len(MODELS)
    assert [model.name for model in MODELS if "Measured:" not in model.why] == []
