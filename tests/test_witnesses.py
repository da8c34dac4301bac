"""Which parameters tell of backward passes where no probe looks at gradients."""

from __future__ import annotations

import weakref

from torch import nn

from keelscope.models import build
from keelscope.sites import plan_sites
from keelscope.witnesses import Witnesses


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def chosen(model):
    watched = plan_sites(model, "auto").parameters
    witnesses = Witnesses(watched, [weakref.ref(each.parameter) for each in watched])
    return witnesses, [watched[i].site for i in witnesses.chosen()]


def test_one_of_each_stack_entry_and_of_each_module_outside():
    model = nn.ModuleDict({"embedding": nn.Embedding(3, 4), "head": nn.Linear(4, 3)})
    model["blocks"] = nn.ModuleList(Block() for _ in range(6))
    _, sites = chosen(model)
    of_entries = [f"blocks.{i}.norm.weight" for i in range(6)]
    assert [site.path for site in sites] == ["embedding.weight", "head.weight", *of_entries]


def test_the_first_that_is_trained():
    model = nn.Sequential(*(Block() for _ in range(6)))
    for block in model[:3]:
        block.norm.requires_grad_(requires_grad=False)
        block.linear.weight.requires_grad_(requires_grad=False)
    _, sites = chosen(model)
    assert [site.path for site in sites] == [f"{i}.linear.bias" if i < 3 else f"{i}.norm.weight" for i in range(6)]


def test_all_where_these_were_not_enough():
    witnesses, few = chosen(build("pre_ln", depth=4, width=8, heads=2))
    witnesses.are_enough = False
    assert len(witnesses.chosen()) > len(few)
