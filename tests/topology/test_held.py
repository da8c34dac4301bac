"""Names of parameters that modules hold while they run."""

from __future__ import annotations

from torch import nn

from keelscope.topology.held import Held, Own


def test_others_are_named_after_the_latest_module_that_held_them():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    held = Held()
    held.note("", first)
    held.note("a.b", second)
    assert held.beside({id(first.weight)}) == {id(first.bias): "bias", id(second.weight): "a.b.weight"}
    second.weight = first.bias
    held.note("c", second)
    assert held.beside({id(first.weight)})[id(first.bias)] == "c.weight"


def test_those_that_the_model_has_need_no_name():
    module = nn.Linear(2, 2)
    held = Held()
    held.note("a", module)
    assert held.beside({id(parameter) for parameter in module.parameters()}) == {}


def test_parameters_of_a_model_have_the_names_that_it_gives_them():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model[1].weight = model[0].bias
    own = Own(model)
    assert all(id(parameter) in own for parameter in model.parameters())
    assert id(model) not in own
    assert own.names == {id(parameter): name for name, parameter in model.named_parameters()}
