"""Models that were labelled without a look at any verdict: headlines, false alarms and sites, counted once over all."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
COUNTING = SimpleNamespace(**runpy.run_path(str(HERE / "benchmark" / "counting.py")))
FILES = {
    "unseen": "language encoders vision sequences generative structured odd deep fading growing broken dead partial",
    "fresh": "decoders readers pictures signals graphs methods shrinking swelling invalid silent beside",
}
LEAST = {"unseen": 72, "fresh": 60}
COUNTS = {name: COUNTING.count(HERE / name, files.split()) for name, files in FILES.items()}
SETS = ["unseen", pytest.param("fresh", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", SETS)
def test_headlines_are_right(name, operators):
    wrong = COUNTS[name].faults("headline")
    assert 1 - len(wrong) / len(COUNTS[name].here) >= 0.97, wrong


@pytest.mark.parametrize("name", SETS)
def test_no_sound_model_alarms(name, operators):
    assert COUNTS[name].faults("alarm") == {}


@pytest.mark.parametrize("name", SETS)
def test_every_labelled_site_is_named(name, operators):
    assert COUNTS[name].faults("site") == {}


@pytest.mark.parametrize("name", FILES)
def test_half_of_the_models_are_sound_and_every_illness_is_there(name):
    count = COUNTS[name]
    assert len(count.models) >= LEAST[name]
    assert 0.5 <= count.sound < 0.7
    assert {model.headline for model in count.models} == COUNTING.WORDS


@pytest.mark.parametrize("name", FILES)
def test_names_are_unique_and_every_label_has_its_numbers(name):
    count = COUNTS[name]
    assert len({model.name for model in count.models}) == len(count.models)
    assert count.unmeasured == []


def test_no_model_is_in_both_sets():
    first, second = ({model.name for model in COUNTS[name].models} for name in FILES)
    assert first & second == set()
