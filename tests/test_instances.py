from __future__ import annotations

import threading

from torch import nn

from keelscope.instances import instances_of


def test_objects_of_a_class_and_of_its_subclasses_are_found_and_no_others():
    class Wanted(nn.Module): ...

    class Below(Wanted): ...

    class Deeper(Below): ...

    made = [Wanted(), Below(), Deeper()]
    others = [nn.Module(), Wanted]
    assert {id(one) for one in instances_of(Wanted)} == {id(one) for one in made}
    assert all(id(one) not in {id(found) for found in instances_of(Below)} for one in (made[0], *others))


def test_what_is_gone_is_not_found():
    class Wanted: ...

    Wanted()
    assert instances_of(Wanted) == []


def test_tuples_that_another_thread_is_building_are_left_alone():
    class Wanted: ...

    kept, errors, done = Wanted(), [], threading.Event()

    def build():
        try:
            while not done.is_set():
                tuple(str(i) for i in range(50))
        except SystemError as error:
            errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    found = [instances_of(Wanted) for _ in range(15)]
    done.set()
    thread.join()
    assert errors == []
    assert all(len(one) == 1 and one[0] is kept for one in found)
