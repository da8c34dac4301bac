"""Which modules and parameters are observed, under which labels."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from keelscope.errors import UnknownNameError
from keelscope.sites import clean_path, is_norm, plan_sites, relabelled


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.gate = nn.LayerNorm(4), Attention(), nn.Parameter(torch.ones(1))
        self.act = nn.GELU()

    def forward(self, x):
        return x + self.gate * self.act(self.attention(self.norm(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.norm = nn.Linear(4, 4), nn.RMSNorm(4)

    def forward(self, x):
        return self.query(self.norm(x))


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(7, 4), nn.Dropout(0.1)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.final_norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7, bias=False)

    def forward(self, ids):
        x = self.dropout(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def paths(model: nn.Module, sites="auto") -> list[str]:
    return [watched.site.path for watched in plan_sites(model, sites).modules]


def test_auto():
    """Entries of the stack, their children with parameters, every norm in them, and what owns parameters outside."""
    inside = [f"blocks.{i}{name}" for i in range(3) for name in ("", ".norm", ".attention", ".attention.norm")]
    assert paths(Model()) == ["embedding", *inside, "final_norm", "head"]


def test_leaves_and_all():
    model = Model(1)
    named = dict(model.named_modules())
    assert paths(model, "leaves") == [p for p, m in named.items() if not list(m.children()) and p != "blocks"]
    assert paths(model, "all") == [p for p in named if p != "blocks"]


@pytest.mark.parametrize(
    ("sites", "wanted"),
    [
        ("blocks.?.norm", ["blocks.0.norm", "blocks.1.norm"]),
        (re.compile(r"\.query$"), ["blocks.0.attention.query", "blocks.1.attention.query"]),
        (nn.Embedding, ["embedding"]),
        ((nn.Embedding, nn.RMSNorm), ["embedding", "blocks.0.attention.norm", "blocks.1.attention.norm"]),
        (lambda path, module: path.endswith("act") and isinstance(module, nn.GELU), ["blocks.0.act", "blocks.1.act"]),
        (["head", nn.Embedding], ["embedding", "head"]),
        ({"head"}, ["head"]),
    ],
)
def test_selectors(sites, wanted):
    assert paths(Model(2), sites) == wanted


@pytest.mark.parametrize("sites", ["block.0", re.compile("layers"), nn.Conv2d, ["head", "haed"]])
def test_a_selector_that_matches_nothing_names_near_paths(sites):
    with pytest.raises(UnknownNameError, match=r"matches no module; module paths look like '"):
        plan_sites(Model(), sites)


def test_labels():
    plan = plan_sites(Model(), "all")
    sites = {watched.site.path: watched.site for watched in plan.modules}
    assert (sites["blocks.1"].role, sites["blocks.1"].stack, sites["blocks.1"].position) == ("layer", "blocks", 1)
    assert (sites["blocks.1.norm"].role, sites["blocks.1.norm"].position) == ("norm", 1)
    assert (sites["blocks.2.attention.query"].role, sites["blocks.2.attention.query"].numel) == ("branch", 20)
    assert (sites["embedding"].role, sites["embedding"].stack, sites["embedding"].position) == ("other", "", -1)
    assert (sites["final_norm"].role, sites["final_norm"].stack) == ("norm", "")
    assert sites["blocks.0.attention"].kind == "Attention"
    parameters = {watched.site.path: watched for watched in plan.parameters}
    assert parameters["blocks.2.gate"].site.position == 2
    assert parameters["blocks.2.gate"].owner is dict(plan.everything)["blocks.2"]
    assert list(parameters) == [name for name, _ in Model().named_parameters()]


def test_shared_modules_and_parameters_are_one_site_with_aliases():
    model = Model()
    model.head.weight = model.embedding.weight
    model.again = model.blocks[1]
    plan = plan_sites(model, "all")
    aliases = {watched.site.path: watched.site.aliases for watched in (*plan.modules, *plan.parameters)}
    assert aliases["embedding.weight"] == ("head.weight",)
    assert aliases["blocks.1"] == ("again",)
    assert aliases["blocks.1.gate"] == ("again.gate",)
    assert "head.weight" not in aliases
    assert "again" not in aliases


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("", ""),
        ("_orig_mod", ""),
        ("_orig_mod.blocks.0", "blocks.0"),
        ("blocks.0._checkpoint_wrapped_module.mlp.weight", "blocks.0.mlp.weight"),
        ("_fsdp_wrapped_module.layer._orig_mod.weight", "layer.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_clean_path(path, clean):
    assert clean_path(path) == clean


def test_wrappers_are_looked_through():
    model = Model()
    wanted = plan_sites(model)
    compiled = plan_sites(torch.compile(model, backend="eager"))
    assert compiled == wanted
    inside = Model()
    inside.blocks[1] = torch.compile(inside.blocks[1], backend="eager")
    assert paths(inside) == [watched.site.path for watched in wanted.modules]


def test_checkpoint_wrapped_blocks():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    wanted = plan_sites(model)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    plan = plan_sites(model)
    assert [w.site for w in plan.modules] == [w.site for w in wanted.modules]
    assert [w.site for w in plan.parameters] == [w.site for w in wanted.parameters]
    assert plan.stacks == wanted.stacks


def test_parametrized_modules_keep_their_class():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.ReLU())
    plan = plan_sites(model, "all")
    assert [(w.site.path, w.site.kind) for w in plan.modules] == [("", "Sequential"), ("0", "Linear"), ("1", "ReLU")]
    assert [w.site.path for w in plan.parameters] == [
        "0.bias",
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
    ]


def test_lazy_modules_have_no_size_yet():
    plan = plan_sites(nn.Sequential(nn.LazyLinear(3)), "all")
    assert [w.site.numel for w in plan.parameters] == [0, 0]


@pytest.mark.parametrize(
    ("module", "norm"),
    [
        (nn.LayerNorm(2), True),
        (nn.BatchNorm2d(2), True),
        (nn.RMSNorm(2), True),
        (type("LlamaRMSNorm", (nn.Module,), {})(), True),
        (nn.Linear(2, 2), False),
        (type("NormThenLinear", (nn.Sequential,), {})(nn.LayerNorm(2), nn.Linear(2, 2)), False),
    ],
)
def test_norms_are_known_by_their_class_name(module, norm):
    assert is_norm(module) == norm


def test_labels_that_have_not_changed_stay_the_same_objects():
    model = nn.Sequential(nn.LayerNorm(2), nn.LazyLinear(3))
    plan = plan_sites(model, "leaves")
    again = relabelled(plan, model)
    assert all(new is old for new, old in zip(again.modules, plan.modules, strict=True))
    assert all(new is old for new, old in zip(again.parameters, plan.parameters, strict=True))
    model(torch.ones(1, 2))
    later = relabelled(plan, model)
    assert [new is old for new, old in zip(later.modules, plan.modules, strict=True)] == [True, False]
    assert later.modules[1].site.numel == 9
