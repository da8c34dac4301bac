"""Records kept column by column are the records that they were made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from keelscope.store.columns import Columns
from keelscope.store.schema import CoverageEntry, SublayerInfo


@dataclass(frozen=True, slots=True)
class Mixed:
    text: str
    number: int
    other: object


ENTRIES = tuple(
    CoverageEntry(
        f"blocks.{i}", "module" if i % 3 else "parameter", "observed" if i % 2 else "frozen", "Why." * (i % 2)
    )
    for i in range(700)
)


def kinds(records):
    return [[type(value) for value in (record.text, record.number, record.other)] for record in records]


def test_a_sequence_equal_to_the_records():
    kept = Columns(CoverageEntry, ENTRIES)
    assert kept == ENTRIES
    assert kept == Columns(CoverageEntry, iter(ENTRIES))
    assert hash(kept) == hash(ENTRIES)
    assert kept != ENTRIES[:-1]
    assert kept != (*ENTRIES[:-1], replace(ENTRIES[-1], status="never_called"))
    assert (len(kept), kept[0], kept[-1], kept[5:9]) == (700, ENTRIES[0], ENTRIES[-1], ENTRIES[5:9])
    assert list(reversed(kept)) == list(reversed(ENTRIES))
    with pytest.raises(IndexError):
        kept[700]


def test_nothing_of_nothing():
    kept = Columns(SublayerInfo, ())
    assert not kept
    assert kept == ()
    assert list(kept) == []


def test_values_keep_their_kind():
    values = [0.0, -0.0, None, True, 1, "", "\0", (1,), 1 << 70]
    records = [Mixed(str(i % 2), (1 << 62) + i, value) for i, value in enumerate(values)]
    kept = Columns(Mixed, records)
    assert list(kept) == records
    assert kinds(kept) == kinds(records)
    assert str(kept[1].other) == "-0.0"


@pytest.mark.parametrize("numbers", [[1 << 63], [True, 1], [-(1 << 63), (1 << 63) - 1]])
def test_integers_of_any_size(numbers):
    records = [Mixed("", number, None) for number in numbers]
    kept = Columns(Mixed, records)
    assert list(kept) == records
    assert kinds(kept) == kinds(records)


def test_one_of_many_texts():
    records = [Mixed(str(i), i, None) for i in range(257)]
    assert list(Columns(Mixed, records)) == records
    assert list(Columns(Mixed, records[:256])) == records[:256]
