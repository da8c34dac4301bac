from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keelscope.store.privacy import redacted

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=50),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abcdef", max_size=5), inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "key", ["key", "API_KEY", "apiKey", "hf_token", "hfToken", "secret", "db.password", "credentials"]
)
def test_text_under_the_name_of_a_secret_is_removed(key):
    assert redacted({"x": [{key: "hunter2"}]}) == {"x": [{key: "(removed)"}]}


@pytest.mark.parametrize(("key", "value"), [("tokenizer", "bpe"), ("tokens", 512), ("key", 3), ("monkey", "x")])
def test_other_settings_are_kept(key, value):
    assert redacted({key: value}) == {key: value}


@settings(max_examples=30)
@given(st.dictionaries(st.text("abcdef"), JSON, max_size=4))
def test_json_values_are_kept_as_they_are(config):
    assert redacted(config) == json.loads(json.dumps(config))


def test_what_json_lacks_becomes_numbers_or_text():
    stored = redacted({"a": np.float32(0.5), "b": np.int64(3), "c": float("nan"), "d": (1, 2), "e": Path("x"), 5: 1})
    assert stored == {"a": 0.5, "b": 3, "c": "nan", "d": [1, 2], "e": "x", "5": 1}
    json.dumps(stored, allow_nan=False)


def test_long_text_is_cut():
    assert len(redacted({"source": "x" * 50_000})["source"]) < 10_100
