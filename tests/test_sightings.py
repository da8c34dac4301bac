"""What steps have shown: most show what the one before did."""

from __future__ import annotations

from torch import nn

from keelscope.calls import StepRecord
from keelscope.pages import Sheet
from keelscope.sightings import Sightings
from keelscope.sites import plan_sites


class Page:
    """What a page takes of two sites."""

    def __init__(self, seen: bytes) -> None:
        self.seen = seen

    def take(self) -> tuple[bytes, bytes]:
        return self.seen, bytes(2 * 22 * 8)


def test_a_step_like_the_one_before_shows_nothing_new_and_another_does(monkeypatch):
    plan = plan_sites(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), "leaves")
    noted = []
    note = Sightings.note
    monkeypatch.setattr(Sightings, "note", lambda self, *args: (noted.append(1), note(self, *args)))
    sightings = Sightings()
    first, second = (id(watched.module) for watched in plan.modules)

    def show(seen: bytes, trainable: set[int], changes: int) -> int:
        before = len(noted)
        step = StepRecord(page=Page(seen))
        sightings.note_like(plan, step, Sheet(step, lambda _: None), lambda: trainable, changes)
        return len(noted) - before

    assert [show(b"\1\0", {5}, 1), show(b"\1\0", {5}, 1)] == [1, 0]
    assert sightings.called == {first}
    assert show(b"\1\3", {5}, 1) == 1
    assert (sightings.called, sightings.with_gradient) == ({first, second}, {second})
    assert [show(b"\1\3", {5, 6}, 2), show(b"\1\3", {5, 6}, 2)] == [1, 0]
    assert sightings.trainable == {5, 6}
