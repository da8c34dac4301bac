from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keelscope.errors import UsageError
from keelscope.store.names import RESERVED, check_name, clean, clean_text, dataset_names


@given(st.lists(st.text(), unique=True))
def test_any_labels_get_distinct_names_that_netcdf_accepts(labels):
    names = dataset_names(labels)
    assert list(names) == labels
    assert len({name.lower() for name in names.values()}) == len(labels)
    for name in names.values():
        assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)
        assert name not in RESERVED


def test_an_ordinary_label_keeps_its_name():
    assert dataset_names(["loss", "lr_0"]) == {"loss": "loss", "lr_0": "lr_0"}


def test_labels_that_differ_in_case_only_get_names_that_differ_in_more():
    first, second = dataset_names(["Loss", "loss"]).values()
    assert first.lower() != second.lower()


@pytest.mark.parametrize("name", ["", "a/b", "1st", "a b", "ä", "x" * 65, "step", "site", "observed", "kind"])
def test_names_of_objects_are_plain_identifiers(name):
    with pytest.raises(UsageError, match="cannot be called"):
        check_name(name, "A group")


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"])))
def test_labels_without_control_characters_are_kept(label):
    assert clean(label) == label


def test_control_characters_are_replaced_and_text_keeps_its_lines():
    assert clean("a\x1b[31m\n\x00\ud800") == "a\ufffd[31m\ufffd\ufffd\ufffd"
    assert clean_text("a\n\tb\x1b") == "a\n\tb\ufffd"
