"""Chains of like blocks, from the module tree alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from keelscope.stacks import find_stacks, is_container


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Linear(2, 2)


class Counted(Block):
    residual_sublayers = 1


class Tree(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def stacks(model: nn.Module) -> list[tuple[str, str, int]]:
    return [(stack.path, stack.kind, stack.length) for stack in find_stacks(model.named_modules())[0]]


def blocks(n: int, cls: type[nn.Module] = Block) -> list[nn.Module]:
    return [cls() for _ in range(n)]


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (Tree(layers=nn.ModuleList(blocks(4)), head=nn.Linear(2, 2)), [("layers", "Block", 4)]),
        (nn.Sequential(*blocks(3)), [(".", "Block", 3)]),
        (nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)]), [(".", "Linear", 5)]),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()), []),
        (nn.Sequential(nn.ReLU(), nn.ReLU()), []),
        (Tree(layers=nn.ModuleList(blocks(1))), []),
        (nn.Sequential(nn.Embedding(3, 2), *blocks(3), nn.LayerNorm(2)), [(".", "Block", 3)]),
        (
            Tree(stem=nn.Linear(2, 2), one=nn.Sequential(*blocks(2)), two=nn.Sequential(*blocks(3))),
            [("one,two", "Block", 5)],
        ),
        (
            Tree(encoder=Tree(layers=nn.ModuleList(blocks(2))), decoder=Tree(layers=nn.ModuleList(blocks(3)))),
            [("encoder.layers", "Block", 2), ("decoder.layers", "Block", 3)],
        ),
    ],
    ids=["list", "sequential", "linears", "mixed", "no parameters", "one", "with ends", "stages", "two lists"],
)
def test_where_stacks_are(model, wanted):
    assert stacks(model) == wanted


def test_only_the_outermost_counts():
    """Experts inside a block are not depth."""
    experts = [Block(nn.ModuleList(blocks(8))) for _ in range(3)]
    assert stacks(Tree(layers=nn.ModuleList(experts))) == [("layers", "Block", 3)]


def test_the_longest_is_main_and_the_first_of_equals():
    model = Tree(a=nn.ModuleList(blocks(2)), b=nn.ModuleList(blocks(4)), c=nn.ModuleList(blocks(4)))
    found, _ = find_stacks(model.named_modules())
    assert [stack.main for stack in found] == [False, True, False]
    assert find_stacks([]) == ((), {})


def test_positions():
    model = Tree(one=nn.Sequential(*blocks(2)), two=nn.Sequential(*blocks(2)))
    _, members = find_stacks(model.named_modules())
    assert members == {
        "one.0": ("one,two", 0),
        "one.1": ("one,two", 1),
        "two.0": ("one,two", 2),
        "two.1": ("one,two", 3),
    }


def test_a_list_of_alternating_blocks_is_one_stack():
    class Other(Block):
        pass

    (stack,), members = find_stacks(Tree(layers=nn.ModuleList([Block(), Other(), Block(), Other()])).named_modules())
    assert (stack.kind, stack.length) == ("Block/Other", 4)
    assert [position for _, position in members.values()] == [0, 1, 2, 3]


def test_declared_sublayers():
    def sublayers(entries: list[nn.Module]) -> int:
        return find_stacks(Tree(layers=nn.ModuleList(entries)).named_modules())[0][0].sublayers

    assert sublayers(blocks(3, Counted)) == 1
    assert sublayers(blocks(3)) == 0
    assert sublayers([Counted(), Block()]) == 0


def test_wrapped_blocks_are_what_they_wrap():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, _ = find_stacks(Tree(layers=nn.ModuleList(blocks(3, Counted))).named_modules())
    for wrap in (checkpoint_wrapper, lambda module: torch.compile(module, backend="eager")):
        wrapped = Tree(layers=nn.ModuleList([wrap(block) for block in blocks(3, Counted)]))
        found, _ = find_stacks((path, m) for path, m in wrapped.named_modules() if path.count(".") < 2)
        assert found == plain
    linears = nn.Sequential(*[nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)) for _ in range(2)])
    assert stacks(linears) == [(".", "Linear", 2)]


def test_containers():
    assert is_container(nn.ModuleList())
    assert is_container(nn.Sequential())
    assert not is_container(type("MyStack", (nn.Sequential,), {})())
    assert not is_container(nn.Linear(1, 1))


def stages(depths, name="blocks"):
    return nn.ModuleList(Tree(**{name: nn.ModuleList(blocks(depth))}) for depth in depths)


def test_blocks_of_a_few_stages_are_the_stacks():
    assert stacks(Tree(layers=stages([2, 2, 4]))) == [
        (f"layers.{stage}.blocks", "Block", depth) for stage, depth in enumerate((2, 2, 4))
    ]
    assert stacks(Tree(layers=stages([2, 2, 4, 2]))) == [("layers", "Tree", 4)]
    assert stacks(Tree(layers=stages([8, 8], "experts"))) == [("layers", "Tree", 2)]
