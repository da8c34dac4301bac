"""Sets of identities: what they hold, beside ordinary sets and lists."""

from __future__ import annotations

import random

from keelscope.identities import Identities, Numbered


def test_a_set_holds_what_it_took_in():
    drawn = random.Random(0)
    known, expected = Identities(), set()
    for _ in range(20):
        found = [drawn.randrange(1 << 47) for _ in range(drawn.randrange(9))] + sorted(expected)[:2]
        known.update(iter(found))
        expected |= set(found)
        assert known == expected
        assert (len(known), sorted(known)) == (len(expected), sorted(expected))
        assert all(key in known for key in expected)
        assert not any(key + 1 in known for key in expected if key + 1 not in expected)
    assert "a" not in known
    assert Identities(known) == known
    assert {1} | known == {1, *expected}


def test_a_copy_goes_its_own_way():
    known = Identities([3, 1])
    other = Identities(known)
    other.update([2])
    assert (known, other) == ({1, 3}, {1, 2, 3})


def test_an_empty_set_has_nothing():
    assert 0 not in Identities()
    assert not Identities()


def test_objects_have_their_number():
    objects = [object() for _ in range(50)]
    numbered = Numbered(objects)
    assert [numbered.number(id(one)) for one in objects] == list(range(50))
    assert all(id(one) in numbered for one in objects)
    assert (numbered.number(7), 7 in numbered) == (-1, False)
    assert Numbered([]).number(id(objects[0])) == -1
