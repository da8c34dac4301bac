"""When a step is complete, and which step a logged number belongs to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from keelscope.errors import UsageError
from keelscope.steps import ScalarPlaces, StepClock, as_optimizers


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


class Wrapper:
    def __init__(self, inner: object) -> None:
        self.optimizer = inner


def test_as_optimizers():
    a, b = optimizer(), optimizer()
    assert as_optimizers(None) == ()
    assert as_optimizers(a) == (a,)
    assert as_optimizers([a, b]) == as_optimizers(iter((a, b))) == (a, b)
    assert as_optimizers(Wrapper(Wrapper(a))) == (a,)


def test_a_wrapper_that_calls_itself_an_optimizer_is_looked_through():
    """Its class is that of an optimizer, its own hooks never run (Accelerate, Lightning)."""

    class Accelerated(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer = inner

    a = optimizer()
    assert as_optimizers(Accelerated(Accelerated(a))) == (a,)


@pytest.mark.parametrize("wrong", [3, "adam", [None], Wrapper(3), nn.Linear(1, 1)])
def test_what_is_no_optimizer(wrong):
    with pytest.raises(UsageError, match=r"optimizer= takes torch optimizers; got \w+"):
        as_optimizers(wrong)


class Log:
    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.events: list[tuple[str, bool]] = []
        self.clock = StepClock(
            optimizers,
            lambda _, closure: self.events.append(("before", closure)),
            lambda _, done: self.events.append(("after", done)),
        )


def test_one_optimizer():
    a = optimizer()
    log = Log(a)
    a.step()
    assert log.events == [("before", False), ("after", True)]
    assert log.clock.completed == 1
    assert not log.clock.partial


def test_several_make_a_step_together():
    a, b = optimizer(), optimizer()
    log = Log(a, b)
    a.step()
    a.step()
    assert log.clock.completed == 0
    assert log.clock.partial
    b.step()
    assert log.clock.completed == 1
    assert [done for event, done in log.events if event == "after"] == [False, False, True]


def test_closures_are_noticed():
    a = optimizer()
    log = Log(a)
    a.step(lambda: torch.ones(()))
    a.step(closure=lambda: torch.ones(()))
    a.step(None)
    a.step(closure=None)
    assert [closure for event, closure in log.events if event == "before"] == [True, True, False, False]


def test_close_gives_hooks_back():
    a = optimizer()
    log = Log(a)
    log.clock.close()
    a.step()
    assert log.events == []
    assert not a._optimizer_step_pre_hooks
    assert not a._optimizer_step_post_hooks


@pytest.mark.parametrize("early", [True, False])
def test_a_name_keeps_its_habit_where_nothing_is_seen(early):
    places = ScalarPlaces()
    completed = [0 if early else 1, *([step if early else step + 1 for step in range(1, 6)])]
    seen = [early if early else None, None, None, early, None, None]
    assert [places.of("loss", done, begun) for done, begun in zip(completed, seen, strict=True)] == [0, 1, 2, 3, 4, 5]


def test_before_the_first_step_everything_belongs_to_it():
    places = ScalarPlaces()
    assert places.of("a", 0, None) == places.of("a", 0, begun=True) == places.of("a", 0, begun=False) == 0
