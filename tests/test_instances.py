"""Objects of a class are found, and other threads do not notice."""

from __future__ import annotations

import threading

import torch

from keelscope.instances import living


def test_instances_and_those_of_subclasses():
    class Scaler(torch.amp.GradScaler):
        pass

    mine, other = torch.amp.GradScaler("cpu"), Scaler("cpu")
    assert {id(mine), id(other)} <= set(map(id, living(torch.amp.GradScaler)))
    assert [found for found in living(Scaler) if found is not other] == []
    del mine
    assert not any(type(found) is torch.amp.GradScaler and found is not other for found in living(Scaler))


def test_tuples_grow_in_other_threads_meanwhile():
    """With gc.get_objects this raises SystemError within a second."""
    done, problems = threading.Event(), []

    def build() -> None:
        try:
            while not done.is_set():
                assert len(tuple(str(i) for i in range(300))) == 300
        except SystemError as error:
            problems.append(error)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        living(torch.amp.GradScaler)
    done.set()
    for thread in threads:
        thread.join()
    assert problems == []
