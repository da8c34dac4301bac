"""A second set of models labelled without a look at any verdict: other architectures and faults than the first."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
COUNTING = SimpleNamespace(**runpy.run_path(str(HERE / "benchmark" / "counting.py")))
SOUND = ("decoders", "readers", "pictures", "signals", "graphs", "methods")
SICK = ("shrinking", "swelling", "invalid", "silent", "beside")
COUNT = COUNTING.count(HERE / "fresh", SOUND + SICK)
pytestmark = pytest.mark.slow


def test_headlines_are_right(operators):
    wrong = COUNT.faults("headline")
    assert 1 - len(wrong) / len(COUNT.here) >= 0.97, wrong


def test_no_sound_model_alarms(operators):
    assert COUNT.faults("alarm") == {}


def test_every_labelled_site_is_named(operators):
    assert COUNT.faults("site") == {}


def test_half_of_the_models_are_sound():
    assert len(COUNT.models) >= 60
    assert 0.5 <= COUNT.sound < 0.7


def test_no_model_is_in_both_sets():
    first = COUNTING.count(HERE / "unseen", [path.stem for path in (HERE / "unseen").glob("*.py")])
    assert {model.name for model in COUNT.models} & {model.name for model in first.models} == set()


def test_every_illness_is_there():
    assert {model.headline for model in COUNT.models} == COUNTING.WORDS


def test_names_are_unique_and_every_label_has_its_numbers():
    assert len({model.name for model in COUNT.models}) == len(COUNT.models)
    assert COUNT.unmeasured == []
